"""How the bytes of a KV cache are shared by pages, frames of window groups and recurrent states.

On a CPU memory moves between the kinds as requests need it, and these are the shares of requests of
full length. On a GPU they are fixed, so that short requests, which need as many frames as pages,
have more of them.
"""

from __future__ import annotations

from operator import mul
from typing import NamedTuple

from sdk.engine.scheduling.scheduler_config import StateSlots, WindowGroup
from sdk.memory.demand import MemoryDemand, cache_of_request, frames_of_request

#: The most that frames and working states take of a GPU's bytes.
_FRAMES_SHARE = 1 / 2
#: Snapshots for each request if no budget was asked for: of its turns, and where others branch.
_SNAPSHOTS = 8
#: The part of the bytes that snapshots of states may take.
_SNAPSHOTS_SHARE = 1 / 4
#: What a known page takes besides its keys and values: entries of tables, and for each token an
#: integer in its key. 900 bytes were measured with 16 tokens (tracemalloc, 4,096 and 16,384 pages
#: of random tokens).
_ID_BYTES, _ID_TOKEN_BYTES = 384, 40
#: The part of the bytes that pages may take which have nothing else.
_IDS_SHARE = 1 / 16


class MemoryShares(NamedTuple):
    """The places of each kind. ``longest``: pages of the longest request that they can hold.
    ``ids``: bytes of pages beyond those of running requests, if pages have no keys and values."""

    pages: int
    windows: tuple[WindowGroup, ...]
    states: StateSlots | None
    longest: int
    ids: int = 0


def share_memory(
    demand: MemoryDemand, nbytes: int, context: int, step_tokens: int, *, asked: bool
) -> MemoryShares:
    """The places that ``nbytes`` are enough for, with requests of up to ``context`` tokens and
    steps of ``step_tokens``: not more than all requests together can have.

    ``asked``: these bytes were asked for, so that windows that requests have left may be kept for
    others as long as their pages; otherwise there is room for one more window of each request.
    """
    seqs, per_request = demand.max_num_seqs, -(-context // demand.page_size)
    if demand.num_pages is not None:
        pages = min(demand.num_pages, nbytes // demand.page_bytes)
        return MemoryShares(pages, (), None, pages)
    longest = _longest(demand, nbytes, per_request, step_tokens)
    most_pages = per_request * seqs
    if not demand.windows and not demand.slot_bytes:
        return MemoryShares(min(nbytes // demand.page_bytes, most_pages), (), None, longest)
    step = min(-(-step_tokens // demand.page_size), per_request)
    claims, sizes = (
        frames_of_request(demand, per_request),
        [one.frame_bytes for one in demand.windows],
    )
    working = demand.slots_of_request
    own = sum(map(mul, claims, sizes)) + working * demand.slot_bytes
    left = max(nbytes - step * sum(sizes) - demand.snapshot_bytes, 0)
    requests = left // (own + per_request * demand.page_bytes)
    if demand.on_cards:  # of short requests there are more
        beside = max(left - per_request * demand.page_bytes, 0)
        requests = max(requests, min(int(left * _FRAMES_SHARE), beside) // max(own, 1))
    requests = max(min(requests, seqs), 1)
    left = max(left - requests * own, 0)
    ids = 0 if demand.page_bytes else _more_ids(demand, left, most_pages, per_request)
    left -= ids * id_bytes(demand.page_size)
    snapshots = 1  # that is read
    if demand.slot_bytes:
        most = most_pages if asked else _SNAPSHOTS * seqs
        more = min(int(left * _SNAPSHOTS_SHARE) // demand.snapshot_bytes, most)
        snapshots, left = snapshots + more, left - more * demand.snapshot_bytes
    pages = most_pages + ids
    if demand.page_bytes:
        pages = min(left // demand.page_bytes, most_pages)
    left -= pages * demand.page_bytes
    groups = []
    for claim, group in zip(claims, demand.windows, strict=True):
        frames = requests * claim + step
        most = most_pages if asked else max(2 * claim * seqs, frames)
        more = min(left // sum(sizes), max(most - frames, 0))
        groups.append(group._replace(num_frames=1 + min(frames + more, most_pages)))
    states = _states(demand, requests * working, snapshots) if demand.slot_bytes else None
    return MemoryShares(pages, tuple(groups), states, longest, ids * id_bytes(demand.page_size))


def _more_ids(demand: MemoryDemand, nbytes: int, most_pages: int, per_request: int) -> int:
    """How many pages without keys and values to keep for prefixes of ended requests. A state is
    found only while all pages before it are known, so each snapshot that fits into ``nbytes`` may
    have a prefix of full length. Frames of windows are as many as pages already."""
    if not demand.slot_bytes:
        return 0
    snapshots = min(nbytes // demand.snapshot_bytes, most_pages)
    most = int(nbytes * _IDS_SHARE) // id_bytes(demand.page_size)
    return min(most, snapshots * per_request)


def id_bytes(page_size: int) -> int:
    """What a known page of ``page_size`` tokens takes besides its keys and values."""
    return _ID_BYTES + _ID_TOKEN_BYTES * page_size


def least_for_one(
    demand: MemoryDemand, pages: int, step_tokens: int
) -> tuple[tuple[WindowGroup, ...], StateSlots | None]:
    """The frames and slots that one request of this many pages needs at least, as
    ``cache_of_request`` counts them."""
    step, claims = -(-step_tokens // demand.page_size), frames_of_request(demand, pages)
    windows = tuple(
        group._replace(num_frames=1 + min(claim + step, pages))
        for claim, group in zip(claims, demand.windows, strict=True)
    )
    if not demand.slot_bytes:
        return windows, None
    return windows, _states(demand, demand.slots_of_request, 1)


def _states(demand: MemoryDemand, working: int, snapshots: int) -> StateSlots:
    """The slots and places of so many states that change and that are kept."""
    if not demand.rounded_bytes:
        return StateSlots(demand.slot_bytes, 1 + working + snapshots, demand.row_drafts)
    places = demand.rounded_bytes, 1 + snapshots
    return StateSlots(demand.slot_bytes, 1 + working, demand.row_drafts, *places)


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
