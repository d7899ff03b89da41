"""Which rank has which experts, where every rank has whole ones: pure arithmetic.

:func:`place_experts` decides by the load of each expert; one with much load may have copies on
several ranks. The result depends on the arguments only, so all ranks compute the same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from sdk.quant.errors import AlignmentError

#: The experts of each rank, in ascending order.
Placement = tuple[tuple[int, ...], ...]


def place_experts(loads: Sequence[int], ranks: int, redundant: int = 0, turn: int = 0) -> Placement:
    """Spread experts with the given loads over ranks, with ``redundant`` additional copies.

    Every copy goes to the expert with the largest load per copy. Then the copies, largest load per
    copy first, each go to the rank with the least load that has room. Numbers of experts differ by
    at most one between ranks; ``turn`` is the first rank that has one more. Ties are broken by
    number, so the result depends on the arguments only.

    :raises AlignmentError: a rank would have no expert, or an expert two copies on one rank.
    """
    count = len(loads)
    check_spread(count, ranks, redundant)
    copies = [1] * count
    for _ in range(redundant):
        below = (e for e in range(count) if copies[e] < ranks)
        copies[min(below, key=lambda e: (-loads[e] / copies[e], copies[e], e))] += 1
    share = [load / number for load, number in zip(loads, copies, strict=True)]
    total = count + redundant
    room = [total // ranks + ((rank - turn) % ranks < total % ranks) for rank in range(ranks)]
    held: list[set[int]] = [set() for _ in range(ranks)]
    carried = [0.0] * ranks

    def rank_order(rank: int) -> tuple[float, int, int]:
        return carried[rank], len(held[rank]), (rank - turn) % ranks

    for expert in sorted(range(count), key=lambda e: (-share[e], e)):
        for _ in range(copies[expert]):
            free = [rank for rank in range(ranks) if len(held[rank]) < room[rank]]
            fitting = [rank for rank in free if expert not in held[rank]]
            if fitting:
                chosen = min(fitting, key=rank_order)
            else:
                chosen = next(rank for rank in range(ranks) if expert not in held[rank])
                _make_room(held, carried, chosen, free[0], share)
            held[chosen].add(expert)
            carried[chosen] += share[expert]
    return tuple(tuple(sorted(own)) for own in held)


def check_spread(count: int, ranks: int, redundant: int) -> None:
    """Reject what :func:`place_experts` cannot place.

    :raises AlignmentError: a rank would have no expert, or an expert two copies on one rank.
    """
    if count < ranks:
        raise AlignmentError(
            f"cannot spread {count} experts over {ranks} ranks: expected at most {count} ranks; "
            f"use tensor_parallel_size={count}, or leave out enable_expert_parallel"
        )
    if redundant > count * (ranks - 1):
        raise AlignmentError(
            f"num_redundant_experts: expected at most {count * (ranks - 1)} ({count} experts on "
            f"each of {ranks} ranks), found {redundant}"
        )


def _make_room(
    held: list[set[int]], carried: list[float], full: int, free: int, share: Sequence[float]
) -> None:
    """Move an expert from a full rank to one with room. The full rank has at least as many experts,
    and lacks one that the other has: so it has one that the other lacks."""
    moved = min(held[full] - held[free], key=lambda e: (share[e], e))
    for rank, sign in ((full, -1), (free, 1)):
        held[rank] ^= {moved}
        carried[rank] += sign * share[moved]


def rebalanced(before: Placement, loads: Sequence[int], redundant: int, turn: int = 0) -> Placement:
    """The placement for measured loads, with few moves from the one ``before``.

    It stays as it is unless another one gives the busiest rank less load. Ranks exchange what they
    would get, if they have the same number of experts, so that each keeps most of its own.
    """
    found = place_experts(loads, len(before), redundant, turn)
    if busiest(found, loads) >= busiest(before, loads):
        return before
    pairs = [
        (-len(set(own) & set(old)), rank, index)
        for rank, old in enumerate(before)
        for index, own in enumerate(found)
        if len(own) == len(old)
    ]
    chosen: dict[int, int] = {}
    for _, rank, index in sorted(pairs):
        if rank not in chosen and index not in chosen.values():
            chosen[rank] = index
    return tuple(found[chosen[rank]] for rank in range(len(before)))


def busiest(placement: Placement, loads: Sequence[int]) -> float:
    """The load of the rank that has the most; copies of an expert share its load."""
    copies = Counter(chain(*placement))
    return max(sum(loads[e] / copies[e] for e in own) for own in placement)
