"""Random numbers as a pure function of (request seed, position, stream).

A counter-based generator has no state, so a request draws the same numbers alone, in a batch, after
a preemption and on any device. Each word goes through SplitMix64's finalizer (Steele, Lea and Flood
2014).
"""

from __future__ import annotations

_MASK = 2**64 - 1

#: Streams, for positions that need more than one independent number.
TOKEN, XTC = 0, 1


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, position: int, stream: int = TOKEN) -> float:
    """A number in [0, 1) with 52 random bits; ``position`` is the index of the output token."""
    word = _mix(_mix(_mix(seed & _MASK) ^ position) ^ stream)
    return (word >> 12) * 2.0**-52


def child_seed(seed: int, index: int) -> int:
    """The seed of answer ``index`` if ``n > 1``; answer 0 has the request's own seed."""
    return seed if index == 0 else _mix(_mix(seed & _MASK) ^ index)
