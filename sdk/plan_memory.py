"""From a demand and limits to pages and a context length, or to the sums that do not fit."""

from __future__ import annotations

from dataclasses import replace

from sdk.errors import RequestError
from sdk.memory import (
    DEFAULT_KV_BYTES,
    Demand,
    MemoryPlan,
    format_bytes,
    graph_bytes,
    scratch_bytes,
    workspace_bytes,
)


def plan_memory(
    demand: Demand,
    *,
    budget: int | None,
    kv_budget: int | None,
    max_model_len: int | None,
    available: int,
) -> MemoryPlan:
    """Turn a demand and the user's limits into pages and a context length.

    ``budget`` bounds everything together, ``kv_budget`` the KV alone. Without ``max_model_len`` the
    context is the model's own, or what the KV can hold if that is less. A plan that does not fit
    says so in ``problem``, with the sums.

    :raises RequestError: ``max_model_len`` exceeds the model's context.
    """
    if max_model_len is not None and max_model_len > demand.model_context:
        raise RequestError(
            f"max_model_len: the model's context is {demand.model_context} tokens, "
            f"found {max_model_len}"
        )
    seqs, want_context = demand.max_num_seqs, max_model_len or demand.model_context
    tokens = min(demand.max_num_batched_tokens, seqs * want_context)
    limit, working = budget or available, _working(demand, tokens, want_context)
    room = limit - demand.weights - sum(working) - demand.tokenizer
    pages_per_request = -(-want_context // demand.page_size)
    cap = pages_per_request * seqs
    if kv_budget is not None:
        pages = min(kv_budget // demand.page_bytes, cap)
    elif budget is not None:
        pages = min(max(room, 0) // demand.page_bytes, cap)
    else:
        default = max(DEFAULT_KV_BYTES // demand.page_bytes, pages_per_request)
        pages = min(default, cap, max(room, 0) // 2 // demand.page_bytes)
    context = want_context
    if max_model_len is None:
        context = min(context, pages * demand.page_size)
        tokens = min(tokens, max(seqs * context, 1))
        working = _working(demand, tokens, max(context, 1))
    plan = MemoryPlan(
        budget=budget,
        weights=demand.weights,
        workspace=working[0],
        page_bytes=demand.page_bytes,
        page_size=demand.page_size,
        num_pages=pages,
        kv_dtype=demand.kv_dtype,
        max_model_len=max(context, 1),
        max_num_seqs=seqs,
        tokenizer=demand.tokenizer,
        loading=demand.loading,
        read=demand.read,
        offloaded=demand.offloaded,
        layers_away=demand.layers_away,
        graphs=working[1],
        scratch=working[2],
    )
    if pages * demand.page_size < max(context, 1) or plan.total > limit:
        return replace(plan, problem=_sums(plan, limit, want_context, kv_budget))
    return plan


def _working(demand: Demand, tokens: int, context: int) -> tuple[int, int, int]:
    """Workspace, graphs and scratch of steps of so many tokens, of requests up to so long."""
    seqs = demand.max_num_seqs
    return (
        workspace_bytes(demand, seqs, tokens),
        graph_bytes(demand, seqs, tokens),
        scratch_bytes(demand, seqs, tokens, context),
    )


def _away(plan: MemoryPlan) -> str:
    return f"  and {format_bytes(plan.offloaded)} elsewhere" if plan.offloaded else ""


def _sums(plan: MemoryPlan, limit: int, context: int, kv_budget: int | None) -> str:
    """What is needed beside what there is."""
    needed_kv = -(-context // plan.page_size) * plan.page_bytes
    name = "available memory" if plan.budget is None else "budget"
    lines = [
        "the model does not fit:",
        f"  weights    {format_bytes(plan.weights):>10}{_away(plan)}",
        f"  workspace  {format_bytes(plan.workspace):>10}",
        f"  tokenizer  {format_bytes(plan.tokenizer):>10}",
        *([f"  graphs     {format_bytes(plan.graphs):>10}"] if plan.graphs else []),
        *([f"  scratch    {format_bytes(plan.scratch):>10}"] if plan.scratch else []),
        f"  KV cache   {format_bytes(needed_kv):>10}  one request of {context} tokens",
    ]
    if plan.loading > plan.fixed + needed_kv:
        lines.append(
            f"  loading    {format_bytes(plan.loading):>10}  for a moment, in place of these"
        )
    lines.append(f"  {name}     {format_bytes(limit)}")
    if kv_budget is not None:
        lines.append(f"  kv_cache_memory_bytes {format_bytes(kv_budget)}")
    return "\n".join(lines)
