"""What an engine tells about itself: the numbers of ``get_metrics()`` and entries of traces."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.api.timeline import Timeline
from sdk.engine.answers import Answer, JobAnswers
from sdk.engine.plan import StepPlan
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.metrics.stats import flat_numbers
from sdk.metrics.trace import Trace


def numbers(
    scheduler: Scheduler,
    seconds: Sequence[float],
    num_finished: int,
    native_seconds: float,
    now: float,
) -> dict[str, float]:
    """Counters since the engine was built, and percentiles; docs/metrics.md describes each.

    ``seconds``: in all, of planning, executing and committing steps and of making outputs.
    """
    pool, swap, tiered = scheduler.pool, scheduler.prefixes.swap, scheduler.tiered_pool
    committer, recorder = scheduler.committer, scheduler.recorder
    drafted, accepted = committer.num_draft_tokens, committer.num_accepted_tokens
    tokens = committer.num_prompt_tokens, committer.num_generation_tokens
    used = pool.capacity - pool.num_available
    return {
        "num_running": scheduler.queues.num_running,
        "num_waiting": scheduler.queues.num_waiting,
        "num_finished": num_finished,
        "num_steps": scheduler.num_steps,
        "num_prompt_tokens": tokens[0],
        "num_generation_tokens": tokens[1],
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "num_preemptions": scheduler.queues.num_preemptions,
        "num_rewinds": scheduler.num_rewinds,
        "prefix_queries": pool.queries,
        "prefix_hits": pool.hits,
        "cache_hit_rate": pool.hits / pool.queries if pool.queries else 0.0,
        "num_prompt_tokens_begun": recorder.num_prompt_tokens,
        "num_prompt_tokens_queried": recorder.num_queried_tokens,
        "num_prompt_tokens_cached": recorder.num_hit_tokens,
        "swapped_out": swap.stored,
        "swapped_in": swap.loaded,
        "swap_failed": swap.failed,
        "swap_pages": swap.num_slots,
        "swap_pages_used": swap.num_used,
        "restored": scheduler.prefixes.restored,
        "num_pages": pool.capacity,
        "num_pages_used": used,
        "num_pages_cached": pool.num_cached,
        "num_pages_pinned": scheduler.prefixes.num_pinned,
        "kv_usage": used / pool.capacity if pool.capacity else 0.0,
        **({} if tiered is None else tiered.metrics(swap.counts())),
        **({} if scheduler.adapters is None else scheduler.adapters.metrics()),
        **dict(zip(_PARTS, seconds, strict=True)),
        "native_seconds": native_seconds,
        **recorder.read_rates(now, *tokens),
        **flat_numbers(
            recorder.requests.read(),
            recorder.inter_token_latency.read(),
            recorder.step_seconds.read(),
        ),
    }


_PARTS = ("plan_seconds", "execute_seconds", "commit_seconds", "output_seconds")


def trace_step(
    trace: Trace, scheduler: Scheduler, plan: StepPlan | None, started: float, planned: float
) -> None:
    """Add a step that has just ended to a trace. ``plan``: the one launched last."""
    queues, pool = scheduler.queues, scheduler.pool
    rows = () if plan is None else plan.rows
    tokens = sum(row.num_scheduled_tokens for row in rows)
    used = pool.capacity - pool.num_available
    counts = queues.num_running, queues.num_waiting, used
    trace.step(started, planned, queues.clock(), len(rows), tokens, *counts)


def traced(answers: JobAnswers, answer: Answer) -> tuple[str, str | None, Timeline]:
    """The name, the tenant and the timeline of an answer, for a trace."""
    name, request = answers.request_id, answer.request
    if len(answers.each) > 1:
        name += f"#{answer.index}"
    reasons = (answer.finish_reason,)
    timeline = Timeline.of(answer.metrics(), request.num_prompt_tokens, reasons)
    return name, request.params.tenant, timeline
