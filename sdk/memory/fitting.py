"""Computes pages and a context length from a demand and limits, or explains what is too large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sdk.api.errors import RequestError
from sdk.api.sizes import format_bytes
from sdk.kernels.sized_graphs import FEW_TOKENS
from sdk.memory.demand import (
    MemoryDemand,
    cache_of_request,
    graph_bytes,
    scratch_bytes,
    workspace_bytes,
)
from sdk.memory.plan import DEFAULT_KV_BYTES, MemoryPlan
from sdk.memory.shares import share_memory

#: The share of the memory that recording steps of more than 512 tokens may take besides: 0.5 GiB
#: of 16, which 2,048 tokens of a model of 8B need half of.
RECORDED_SHARE = 1 / 32


def plan_memory(
    demand: MemoryDemand,
    *,
    budget: int | None,
    kv_budget: int | None,
    max_model_len: int | None,
    available: int,
) -> MemoryPlan:
    """Compute pages and a context length from a demand and the user's limits.

    ``budget`` limits everything together, ``kv_budget`` the KV cache alone. Without
    ``max_model_len`` the context is the model's own, or what the KV cache can hold if that is less.
    A plan that does not fit has the breakdown in ``problem``.

    :raises RequestError: ``max_model_len`` exceeds the model's context.
    """
    _check_context(demand, max_model_len)
    seqs, want_context = demand.max_num_seqs, max_model_len or demand.model.max_position
    tokens = min(demand.max_num_batched_tokens, seqs * want_context)
    limit = budget or available
    demand = _with_recorded_steps(demand, tokens, want_context, limit)
    working = _working_memory(demand, tokens, want_context)
    left = limit - demand.weights.total - sum(working) - demand.tokenizer - demand.adapter_bytes
    left -= 0 if demand.images is None else demand.images.total
    left = max(left, 0)
    if demand.num_pages is None and kv_budget is not None:
        left = kv_budget
    elif demand.num_pages is None and budget is None:
        left = _default_bytes(demand, left, want_context, tokens, asked=max_model_len is not None)
    asked = not (budget is kv_budget is None)
    share = share_memory(demand, left, want_context, tokens, asked=asked)
    context = want_context
    if max_model_len is None:
        context = min(context, max(share.longest, 1) * demand.page_size)
        tokens = min(tokens, seqs * context)
        working = _working_memory(demand, tokens, context)
    plan = MemoryPlan(
        budget=budget,
        weights=demand.weights.total,
        workspace=working[0] + share.ids,
        page_bytes=demand.page_bytes,
        page_size=demand.page_size,
        num_pages=share.pages,
        windows=share.windows,
        states=share.states,
        row_drafts=demand.row_drafts,
        kv_dtype=demand.kv_dtype,
        max_model_len=context,
        max_num_seqs=seqs,
        tokenizer=demand.tokenizer,
        loading=demand.weights.loading,
        read=demand.weights.read,
        offloaded=demand.offloaded,
        layers_away=demand.layers_away,
        graphs=working[1],
        recorded_tokens=demand.captured_tokens,
        scratch=working[2],
        draft_tokens=demand.draft_tokens,
        drafting_weights=demand.drafting_weights,
        adapters=demand.adapter_bytes,
        experts=demand.experts,
        images=demand.images,
        hand_over=demand.hand_over_bytes,
    )
    too_few = share.longest * demand.page_size < context
    if too_few or plan.total > limit:
        wanted = None if max_model_len is not None else want_context
        least = [
            0 if one is None else cache_of_request(demand, -(-one // demand.page_size), tokens)
            for one in (context, wanted)
        ]
        problem = _breakdown(plan, limit, wanted, kv_budget, least, too_few=too_few)
        return replace(plan, problem=problem)
    return plan


def _check_context(demand: MemoryDemand, max_model_len: int | None) -> None:
    if max_model_len is not None and max_model_len > demand.model.max_position:
        why = "the model's context"
        latent = demand.model.latent
        if latent is not None and latent.chosen == demand.model.max_position:
            why = (
                f"of which {demand.model.model_type}'s indexer chooses all: attention to some "
                "tokens of a longer context (sparse attention) is not supported"
            )
        raise RequestError(
            f"max_model_len: expected at most {demand.model.max_position}, {why}, "
            f"found {max_model_len}"
        )


def _default_bytes(
    demand: MemoryDemand, most: int, context: int, tokens: int, *, asked: bool
) -> int:
    """Bytes of the KV cache if no budget is given and ``most`` are free: enough for one request,
    but at most half of what is free, unless its length was asked for.
    """
    one, half = cache_of_request(demand, -(-context // demand.page_size), tokens), most // 2
    if asked:
        half = max(half, min(one, most))
    return min(max(DEFAULT_KV_BYTES, one), half)


def _with_recorded_steps(
    demand: MemoryDemand, tokens: int, context: int, limit: int
) -> MemoryDemand:
    """Record larger steps than :data:`~sdk.kernels.sized_graphs.FEW_TOKENS` only as far as that
    takes at most :data:`RECORDED_SHARE` of the memory: pages serve more requests."""

    def nbytes(captured: int) -> int:
        return sum(_working_memory(replace(demand, captured_tokens=captured), tokens, context)[1:])

    captured = demand.captured_tokens
    few = min(captured, FEW_TOKENS)
    while captured > few and nbytes(captured) - nbytes(few) > limit * RECORDED_SHARE:
        captured = max(few, captured // 2)
    return replace(demand, captured_tokens=captured)


def _working_memory(demand: MemoryDemand, tokens: int, context: int) -> tuple[int, int, int]:
    """Workspace, graphs and scratch of steps with ``tokens`` and requests of up to ``context``."""
    seqs = demand.max_num_seqs
    return (
        workspace_bytes(demand, seqs, tokens),
        graph_bytes(demand, seqs, tokens),
        scratch_bytes(demand, seqs, tokens, context),
    )


def _breakdown(
    plan: MemoryPlan,
    limit: int,
    model_context: int | None,
    kv_budget: int | None,
    least: Sequence[int],
    *,
    too_few: bool,
) -> str:
    """What is needed and what is available; ``model_context`` is set if no context was given.
    ``least``: bytes of the KV cache for a request of the plan, and for one of that context.
    ``too_few``: there are fewer."""
    kv, whole = least
    kv_note = f"one request of {plan.max_model_len} tokens"
    if too_few and model_context is not None:
        kv_note = f"at least; {format_bytes(whole)} for {model_context} tokens"
    elif kv_budget is not None and not too_few:
        kv, kv_note = plan.kv_cache, "kv_cache_memory_bytes"
    offloaded = f"and {format_bytes(plan.offloaded)} offloaded" if plan.offloaded else ""
    serving = plan.fixed + kv
    rows = [
        ("weights", plan.weights, offloaded),
        ("workspace", plan.workspace, plan.largest_step),
        ("tokenizer", plan.tokenizer, ""),
    ]
    if plan.graphs:
        rows.append(("graphs", plan.graphs, ""))
    if plan.scratch:
        rows.append(("scratch", plan.scratch, ""))
    if plan.adapters:
        rows.append(("adapters", plan.adapters, "lora_memory"))
    rows.append(("KV cache", kv, kv_note))
    if plan.loading > serving:
        rows.append(
            ("loading", plan.loading, "briefly, instead of the rows above except tokenizer")
        )
    rows.append(("needed", max(serving, plan.loading) + plan.tokenizer, ""))
    rows.append(("available" if plan.budget is None else "budget", limit, ""))
    if kv_budget is not None and too_few:
        rows.append(("kv_cache_memory_bytes", kv_budget, ""))
    lines = [f"  {name:<10} {format_bytes(size):>10}  {note}".rstrip() for name, size, note in rows]
    return "\n".join(["the model does not fit:", *lines])
