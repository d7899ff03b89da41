"""Problems that a user should know about, but that did not stop a load."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sdk.api.config import EngineConfig
from sdk.api.sizes import format_bytes
from sdk.engine.executor import Ranks
from sdk.engine.rank.runner import ModelRunner
from sdk.kernels.self_check import failures
from sdk.loading.device import Device
from sdk.loading.quant_report import LayerReport, quant_report
from sdk.models.architecture import architecture
from sdk.models.configs.keys import unknown_keys
from sdk.models.leftovers import Leftovers
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint

if TYPE_CHECKING:
    from sdk.models.configs.config import ModelConfig
    from sdk.quant.tokenizer import Tokenizer

logger = logging.getLogger("sdk")


class OtherStages(NamedTuple):
    """What the stages before the last one have: linear layers, and tensors that nobody uses."""

    layers: tuple[LayerReport, ...]
    unused: frozenset[str] | None


def other_stages(executor: Ranks[ModelRunner], config: EngineConfig) -> OtherStages:
    if config.pipeline_parallel_size == 1:
        return OtherStages((), None)
    width = config.tensor_parallel_size
    # the first rank of each stage, stage 0 first
    first = executor.on_ranks(_of_rank)[width::width][::-1]
    layers = tuple(layer for found, _ in first for layer in found)
    return OtherStages(layers, frozenset.intersection(*(unused for _, unused in first)))


def _of_rank(runner: ModelRunner) -> tuple[tuple[LayerReport, ...], frozenset[str]]:
    return quant_report(runner.model.linears()).layers, frozenset(runner.unused_tensors)


def unread_keys(checkpoint: Checkpoint, values: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a config, or of a file's metadata, that nothing reads."""
    if isinstance(checkpoint, RewrittenCheckpoint):
        checkpoint = checkpoint.inner
    unknown = unknown_keys(values)
    if checkpoint.format == "gguf":  # its config has the keys that its metadata were read into
        overridden = (key for key in unknown if key not in checkpoint.config)
        return (*getattr(checkpoint, "unread_keys", ()), *overridden)
    return tuple(unknown)


def load_warnings(
    executor: Ranks[ModelRunner],
    others: OtherStages,
    headers: Checkpoint,
    model: ModelConfig,
    *,
    device: Device | None,
    unread_keys: Sequence[str],
    tokenizer: Tokenizer | None,
) -> Iterator[str]:
    """One line each. ``device``: what ``device="auto"`` became.

    :raises CheckpointError: a tensor of the language model is not used.
    """
    runner = executor.runner
    texts = [_slow_kernels(runner)]
    if device is not None and device.warns:
        texts.append(f"device='auto' is the CPU, not the GPU: {device.reason}")
    if (answers := runner.ops.context.answers) is not None:
        texts += answers.failures()
    texts.append(executor.warning)
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
    own = architecture(model.model_type)
    if headers.format == "gguf" and own is not None and own.layer.experts_bias:
        yield (
            "the file lacks the bias of each layer's experts, which llama.cpp's converter leaves "
            "out: results are llama.cpp's, and differ from those of the model's folder"
        )
    if headers.format == "gguf" and own is not None and own.gguf and own.gguf.rows_as_stored:
        yield (
            "rows of queries, keys and values are read one head after the other, as llama.cpp's "
            "converter leaves them: results are those of the model's folder, and differ from "
            "llama.cpp's, which reads all queries first"
        )
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
    drafting = runner.config.drafting
    if drafting is not None and drafting.head is not None and drafting.head.block:
        from sdk.memory.drafting_heads import is_of_block

        unused = [name for name in unused if not is_of_block(drafting.head, name)]
    found = Leftovers.of(
        unused,
        everything,
        model.num_layers,
        ignored=ignored,
        sharing=model.sharing_layers,
        only_text=headers.format == "gguf",
        generates=model.causal,
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
