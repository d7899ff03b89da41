"""Plans of engines; what to change where one does not fit, and what that is expected to cost.

Every combination of a weight format, a type of the KV cache, smaller limits and, on a GPU, steps
that are not recorded is planned as the engine would plan it; those that fit are ranked by what they
keep and then by what they lose.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pkgutil import get_data
from statistics import fmean
from typing import Any

from sdk.config import EngineConfig
from sdk.errors import OutOfMemoryError
from sdk.kernel_shares import kernel_shares
from sdk.kernels.ladder import KEPT_PAGES
from sdk.memory import Alternative, MemoryPlan, format_bytes
from sdk.memory_pool import MemoryPool
from sdk.planning import available_to, model_config, open_model, plan_for, sizes_of
from sdk.quant import scheme as schemes
from sdk.quant.at_load import FLOATS, is_in_block, packed_at_load, scheme_at_load
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.derived import DerivedCheckpoint
from sdk.quant.errors import QuantizationError

#: Alternatives a plan names at most.
_MOST = 8
#: Few requests and tokens of a step, and a short context.
_FEW: Mapping[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
_SHORT = 256


def plan(config: EngineConfig) -> MemoryPlan:
    """The memory plan of ``config``, with what would fit in its place where it does not."""
    checkpoint = open_model(config)
    try:
        made = plan_for(config, checkpoint)
        if not made.fits:
            made = _with_help(made, config, checkpoint)
        return replace(made, kernels=tuple(kernel_shares(config, checkpoint)))
    finally:
        checkpoint.close()


def planned_config(
    plan: MemoryPlan | None, model: str | os.PathLike[str] | None, options: Mapping[str, Any]
) -> EngineConfig:
    """The options of an engine from its caller's, or from a plan, in whose limits it then stays.

    :raises TypeError: both are given, or neither.
    :raises OutOfMemoryError: the plan does not fit.
    """
    if plan is None:
        if model is None:
            raise TypeError("LLM() needs a model, or plan=LLM.plan(model, ...)")
        return EngineConfig.from_options(model, options)
    if model is not None or options:
        raise TypeError(
            f"LLM(plan=...) takes model and options from the plan, found "
            f"{', '.join(['a model'] * (model is not None) + list(options))} besides"
        )
    if plan.config is None:
        raise TypeError("plan: expected what LLM.plan() returned, found one without options")
    if not plan.fits:
        raise OutOfMemoryError(plan.problem)
    limits: dict[str, Any] = {
        "max_model_len": plan.max_model_len,
        "kv_cache_memory_bytes": plan.kv_cache,
    }
    for name in ("disk_offload", "cpu_offload"):
        if getattr(plan.config, name):  # "auto" would look at what memory there is now
            limits[name] = plan.offloaded
    if not plan.offloaded:
        limits["disk_offload_path"] = None
    return replace(plan.config, **limits)


def checked_plan(config: EngineConfig, checkpoint: Checkpoint) -> MemoryPlan:
    """The plan of an engine about to be loaded.

    :raises OutOfMemoryError: with the sums and what would help, where it is too large for its
        budget or for what the machine can give now.
    """
    made, pool = plan_for(config, checkpoint), config.memory
    if isinstance(pool, MemoryPool) and not made.fits:
        alone = plan_for(replace(config, memory=MemoryPool(pool.budget)), checkpoint)
        if alone.fits:
            pool.make_room(alone.total)
            made = plan_for(config, checkpoint)
        if not made.fits:
            made = replace(made, problem=f"{made.problem}\nthe memory pool:\n{pool}")
    available = available_to(config)
    if made.fits and made.total > available:
        sums = (
            "the machine cannot give what the budget allows:\n"
            f"  planned    {format_bytes(made.total):>10}\n"
            f"  budget     {format_bytes(made.budget or made.total):>10}\n"
            f"  available  {format_bytes(available):>10}"
        )
        made = replace(made, problem=sums)
    if not made.fits:
        raise OutOfMemoryError(_with_help(made, config, checkpoint).problem)
    return made


def _with_help(made: MemoryPlan, config: EngineConfig, checkpoint: Checkpoint) -> MemoryPlan:
    others: tuple[Alternative, ...] = ()
    slow: tuple[Alternative, ...] = ()
    whole = made.kv_tokens >= made.max_model_len  # as planned it holds what was asked for
    if whole and made.total <= (made.budget or 0):  # it is the machine that has less
        helps = [_smaller_budget(made, available_to(config))]
    else:
        others = alternatives(config, checkpoint, made)
        slow = _offloaded(config, checkpoint)
        helps = [*map(str, others[:3]), *_always(config, checkpoint, made), *map(str, slow)]
    lines = [f"  {line}" for line in helps]
    problem = "\n".join([made.problem, "what would help:", *lines])
    return replace(made, alternatives=(*others, *slow), problem=problem)


def _smaller_budget(made: MemoryPlan, available: int) -> str:
    left, needed = available // 2**20, -(-made.total // 2**20)
    which = "what is free now" if left < needed else "all that these limits use"
    return f"memory='{min(left, needed)}MiB' is {which}"


def _offloaded(config: EngineConfig, checkpoint: Checkpoint) -> tuple[Alternative, ...]:
    """As it was asked, with weights that do not fit left on the disk (of a GPU: with the host):
    nothing is lost but time, so it comes last."""
    name = "cpu_offload" if config.device == "cuda" else "disk_offload"
    options: dict[str, Any] = {name: "auto"}
    tried = replace(config, **options)
    made = plan_for(tried, checkpoint)
    if not (made.fits and made.offloaded) or getattr(config, name):
        return ()
    context = model_config(config, checkpoint).max_position
    keeps = made.max_model_len >= (config.max_model_len or context)
    return (Alternative(options, made, 0.0, keeps),)


def expected_losses() -> tuple[dict[str, float], dict[str, float]]:
    """Nats by weight scheme and by type of the KV cache: means of the models measured."""
    # Also from inside a zip file; importlib.resources wants an __init__.py beside the data.
    table = json.loads(get_data(schemes.__name__, "expected_loss.json") or b"")
    weights, kv = (
        {name: fmean(row["kld"].values()) for name, row in table[part].items() if row["kld"]}
        for part in ("weights", "kv")
    )
    return weights, kv


def alternatives(
    config: EngineConfig, checkpoint: Checkpoint, asked: MemoryPlan
) -> tuple[Alternative, ...]:
    """What fits in the place of ``asked``, best first; nothing that another beats in everything."""
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
        if not any(_is_no_worse(known, one) for known in chosen):
            chosen.append(one)
    return tuple(chosen[:_MOST])


def _is_no_worse(known: Alternative, one: Alternative) -> bool:
    """Whether there is no reason to take ``one`` in the place of ``known``."""
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
    inner = checkpoint.inner if isinstance(checkpoint, DerivedCheckpoint) else checkpoint
    weights, kv = expected_losses()
    before = kv.get(asked.kv_dtype, 0.0)
    for scheme in _schemes(config, inner, weights):
        options: dict[str, Any] = {} if scheme is None else {"quantization": scheme}
        by_scheme = replace(config, **options)
        changed = packed_at_load(inner, by_scheme.quantization)
        sizes = sizes_of(by_scheme, changed)
        eager = (False, True) if asked.graphs else (False,)
        for dtype, few, short, alone in product([None, *kv], (False, True), (False, True), eager):
            own = options | ({"enforce_eager": True} if alone else {})
            if dtype is not None:
                own["kv_cache_dtype"] = dtype
                if config.kv_policy is not None:
                    own["kv_policy"] = None
                if config.kv_keep != KEPT_PAGES:  # says nothing without a policy
                    own["kv_keep"] = KEPT_PAGES
            if few:
                own |= _few(config)
            tried = replace(config, **own)
            if short:
                tried = replace(tried, max_model_len=None)
            made = plan_for(tried, changed, sizes)
            if not made.fits or (dtype is not None and made.page_bytes >= asked.page_bytes):
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
    """None for as it was asked, then what can pack this model while it is loaded."""
    yield None
    entries = checkpoint.entries()
    if not any(is_in_block(entry) and entry.format in FLOATS for entry in entries):
        return
    for name in losses:
        try:
            scheme = scheme_at_load(name)
            for entry in filter(is_in_block, entries):
                scheme.check(entry.name, entry.shape[-1])
        except QuantizationError:  # it makes a file, or its groups do not fit these rows
            continue
        if name != config.quantization:
            yield name


def _few(config: EngineConfig) -> dict[str, Any]:
    """Limits that take little workspace, none above what is asked for."""
    return {name: min(few, getattr(config, name)) for name, few in _FEW.items()}


def _always(config: EngineConfig, checkpoint: Checkpoint, asked: MemoryPlan) -> Iterator[str]:
    """What helps whatever the model: a larger budget, or smaller weights."""
    context = model_config(config, checkpoint).max_position
    limits = {"max_model_len": min(_SHORT, config.max_model_len or context), **_few(config)}
    few = plan_for(replace(config, **limits, memory=None, kv_cache_memory_bytes=1), checkpoint)
    few = replace(few, num_pages=-(-few.max_model_len // few.page_size))
    budget = format_bytes(-(-few.total // 2**20) * 2**20)
    if config.kv_cache_memory_bytes is not None:
        limits["kv_cache_memory_bytes"] = None
    said = ", ".join(f"{name}={value}" for name, value in limits.items())
    yield f"memory={budget!r} holds it with {said}"
    room = (asked.budget or available_to(config)) - (few.total - few.weights)
    if 0 < room < few.weights:
        yield f"with these limits a file needs weights of at most {format_bytes(room)}"
    if asked.tokenizer:
        yield f"skip_tokenizer_init=True needs {format_bytes(asked.tokenizer)} less"
