"""The unfinished requests of an engine, for hosts and live views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from sdk.engine.scheduling.negative_prompt import in_prefill
from sdk.engine.scheduling.request import Request, RequestStatus
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.kernels.dataclass import dataclass

RequestState = Literal["waiting", "prefill", "decoding", "preempted"]


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """One unfinished answer at one moment between two steps.

    ``request_id``: of the request, whose answers are numbered by ``index``. ``state``: ``waiting``
    (it never ran), ``prefill`` (tokens that are known run), ``decoding``, or ``preempted`` (it
    waits again). ``num_computed_tokens`` of its tokens, prompt and answer, are in the KV cache;
    ``num_cached_tokens`` of them came from the prefix cache when it was admitted. ``age``: seconds
    since it arrived. ``max_tokens``: the most tokens its answer can get. ``kv_pages``: the pages it
    holds, some perhaps together with others, by bits of their type.
    """

    request_id: str
    index: int
    kind: str
    state: RequestState
    tenant: str | None
    adapter: str | None
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_generated_tokens: int
    max_tokens: int
    num_preemptions: int
    age: float
    kv_pages: Mapping[int, int]


def request_info(
    request_id: str, index: int, request: Request, scheduler: Scheduler, now: float
) -> RequestInfo:
    """A request of a scheduler, as it is now."""
    state: RequestState = "waiting"
    if request.status is RequestStatus.PREEMPTED:
        state = "preempted"
    elif request.status is RequestStatus.RUNNING:
        state = "decoding"
        if in_prefill(request) or not request.num_output_tokens:
            state = "prefill"
    pages = [page for one in request.sequences for page in one.pages]
    bits, tiered = scheduler.config.kv_bits, scheduler.tiered_pool
    by_bits = {bits[0]: len(pages)}
    if tiered is not None:
        by_bits = dict.fromkeys(bits, 0) | Counter(bits[tiered.tier(page)] for page in pages)
    return RequestInfo(
        request_id,
        index,
        request.spec.kind,
        state,
        request.params.tenant,
        request.adapter_name,
        request.priority,
        request.num_prompt_tokens,
        request.num_cached or 0,
        request.num_computed,
        request.num_output_tokens,
        request.max_len - request.num_prompt_tokens if request.spec.kind == "generate" else 0,
        request.num_preemptions,
        max(now - request.arrival_time, 0.0),
        by_bits,
    )
