"""What the layers of a model keep of the tokens before: the kinds of caches.

A model names its caches in the order of its layers (``ModelConfig.caches``). A layer may have one,
two (attention beside a recurrent mixer) or none, and layers may share one. The engine allocates
memory, finds prefixes and moves contents by these descriptions alone; only operators know what the
numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

_LINE = 64  # bytes of a cache line
#: Bytes of an element of a state, by the name of its torch dtype.
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class AttentionCache(NamedTuple):
    """Keys and values of every token in pages.

    ``kv_heads``: of all ranks together, or of one. ``window``: how many tokens a token sees, itself
    included; pages that every later token is beyond are given back. ``None``: all tokens.
    ``latent``: one vector for each token and head, whose first ``value_dim`` numbers are the
    value: no values are stored.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    latent: bool = False


class StatePart(NamedTuple):
    """One tensor of a recurrent state: its name, its shape for one sequence, its torch dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes for one sequence."""
        return math.prod(self.shape) * _BYTES[self.dtype]


class StateCache(NamedTuple):
    """A recurrent state of one size per sequence, which every token changes."""

    parts: tuple[StatePart, ...]

    @property
    def part_bytes(self) -> tuple[int, ...]:
        """What each part takes of one layer's state of one sequence: whole cache lines."""
        return tuple(-(-part.nbytes // _LINE) * _LINE for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's state of one sequence."""
        return sum(self.part_bytes)


#: The fewest numbers of a rounded state that have a scale of their own.
_LEAST_SCALED = 64


def rounded(cache: StateCache) -> StateCache:
    """A state as its snapshots keep it in 16 bits: each float32 part as float16, then the float32
    scales that it was divided by (:func:`scales_of`). Other parts stay."""
    parts: list[StatePart] = []
    for part in cache.parts:
        if part.dtype == "float32":
            scales = StatePart(f"{part.name}_scale", (scales_of(part),))
            parts += [part._replace(dtype="float16"), scales]
        else:
            parts.append(part)
    return StateCache(tuple(parts))


def scales_of(part: StatePart) -> int:
    """How many scales a rounded part has: one for each index of its first dimension, most often a
    head, or one for all if these have few numbers each."""
    whole = math.prod(part.shape[1:]) >= _LEAST_SCALED
    return part.shape[0] if whole else 1


Cache = AttentionCache | StateCache


def described(cache: Cache) -> dict[str, Any]:
    """A cache as JSON, for files and messages."""
    if isinstance(cache, StateCache):
        return {"state": [[part.name, list(part.shape), part.dtype] for part in cache.parts]}
    return cache._asdict()


def cache_of(fields: dict[str, Any]) -> Cache:
    """The inverse of :func:`described`.

    :raises ValueError, KeyError, TypeError, IndexError: it is none of its results.
    """
    if "state" in fields:
        parts = [StatePart(str(one[0]), tuple(one[1]), str(one[2])) for one in fields["state"]]
        counts = [count for part in parts for count in part.shape]
        if not parts or not all(map(_is_count, counts)):
            raise ValueError(parts)
        found = StateCache(tuple(parts))
        found.nbytes  # noqa: B018 (a KeyError if a type does not exist)
        return found
    cache = AttentionCache(**fields)
    counts = [cache.kv_heads, cache.key_dim, cache.value_dim]
    counts += [] if cache.window is None else [cache.window]
    odd = cache.key_dim % 2 or cache.value_dim % 2
    if odd or not all(map(_is_count, counts)) or type(cache.latent) is not bool:
        raise ValueError(cache)
    return cache


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def window_groups(caches: Sequence[Cache]) -> tuple[int, ...]:
    """The windows of the window groups, in the order of their first layers. Caches with one window
    have one page table; those that keep all tokens are in no window group."""
    windows = (one.window for one in caches if isinstance(one, AttentionCache))
    return tuple(dict.fromkeys(window for window in windows if window is not None))


def pages_in_window(window: int, tokens: int, page_size: int) -> int:
    """The most pages that the next ``tokens`` of a request see and write, the first of which sees
    ``window`` tokens, itself included."""
    return (window + tokens - 3) // page_size + 2 if window + tokens > 2 else 1


def tokens_in_window(window: int, pages: int, page_size: int) -> int:
    """The most tokens for which :func:`pages_in_window` is at most ``pages``."""
    return (pages - 1) * page_size - window + 2
