"""Slots for experts that do not all stay in memory: their bytes, and how many fit."""

from __future__ import annotations

from collections.abc import Mapping

from sdk.kernels.errors import KernelError

#: What reads of a disk begin and end at: kBlock of cpu/native/expert_cache.cpp.
_BLOCK = 4096
#: Parts of all experts by which uses are ranked: kExpertRanks of cpu/native/abi_experts.hpp.
RANKS = 64


def slot_bytes(nbytes: int) -> int:
    """Of a matrix, which may begin inside a block of the disk."""
    return -(-nbytes // _BLOCK) * _BLOCK + _BLOCK


def slots_within(budget: int, matrices: Mapping[int, int], least: int) -> dict[int, int]:
    """How many slots of each size fit ``budget`` bytes. ``matrices``: how many there are, by the
    bytes of a slot. Each size gets the same share of its matrices, and ``least`` at least.

    :raises KernelError: ``least`` of each do not fit.
    """
    slots: dict[int, int] = {}
    for _ in matrices:  # a size with its least leaves less for the others
        left = budget - sum(size * count for size, count in slots.items())
        others = {size: count for size, count in matrices.items() if size not in slots}
        share = min(left / max(sum(size * count for size, count in others.items()), 1), 1.0)
        few = {size: min(least, count) for size, count in others.items() if share * count < least}
        if not few or share >= 1.0:
            slots |= {size: int(share * count) for size, count in others.items()}
            break
        slots |= few
    needed = sum(size * count for size, count in slots.items())
    if needed > budget:
        raise KernelError(f"experts: expected at least {needed} bytes for them, found {budget}")
    return slots
