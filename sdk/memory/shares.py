"""How the bytes of a KV cache are shared by pages, frames of window groups and recurrent states.

On a CPU memory moves between the kinds as requests need it, and these are the shares of requests of
full length. On a GPU they are fixed, so that short requests, which need as many frames as pages,
have more of them.
"""

from __future__ import annotations

from typing import NamedTuple

from sdk.engine.scheduling.scheduler_config import StateSlots, WindowGroup
from sdk.memory.demand import MemoryDemand, cache_of_request, frames_of_request

#: The most that frames and working states take of a GPU's bytes.
_FRAMES_SHARE = 1 / 2
#: The part of the bytes that snapshots of states may take.
_SNAPSHOTS_SHARE = 1 / 4


class MemoryShares(NamedTuple):
    """The places of each kind. ``longest``: pages of the longest request that they can hold."""

    pages: int
    windows: tuple[WindowGroup, ...]
    states: StateSlots | None
    longest: int


def share_memory(demand: MemoryDemand, nbytes: int, context: int, step_tokens: int) -> MemoryShares:
    """The places that ``nbytes`` are enough for, with requests of up to ``context`` tokens and
    steps of ``step_tokens``: not more than all requests together need."""
    seqs, per_request = demand.max_num_seqs, -(-context // demand.page_size)
    if demand.num_pages is not None:
        pages = min(demand.num_pages, nbytes // demand.page_bytes)
        return MemoryShares(pages, (), None, pages)
    longest = _longest(demand, nbytes, per_request, step_tokens)
    if not demand.windows and not demand.slot_bytes:
        pages = min(nbytes // demand.page_bytes, per_request * seqs)
        return MemoryShares(pages, (), None, longest)
    step = -(-step_tokens // demand.page_size)
    frames = frames_of_request(demand, per_request)
    sizes = [group.frame_bytes for group in demand.windows]
    of_step = sum(min(step, per_request) * size for size in sizes)
    of_frames = sum(n * size for n, size in zip(frames, sizes, strict=True))
    own = of_frames + (1 + demand.row_drafts) * demand.slot_bytes
    whole = cache_of_request(demand, per_request, 0)
    left = max(nbytes - of_step, 0)
    requests = left // whole
    if demand.on_cards:  # of short requests there are more
        beside = max(left - per_request * demand.page_bytes, 0)
        requests = max(requests, min(int(left * _FRAMES_SHARE), beside) // max(own, 1))
    requests = max(min(requests, seqs), 1)
    groups = tuple(
        group._replace(num_frames=1 + min(n * requests + step, per_request * seqs))
        for n, group in zip(frames, demand.windows, strict=True)
    )
    left -= requests * own
    states = None
    if demand.slot_bytes:
        snapshots = max(int(left * _SNAPSHOTS_SHARE), 0) // demand.slot_bytes
        slots = 1 + requests * (1 + demand.row_drafts) + snapshots
        states = StateSlots(demand.slot_bytes, slots, demand.row_drafts)
        left -= snapshots * demand.slot_bytes
    pages = per_request * seqs
    if demand.page_bytes:
        pages = min(max(left, 0) // demand.page_bytes, pages)
    return MemoryShares(pages, groups, states, longest)


def _longest(demand: MemoryDemand, nbytes: int, most: int, step_tokens: int) -> int:
    """The pages of the longest request that ``nbytes`` are enough for, at most ``most``."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if cache_of_request(demand, middle, step_tokens) <= nbytes:
            low = middle
        else:
            high = middle - 1
    return low
