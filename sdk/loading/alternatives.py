"""Alternatives to a plan that does not fit: what to change, and the expected loss.

Every combination of a weight scheme, a KV cache type, smaller limits and, on a GPU, steps that are
not recorded is planned as the engine would plan it. Those that fit are ranked: first those that
keep the limits, then by expected loss.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pkgutil import get_data
from typing import Any

from sdk.api.config import EngineConfig
from sdk.api.errors import OutOfMemoryError
from sdk.api.memory_pool import MemoryPool
from sdk.api.options import engine_config
from sdk.api.sizes import format_bytes
from sdk.api.speculative_config import SpeculativeConfig
from sdk.kernels.dataclass import dataclass
from sdk.kernels.kv.tiers import KEPT_PAGES
from sdk.loading.checks import check_options, memory_shortage, room_shortage, whole_prompts
from sdk.memory.expert_memory import why_all_stay
from sdk.memory.plan import Alternative, MemoryPlan
from sdk.memory.planning import plan_for
from sdk.memory.products import kernel_shares
from sdk.memory.resolve import available_to, model_config, open_model
from sdk.memory.weights import weight_bytes
from sdk.models.auto import quantized_online
from sdk.quant import scheme as schemes
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import QuantizationError
from sdk.quant.online import FLOATS, is_in_block, online_scheme
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint
from sdk.quant.spec import KVTypes

#: The most alternatives that a plan lists.
_MAX_ALTERNATIVES = 8
#: Few requests and tokens of a step, and a short context.
_SMALL_LIMITS: Mapping[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
_SHORT_CONTEXT = 256
#: A larger budget is suggested for a context of at most this many tokens.
_USUAL_CONTEXT = 2048
#: Share of the memory free now that is assumed to be free a moment later.
_STILL_FREE = 0.98


def plan(config: EngineConfig) -> MemoryPlan:
    """The memory plan of ``config``, with alternatives if it does not fit."""
    checkpoint = open_model(config)
    try:
        made = _loadable(config, checkpoint, plan_for(config, checkpoint))
        return replace(made, kernels=tuple(kernel_shares(config, checkpoint)))
    finally:
        checkpoint.close()


def planned_config(
    plan: MemoryPlan | None, model: str | os.PathLike[str] | None, **options: Any
) -> EngineConfig:
    """The options of an engine, from keywords or from a plan, whose limits it then keeps.

    :raises TypeError: both are given, or neither.
    :raises OutOfMemoryError: the plan does not fit.
    """
    if plan is None:
        if model is None:
            raise TypeError("LLM() needs a model, or plan=LLM.plan(model, ...)")
        return engine_config(model, **options)
    if model is not None or options:
        raise TypeError(
            f"LLM(plan=...) takes model and options from the plan, found also "
            f"{', '.join(['a model'] * (model is not None) + list(options))}; remove them"
        )
    if plan.config is None:
        raise TypeError("plan: expected a plan from LLM.plan(), found one without options")
    if not plan.fits:
        raise OutOfMemoryError(plan.problem)
    limits: dict[str, Any] = {
        "max_model_len": plan.max_model_len,
        "kv_cache_memory_bytes": plan.kv_cache * plan.replicas,
    }
    if plan.config.device == "auto":  # planned for the CPU
        limits["device"] = "cpu"
    for name in ("disk_offload", "cpu_offload"):
        if getattr(plan.config, name):  # "auto" would depend on the memory free now
            limits[name] = plan.offloaded
    if not plan.offloaded:
        limits["disk_offload_path"] = None
    return replace(plan.config, **limits)


def checked_plan(config: EngineConfig, checkpoint: Checkpoint) -> MemoryPlan:
    """The plan of an engine about to be loaded.

    :raises OutOfMemoryError: the plan exceeds its budget or the memory that is free now; the
        message has the breakdown and what would help.
    """
    made, pool = plan_for(config, checkpoint), config.memory
    if isinstance(pool, MemoryPool) and not made.fits:
        alone = plan_for(replace(config, memory=MemoryPool(pool.budget)), checkpoint)
        if alone.fits:
            pool.make_room(alone.total)
            made = plan_for(config, checkpoint)
        if not made.fits:
            made = replace(made, problem=f"{made.problem}\nthe memory pool:\n{pool}")
    made = _loadable(config, checkpoint, made)
    if not made.fits:
        raise OutOfMemoryError(made.problem)
    return made


def _loadable(config: EngineConfig, checkpoint: Checkpoint, made: MemoryPlan) -> MemoryPlan:
    """The plan; if it cannot be loaded now, with its problem and what would help.

    :raises SdkError: more memory would not help, see :func:`check_options`.
    """
    check_options(config, checkpoint, made)
    if made.fits:
        made = replace(made, problem=memory_shortage(config, made))
    if made.fits:
        return replace(made, problem=room_shortage(config, made))
    return _with_help(made, config, checkpoint)


def _with_help(made: MemoryPlan, config: EngineConfig, checkpoint: Checkpoint) -> MemoryPlan:
    others: tuple[Alternative, ...] = ()
    slow: tuple[Alternative, ...] = ()
    whole = made.full_requests >= 1  # the plan holds what was asked for
    helps: list[str] = []
    if whole and made.total <= (made.budget or 0):  # the machine has less than the budget
        helps = list(_smaller_budget(config, checkpoint, made))
    if not helps:
        others = (
            *_one_replica(config, checkpoint),
            *_without_drafts(config, checkpoint),
            *alternatives(config, checkpoint, made),
        )
        slow = (*_experts_away(config, checkpoint), *_offloaded(config, checkpoint))
        helps = [
            *map(str, others[:3]),
            *_least_with_experts(config, checkpoint, made),
            *_general_help(config, checkpoint, made),
            *map(str, slow),
        ]
    lines = [f"  {line}" for line in helps]
    problem = "\n".join([made.problem, "what would help:", *lines] if lines else [made.problem])
    return replace(made, alternatives=(*others, *slow), problem=problem)


def _smaller_budget(
    config: EngineConfig, checkpoint: Checkpoint, made: MemoryPlan
) -> Iterator[str]:
    """A budget that the machine has, if it is enough for these limits."""
    left, needed = int(available_to(config) * _STILL_FREE) >> 20, -(-made.total // 2**20)
    budget = f"{min(left, needed)}MiB"
    if plan_for(replace(config, memory=budget), checkpoint).fits:
        which = "is free now" if left < needed else "is all that these limits need"
        yield f"memory={budget!r} {which}"


def _without_drafts(config: EngineConfig, checkpoint: Checkpoint) -> tuple[Alternative, ...]:
    """The plan without the weights that draft. It costs only time."""
    if not _has_drafting_weights(config):
        return ()
    made = plan_for(replace(config, speculative_config=None), checkpoint)
    if not made.fits:
        return ()
    keeps = made.max_model_len >= _context(config, checkpoint)
    return (Alternative({"speculative_config": None}, made, 0.0, keeps),)


def _has_drafting_weights(config: EngineConfig) -> bool:
    speculative = config.speculative_config
    return isinstance(speculative, SpeculativeConfig) and speculative.has_weights


def _context(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """The context that was asked for."""
    return config.max_model_len or model_config(config, checkpoint).max_position


def _one_replica(config: EngineConfig, checkpoint: Checkpoint) -> tuple[Alternative, ...]:
    """The plan with one replica instead of several."""
    if config.data_parallel_size == 1:
        return ()
    options: dict[str, Any] = {"data_parallel_size": 1}
    if config.prefill_replicas:
        options["prefill_replicas"] = 0
    made = plan_for(replace(config, **options), checkpoint)
    keeps = made.max_model_len >= _context(config, checkpoint)
    return (Alternative(options, made, 0.0, keeps),) if made.fits else ()


def _offloaded(config: EngineConfig, checkpoint: Checkpoint) -> tuple[Alternative, ...]:
    """The plan as asked for, with the weights that do not fit on disk (for a GPU: in host memory).
    It costs only time, but a lot, so it comes last. Not for what cannot be offloaded: replicas,
    stages, experts that may move."""
    several = max(config.data_parallel_size, config.pipeline_parallel_size) > 1
    if several or config.redundant_experts is not None:
        return ()
    name = "cpu_offload" if config.device == "cuda" else "disk_offload"
    options: dict[str, Any] = {name: "auto"}
    if _has_drafting_weights(config):  # they cannot be offloaded
        options["speculative_config"] = None
    tried = replace(config, **options)
    made = plan_for(tried, checkpoint)
    if not (made.fits and made.offloaded) or getattr(config, name):
        return ()
    keeps = made.max_model_len >= _context(config, checkpoint)
    return (Alternative(options, made, 0.0, keeps),)


def _experts_away(config: EngineConfig, checkpoint: Checkpoint) -> tuple[Alternative, ...]:
    """The plan as asked for, with experts that do not fit read from a cache of weights. It costs
    only time."""
    if config.weight_cache:
        return ()
    made = plan_for(replace(config, weight_cache=True), checkpoint)
    if not made.fits or made.experts is None:
        return ()
    keeps = made.max_model_len >= _context(config, checkpoint)
    return (Alternative({"weight_cache": True}, made, 0.0, keeps),)


def _least_with_experts(
    config: EngineConfig, checkpoint: Checkpoint, made: MemoryPlan
) -> Iterator[str]:
    """The least memory, where experts may be read from the cache of weights; or why not."""
    if not config.weight_cache:
        return
    model = model_config(config, checkpoint)
    if why := why_all_stay(config, model):
        yield f"experts cannot be read from the cache of weights: {why}"
    if made.experts is None:
        return
    low, high = (made.budget or 0) >> 20, -(-2 * made.total >> 20)
    while high - low > 1:
        middle = (low + high) // 2
        fits = plan_for(replace(config, memory=f"{middle}MiB"), checkpoint).fits
        low, high = (low, middle) if fits else (middle, high)
    if plan_for(replace(config, memory=f"{high}MiB"), checkpoint).fits:
        yield (
            f"memory='{high}MiB' is the least for these limits: all weights but experts, the "
            f"workspace, and {made.experts.least} experts of {made.experts.experts}"
        )


def expected_losses() -> tuple[dict[str, float], dict[str, float]]:
    """Nats by weight scheme and by KV cache type: means of the measured models."""
    # Works inside a zip file too; importlib.resources needs an __init__.py next to the data.
    table = json.loads(get_data(schemes.__name__, "expected_loss.json") or b"")

    def means(part: str) -> dict[str, float]:
        measured = {name: row["kld"].values() for name, row in table[part].items() if row["kld"]}
        return {name: sum(losses) / len(losses) for name, losses in measured.items()}

    return means("weights"), means("kv")


def alternatives(
    config: EngineConfig, checkpoint: Checkpoint, asked: MemoryPlan
) -> tuple[Alternative, ...]:
    """What fits instead of ``asked``, best first, without those that another one dominates."""
    fitting = list(_fitting(config, checkpoint, asked))
    fitting.sort(
        key=lambda one: (
            not one.keeps_limits,
            one.loss,
            len(one.options),
            -one.plan.max_model_len,
        )
    )
    chosen: list[Alternative] = []
    for one in fitting:
        if not any(_is_at_least_as_good(known, one) for known in chosen):
            chosen.append(one)
    return tuple(chosen[:_MAX_ALTERNATIVES])


def _is_at_least_as_good(known: Alternative, one: Alternative) -> bool:
    """Whether ``one`` has no advantage over ``known``."""
    return (
        known.loss <= one.loss
        and known.keeps_limits >= one.keeps_limits
        and known.plan.max_model_len >= one.plan.max_model_len
        and known.plan.max_num_seqs >= one.plan.max_num_seqs
        and not known.is_eager > one.is_eager
    )


def _fitting(
    config: EngineConfig, checkpoint: Checkpoint, asked: MemoryPlan
) -> Iterator[Alternative]:
    inner = checkpoint.inner if isinstance(checkpoint, RewrittenCheckpoint) else checkpoint
    weights, kv = expected_losses()
    before = kv.get(asked.kv_dtype, 0.0)
    if not model_config(config, checkpoint).causal:  # its pages are those of one step
        kv = {}
    if config.device == "cuda":
        kv = {name: loss for name, loss in kv.items() if KVTypes.parse(name).on_gpu}
    for scheme in _schemes(config, inner, weights):
        options: dict[str, Any] = {} if scheme is None else {"quantization": scheme}
        by_scheme = replace(config, **options)
        changed = quantized_online(inner, scheme or config.quantization, config.hf_overrides)
        held = weight_bytes(by_scheme, changed)
        eager = (False, True) if asked.graphs else (False,)
        for dtype, few, short, alone in product([None, *kv], (False, True), (False, True), eager):
            own = options | ({"enforce_eager": True} if alone else {})
            if dtype is not None:
                own["kv_cache_dtype"] = dtype
                if config.kv_policy is not None:
                    own["kv_policy"] = None
                if config.kv_keep != KEPT_PAGES:  # it has no effect without a policy
                    own["kv_keep"] = KEPT_PAGES
            if few:
                own |= _small_limits(config)
            tried = replace(config, **own)
            if short:
                tried = replace(tried, max_model_len=None)
            made = plan_for(tried, changed, held)
            if not (made.fits and whole_prompts(tried, made)):
                continue
            if dtype is not None and made.page_bytes >= asked.page_bytes:
                continue
            if short:
                own["max_model_len"] = made.max_model_len
                made = replace(made, config=replace(tried, max_model_len=made.max_model_len))
            loss = 0.0 if scheme is None else weights[scheme]
            loss += 0.0 if dtype is None else max(kv[dtype] - before, 0.0)
            yield Alternative(own, made, loss, keeps_limits=not (few or short))


def _schemes(
    config: EngineConfig, checkpoint: Checkpoint, losses: Mapping[str, float]
) -> Iterator[str | None]:
    """``None`` (no change), then the schemes that can quantize this model while it is loaded."""
    yield None
    entries = checkpoint.entries()
    if not any(is_in_block(entry) and entry.format in FLOATS for entry in entries):
        return
    for name in losses:
        try:
            scheme = online_scheme(name)
            for entry in filter(is_in_block, entries):
                scheme.check(entry.name, entry.shape[-1])
        except QuantizationError:  # it only writes files, or its groups do not fit these rows
            continue
        if name != config.quantization:
            yield name


def _small_limits(config: EngineConfig) -> dict[str, Any]:
    """Limits with a small workspace, none above what was asked for."""
    asked = {"max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.step_tokens}
    return {name: min(small, asked[name]) for name, small in _SMALL_LIMITS.items()}


def _general_help(config: EngineConfig, checkpoint: Checkpoint, asked: MemoryPlan) -> Iterator[str]:
    """What helps for any model: a larger budget, or smaller weights."""
    context = config.max_model_len or model_config(config, checkpoint).max_position
    usual = _smallest_budget(config, checkpoint, {"max_model_len": min(context, _USUAL_CONTEXT)})
    few = _smallest_budget(
        config, checkpoint, {"max_model_len": min(context, _SHORT_CONTEXT), **_small_limits(config)}
    )
    if usual is not None:
        yield usual.describe(config)
    if few is not None and (usual is None or few.plan.total < usual.plan.total):
        yield few.describe(config)
    least = few or usual
    if least is not None:
        left = (asked.budget or available_to(config)) - (least.plan.total - least.plan.weights)
        if 0 < left < least.plan.weights:
            limits = least.text(config, least.limits)
            yield f"a model whose weights take at most {format_bytes(left)}, with {limits}"
    if asked.tokenizer:
        without = replace(config, skip_tokenizer_init=True)
        if plan_for(without, checkpoint).fits:
            yield "skip_tokenizer_init=True is enough: token ids in, token ids out"


@dataclass(frozen=True, slots=True)
class _Budget:
    """A budget that is enough for one request within ``limits``, and its plan."""

    budget: str
    limits: Mapping[str, Any]
    plan: MemoryPlan

    def describe(self, config: EngineConfig) -> str:
        changed = self.text(config, self.limits)
        return f"memory={self.budget!r} is enough" + (f" with {changed}" if changed else "")

    @staticmethod
    def text(config: EngineConfig, limits: Mapping[str, Any]) -> str:
        """The ``limits`` that differ from ``config``."""
        changed = (name for name in limits if limits[name] != getattr(config, name))
        return ", ".join(f"{name}={limits[name]!r}" for name in changed)


def _smallest_budget(
    config: EngineConfig, checkpoint: Checkpoint, limits: Mapping[str, Any]
) -> _Budget | None:
    """The smallest budget for ``limits``; ``None`` if it is more than this machine has."""
    if not config.enable_chunked_prefill:  # a step runs a whole prompt
        tokens = max(config.step_tokens, limits["max_model_len"])
        limits = {**limits, "max_num_batched_tokens": tokens}
    made = plan_for(replace(config, **limits, memory=None, kv_cache_memory_bytes=1), checkpoint)
    pages = -(-made.max_model_len // made.page_size)
    made = replace(made, num_pages=pages)
    kv, more = config.kv_cache_memory_bytes, 0
    if not isinstance(kv, int) or kv < made.kv_cache:
        limits = {**limits, "kv_cache_memory_bytes": None}
    elif made.windows or made.states is not None:  # frames and states share it with pages
        more = kv - made.kv_cache
    else:
        made = replace(made, num_pages=min(kv // made.page_bytes, pages * config.max_num_seqs))
    budget = f"{-(-(made.total + more) // 2**20)}MiB"
    tried = plan_for(replace(config, **limits, memory=budget), checkpoint)
    return _Budget(budget, limits, made) if tried.fits else None
