"""What a model loses against a reference on the same text, and what it takes in memory and time."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from sdk.config import EngineConfig, ProgressCallback
from sdk.engine.engine import Output
from sdk.errors import RequestError
from sdk.evaluating.divergence import Comparison
from sdk.evaluating.logits import opened
from sdk.kernels.ladder import LADDER_PAGE_SIZE
from sdk.loading.load import Loaded
from sdk.loading.progress import reporting
from sdk.memory.planning import open_model
from sdk.models.auto import read_config
from sdk.options import engine_config
from sdk.params import RequestOutputKind, SamplingParams
from sdk.text.token_sequences import Text, evaluation_text, token_sequences

#: Decoded for the speed, at most.
_DECODED = 64
#: Windows are halved for that, and both halves must hold something.
_FEWEST_TOKENS = 16
#: What both models are opened with, and nobody else may say.
_OWN_OPTIONS = ("max_model_len", "max_num_seqs", "tensor_parallel_size", "skip_tokenizer_init")
#: What holds for the reference too; of steps because both are compared step by step.
_SHARED_OPTIONS = ("hf_overrides", "num_threads", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """See :func:`evaluate`. Divergences are in nats, bytes those in memory, speeds one sample."""

    model: str
    reference: str
    compute: str
    kv_dtype: str
    windows: int
    tokens: int
    kl_mean: float
    kl_p99: float
    #: Part of the positions whose likeliest token is the reference's.
    top1: float
    perplexity: float
    reference_perplexity: float
    weight_bytes: int
    bits_per_weight: float
    kv_bytes_per_token: int
    prompt_tokens_per_second: float
    decode_tokens_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
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
    """Compare ``model``, run as it would serve, with ``reference`` in exact arithmetic.

    Both read the same windows of text, each as one prompt, and their expectations behind every
    token are compared; both are in memory at once. Nothing is sampled but for the speed.

    Args:
        model: a GGUF file, a folder with safetensors, or a hub id.
        reference: the same; default: ``model`` itself, so that what is found is the rounding of
            activations, keys and values alone.
        text: text, texts, or lists of token ids; default: the first 64 KiB of Python's help
            topics, which :func:`sdk.quantize` does not calibrate with.
        windows: how many to take of the text, at most.
        tokens: of each window, from 16 on.
        on_progress: called with ``("evaluate", windows done, windows)``; returns False to stop.
        options: of :class:`sdk.LLM` for ``model``: ``compute="exact"`` with
            ``kv_cache_dtype="float32"`` leaves the loss of the weights alone,
            ``quantization="int4"`` packs them while they are loaded. With a ``kv_policy``
            every page goes as far down as it may once the next is begun, which is the worst a full
            cache does, and a step has 128 tokens. ``hf_overrides``,
            ``num_threads`` and ``max_num_batched_tokens`` are the reference's too.

    Raises:
        CheckpointError: a model is missing or damaged.
        RequestError: too little text, a bad option, models of unlike vocabularies, or logits that
            are not finite.
        OutOfMemoryError: both do not fit.
        LoadCancelled: ``on_progress`` returned False.
    """
    if tokens < _FEWEST_TOKENS:
        raise RequestError(f"tokens: expected {_FEWEST_TOKENS} or more, found {tokens}")
    for name in _OWN_OPTIONS:
        if name in options:
            raise RequestError(f"{name}: evaluate() chooses it")
    shared: dict[str, Any] = {
        "max_model_len": tokens,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }
    exact = {"compute": "exact", "kv_cache_dtype": "float32"}
    if options.get("kv_policy") is not None:  # steps that end where pages do
        options["max_num_batched_tokens"] = LADDER_PAGE_SIZE
    kept = {name: options[name] for name in _SHARED_OPTIONS if name in options}
    own = engine_config(model, **{**shared, **options})
    other = engine_config(model if reference is None else reference, **{**shared, **kept, **exact})
    ids = _same_windows(own, other, evaluation_text() if text is None else text, windows, tokens)
    return _compared(own, other, ids, on_progress)


def _compared(
    own: EngineConfig, other: EngineConfig, ids: Tensor, on_progress: ProgressCallback | None
) -> Evaluation:
    """``ids`` int64 ``[S, T]``: the windows both read."""
    with opened(own) as tested, opened(other) as known:
        comparison = Comparison()
        with reporting("evaluate", "window", on_progress) as report:
            report(0, len(ids))
            for done, row in enumerate(ids, 1):
                _compare(known, tested, row, comparison, own.model)
                report(done, len(ids))
        prompt_speed, decode_speed = _speeds(tested, ids[0].tolist())
        plan = tested.plan
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


def _same_windows(
    own: EngineConfig, other: EngineConfig, text: Text, windows: int, tokens: int
) -> Tensor:
    """Token ids int64 ``[S, tokens]`` that mean the same to both models; reads headers only.

    A model without a tokenizer reads what the other's makes of the text.
    """
    found: list[Tensor] = []
    sizes: list[int] = []
    for config in (own, other):
        with contextlib.closing(open_model(config)) as checkpoint:
            facts = read_config({**checkpoint.config, **(config.hf_overrides or {})})
            sizes.append(facts.vocab_size)
            tokenizer = checkpoint.tokenizer
            if tokenizer is not None or (config is other and not found):
                found.append(token_sequences("text", text, tokenizer, facts, windows, tokens))
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"{own.model}: expected the vocabulary of {other.model}, {sizes[1]} tokens, "
            f"found {sizes[0]}"
        )
    if not torch.equal(found[0], found[-1]):
        raise RequestError(
            f"{own.model}: expected the vocabulary of {other.model}, found that the same text "
            "becomes other tokens"
        )
    return found[0]


def _weights(config: EngineConfig) -> tuple[int, int]:
    """Bytes of all tensors once they are loaded, and how many numbers they stand for."""
    with contextlib.closing(open_model(config)) as checkpoint:
        entries = checkpoint.entries()
        held = (e.nbytes if e.held is None else e.held for e in entries)
        return sum(held), sum(e.num_elements for e in entries)


def _compare(
    reference: Loaded, tested: Loaded, ids: Tensor, comparison: Comparison, name: str
) -> None:
    """One window through both models, side by side."""
    tokens: list[int] = ids.tolist()
    both = (loaded.runner.prompt_logits(tokens) for loaded in (reference, tested))
    done = 0
    for known, found in zip(*both, strict=True):
        following = ids[done + 1 : done + 1 + len(known)]
        if not bool(comparison.add(known, found, following).isfinite().all()):
            raise RequestError(f"{name}: logits of {name} or of the reference are not finite")
        done += len(known)


def _speeds(loaded: Loaded, tokens: Sequence[int]) -> tuple[float, float]:
    """Tokens per second of half a window as a prompt, and of what is generated behind it."""
    prompt = tokens[: len(tokens) // 2]
    params = SamplingParams(
        temperature=0,
        max_tokens=min(_DECODED, len(tokens) - len(prompt)),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine = loaded.engine
    engine.add_request("speed", prompt, params)
    outputs: list[Output] = []
    while engine.has_unfinished:
        outputs += engine.step()
    times = outputs[-1].metrics
    assert times is not None
    assert times.first_token_ts is not None and times.last_token_ts is not None
    first = times.first_token_ts - times.arrival_time
    rest = times.last_token_ts - times.first_token_ts
    return len(prompt) / first, (times.num_generation_tokens - 1) / max(rest, 1e-9)
