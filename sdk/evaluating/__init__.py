"""Compares a model with a reference on the same text, and measures its memory and speed."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from sdk.api.config import EngineConfig, ProgressCallback
from sdk.api.errors import RequestError
from sdk.api.load_progress import reporting
from sdk.api.options import engine_config
from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.engine.engine import Output
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.evaluating.divergence import Comparison
from sdk.evaluating.logits import opened
from sdk.kernels.kv.tiers import TIER_PAGE_SIZE
from sdk.loading.load import Loaded
from sdk.memory.resolve import model_config, open_model
from sdk.text.token_sequences import Text, evaluation_text, token_sequences

#: The most tokens decoded to measure the speed.
_DECODED = 64
#: The speed is measured with half of a sequence as the prompt; neither half may be empty.
_FEWEST_TOKENS = 16
#: Options that evaluate() sets itself for both models.
_OWN_OPTIONS = (
    *("max_model_len", "max_num_seqs", "skip_tokenizer_init"),
    *("tensor_parallel_size", "pipeline_parallel_size"),
)
#: Options that the reference gets too; the step size because both are compared step by step.
_SHARED_OPTIONS = ("hf_overrides", "num_threads", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of :func:`evaluate`. Divergences are in nats, sizes are bytes in memory, speeds
    are measured once. ``windows``: the number of sequences."""

    model: str
    reference: str
    compute: str
    kv_dtype: str
    windows: int
    tokens: int
    kl_mean: float
    kl_p99: float
    #: Share of the positions, 0 to 1, whose most likely token is the reference's.
    top1: float
    perplexity: float
    reference_perplexity: float
    weight_bytes: int
    bits_per_weight: float
    kv_bytes_per_token: int
    prompt_tokens_per_second: float
    decode_tokens_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


def evaluate(
    model: str | PathLike[str],
    reference: str | PathLike[str] | None = None,
    *,
    text: Text | None = None,
    windows: int = 8,
    tokens: int = 512,
    on_progress: ProgressCallback | None = None,
    **options: Any,
) -> Evaluation:
    """Compare ``model``, run as in production, with ``reference`` in exact arithmetic.

    Both read the same sequences of tokens, each as one prompt, and their predictions after every
    token are compared; both are in memory at once. Tokens are generated only to measure speed.

    Args:
        model: a GGUF file, a folder with safetensors, or a hub id.
        reference: the same; default: ``model`` itself, which measures only the quantization of
            activations, keys and values.
        text: one or more texts, or lists of token ids; default: the first 64 KiB of Python's help
            topics, which :func:`sdk.quantize` does not use for calibration.
        windows: the most sequences to take from the text.
        tokens: tokens per sequence, at least 16.
        on_progress: called with ``("evaluate", sequences done, sequences)``; returns False to stop.
        options: of :class:`sdk.LLM` for ``model``: ``compute="exact"`` with
            ``kv_cache_dtype="float32"`` measures only the loss of the weights,
            ``quantization="int4"`` quantizes them while loading. With a ``kv_policy`` every page
            moves to its lowest tier once the next page begins, which is the worst case of a full
            cache, and a step has 128 tokens. ``hf_overrides``, ``num_threads`` and
            ``max_num_batched_tokens`` apply to the reference too.

    Raises:
        CheckpointError: a model is missing or damaged.
        RequestError: too little text, a bad option, models with different vocabularies, or logits
            that are not finite.
        OutOfMemoryError: the two models do not fit into memory together.
        LoadCancelled: ``on_progress`` returned False.
    """
    if tokens < _FEWEST_TOKENS:
        raise RequestError(f"tokens: expected {_FEWEST_TOKENS} or more, found {tokens}")
    for name in _OWN_OPTIONS:
        if name in options:
            raise RequestError(f"{name}: evaluate() sets it itself; leave it out")
    shared: dict[str, Any] = {
        "max_model_len": tokens,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }
    exact = {"compute": "exact", "kv_cache_dtype": "float32"}
    if options.get("kv_policy") is not None:  # steps that end at page boundaries
        options["max_num_batched_tokens"] = TIER_PAGE_SIZE
    both = {name: options[name] for name in _SHARED_OPTIONS if name in options}
    own = engine_config(model, **{**shared, **options})
    other = engine_config(model if reference is None else reference, **{**shared, **both, **exact})
    ids = _same_sequences(own, other, evaluation_text() if text is None else text, windows, tokens)
    return _compared(own, other, ids, on_progress)


def _compared(
    own: EngineConfig, other: EngineConfig, ids: Tensor, on_progress: ProgressCallback | None
) -> Evaluation:
    """``ids`` int64 ``[S, T]``: the sequences that both read."""
    with opened(own) as tested, opened(other) as known:
        comparison = Comparison()
        with reporting("evaluate", "sequence", on_progress) as report:
            report(0, len(ids))
            for done, row in enumerate(ids, 1):
                _compare(known, tested, row, comparison, own.model)
                report(done, len(ids))
        prompt_speed, decode_speed = _speeds(tested, ids[0].tolist())
        plan = tested.facts.plan
        weight_bytes, num_weights = _weights(own)
        known_perplexity, perplexity = comparison.perplexities
        return Evaluation(
            model=own.model,
            reference=other.model,
            compute=own.compute,
            kv_dtype=plan.kv_dtype,
            windows=len(ids),
            tokens=ids.shape[1],
            kl_mean=comparison.mean(),
            kl_p99=comparison.quantile(0.99),
            top1=comparison.agreement,
            perplexity=perplexity,
            reference_perplexity=known_perplexity,
            weight_bytes=weight_bytes,
            bits_per_weight=weight_bytes * 8 / num_weights,
            kv_bytes_per_token=plan.page_bytes // plan.page_size,
            prompt_tokens_per_second=prompt_speed,
            decode_tokens_per_second=decode_speed,
        )


def _same_sequences(
    own: EngineConfig, other: EngineConfig, text: Text, sequences: int, tokens: int
) -> Tensor:
    """Token ids int64 ``[S, tokens]`` that mean the same to both models; reads headers only.

    If one model has no tokenizer, the other's is used for both.

    :raises RequestError: the vocabularies differ.
    """
    found: list[Tensor] = []
    sizes: list[int] = []
    for config in (own, other):
        with contextlib.closing(open_model(config)) as checkpoint:
            facts = model_config(config, checkpoint)
            sizes.append(facts.vocab_size)
            tokenizer = checkpoint.tokenizer
            if tokenizer is not None or (config is other and not found):
                found.append(token_sequences("text", text, tokenizer, facts, sequences, tokens))
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"{own.model}: expected the vocabulary of {other.model}, {sizes[1]} tokens, "
            f"found {sizes[0]}"
        )
    if not torch.equal(found[0], found[-1]):
        raise RequestError(
            f"{own.model}: expected the vocabulary of {other.model}, but the same text becomes "
            "different tokens"
        )
    return found[0]


def _weights(config: EngineConfig) -> tuple[int, int]:
    """Bytes of all tensors once they are loaded, and the number of weights."""
    with contextlib.closing(open_model(config)) as checkpoint:
        entries = checkpoint.entries()
        held = (e.nbytes if e.held is None else e.held for e in entries)
        return sum(held), sum(e.num_elements for e in entries)


def _compare(
    reference: Loaded, tested: Loaded, ids: Tensor, comparison: Comparison, name: str
) -> None:
    """Run one sequence through both models, step by step."""
    tokens: list[int] = ids.tolist()
    both = (loaded.runner.prompt_logits(tokens) for loaded in (reference, tested))
    done = 0
    for known, found in zip(*both, strict=True):
        following = ids[done + 1 : done + 1 + len(known)]
        if not bool(comparison.add(known, found, following).isfinite().all()):
            raise RequestError(f"{name}: its logits, or those of the reference, are not finite")
        done += len(known)


def _speeds(loaded: Loaded, tokens: Sequence[int]) -> tuple[float, float]:
    """Tokens per second of half a sequence as a prompt, and of the tokens generated after it."""
    prompt = tokens[: len(tokens) // 2]
    params = SamplingParams(
        temperature=0,
        max_tokens=min(_DECODED, len(tokens) - len(prompt)),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine = loaded.engine
    engine.add(Job(SequenceSpec("speed", params), tuple(prompt)))
    outputs: list[Output] = []
    while engine.has_unfinished:
        outputs += engine.step()
    times = outputs[-1].metrics
    assert times is not None
    assert times.first_token_ts is not None and times.last_token_ts is not None
    first = times.first_token_ts - times.arrival_time
    rest = times.last_token_ts - times.first_token_ts
    return len(prompt) / first, (times.num_generation_tokens - 1) / max(rest, 1e-9)
