"""Problems that a user should know about, but that did not stop a load."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sdk.kernels.self_check import failures
from sdk.memory.sizes import format_bytes
from sdk.models.config_keys import unknown_keys
from sdk.models.leftovers import Leftovers
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint
from sdk.reports.quant_report import LayerReport, quant_report

if TYPE_CHECKING:
    from sdk.engine.rank.runner import ModelRunner
    from sdk.models.config import ModelConfig
    from sdk.quant.tokenizer import Tokenizer

logger = logging.getLogger("sdk")


class OtherStages(NamedTuple):
    """What the stages before the last one have: linear layers, and tensors that nobody uses."""

    layers: tuple[LayerReport, ...]
    unused: frozenset[str] | None


def unread_keys(checkpoint: Checkpoint, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a config, or of a file's metadata, that nothing reads."""
    if isinstance(checkpoint, RewrittenCheckpoint):
        checkpoint = checkpoint.inner
    if checkpoint.format == "gguf":
        return tuple(getattr(checkpoint, "unread_keys", ()))
    return tuple(unknown_keys(values))


def warnings_of(
    runner: ModelRunner,
    others: OtherStages,
    headers: Checkpoint,
    model: ModelConfig,
    *,
    on_cards: bool,
    unread_keys: Sequence[str],
    tokenizer: Tokenizer | None,
) -> Iterator[str]:
    """One line each. ``on_cards``: several ranks, on GPUs.

    :raises CheckpointError: a tensor of the language model is not used.
    """
    texts = [_slow_kernels(runner)]
    if on_cards:
        from sdk.executors.nccl import process_may_end

        texts.append(process_may_end())
    for text in texts:
        if text is not None:
            logger.warning(text)
            yield text
    if runner.ops.context.offloaded:
        text = (
            f"{format_bytes(runner.ops.context.offloaded)} of the weights are offloaded from their "
            "device's memory and read again in every step, which is slow"
        )
        logger.warning(text)
        yield text
    if unread_keys:
        where = "the metadata" if headers.format == "gguf" else "config.json"
        yield f"{where}: keys that nothing reads have no effect: {', '.join(unread_keys)}"
    if tokenizer is not None:
        yield from tokenizer.warnings
    yield from _leftovers(runner, others, headers, model)
    for layer in (*others.layers, *quant_report(runner.model.linears()).layers):
        for kernel, why in failures(layer.declined):
            text = f"{layer.name}: {kernel} {why}; {layer.kernel} runs it"
            logger.warning(text)
            yield text


def _leftovers(
    runner: ModelRunner, others: OtherStages, headers: Checkpoint, model: ModelConfig
) -> list[str]:
    """The tensors that no stage uses. :raises CheckpointError: results depend on one of them."""
    unused = runner.unused_tensors
    if others.unused is not None:
        unused = [name for name in unused if name in others.unused]
    everything = (entry.name for entry in headers.entries())
    ignored = getattr(runner.model, "ignored_tensors", ())
    found = Leftovers.of(
        unused,
        everything,
        model.num_layers,
        ignored=ignored,
        only_text=headers.format == "gguf",
    )
    found.check(headers.path, model.model_type)
    return found.warnings()


def _slow_kernels(runner: ModelRunner) -> str | None:
    """Why everything runs on the reference kernels; None if it does not."""
    ops = runner.ops
    if ops.context.backend_names != ("reference",):
        return None
    why = dict(ops.context.declined_backends).get("cpu" if ops.device.type == "cpu" else "gpu")
    if why is None:  # no other backend was requested
        return None
    # SmolLM2-135M Q4_1 on a CPU: 1.65 instead of 180 tokens/s in decoding (docs/log.md)
    return f"this model runs on the reference kernels, about 100 times slower: {why}"
