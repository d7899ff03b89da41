"""How often the experts of a model were used: kept beside its packed weights for the next opening.

Only a model whose experts do not all stay in memory has such a file, ``NAME.uses``. The next
opening first reads the experts that were used most, and its plan says how many bytes a token will
read. If a file is missing or damaged, nothing is known: no answer depends on it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.engine.model_key import files_key
from sdk.engine.weight_cache.folder import USES, made_folder, opened, prune_uses
from sdk.kernels.dataclass import dataclass
from sdk.kernels.weights.expert_slots import RANKS
from sdk.kernels.whole_file import replace_file

if TYPE_CHECKING:
    from sdk.kernels.cpu.expert_cache import ExpertHistory

VERSION = 1
#: Tokens that a file remembers: with more, older ones count less.
MOST_TOKENS = 1 << 16
#: Larger files are not read: 60 layers of 384 experts take 160 KB.
_MOST_BYTES = 1 << 22
#: Tokens whose uses were ranked before anything is said about the next ones.
_LEAST_RANKED = 8
logger = logging.getLogger("sdk")


@dataclass(frozen=True, slots=True)
class ExpertUses:
    """Uses of the experts of a model by ``tokens``, as :class:`~sdk.kernels.cpu.expert_cache.
    ExpertHistory` has them."""

    tokens: int
    chosen: tuple[tuple[int, ...], ...]
    ranked: int
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, history: ExpertHistory) -> ExpertUses:
        """What an engine has seen."""
        chosen = tuple(map(tuple, history.chosen))
        return cls(history.tokens, chosen, history.ranked, tuple(history.ranks))

    def shares(self) -> list[list[float]]:
        """Of each layer the share of tokens that chose each expert."""
        return [[count / max(self.tokens, 1) for count in layer] for layer in self.chosen]

    def missed(self) -> tuple[float, ...]:
        """The share of uses that a cache with 0, 1 / n, 2 / n ... 1 of all experts misses; empty:
        too few tokens have been ranked."""
        total = sum(self.ranks)
        if self.ranked < _LEAST_RANKED or not total:
            return ()
        found = [total]
        for count in self.ranks[:-1]:
            found.append(found[-1] - count)
        # An expert that was never used is missed, unless all are in memory.
        return (*(one / total for one in found[:-1]), 0.0)

    def plus(self, new: ExpertUses) -> ExpertUses:
        """These and ``new`` ones, :data:`MOST_TOKENS` at most: older ones count less."""
        if [*map(len, self.chosen)] != [*map(len, new.chosen)]:
            nothing = tuple((0,) * len(layer) for layer in new.chosen)
            return ExpertUses(0, nothing, 0, (0,) * (RANKS + 1)).plus(new)
        own, other = _weights(self.tokens, new.tokens)

        def both(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
            return tuple(round(x * own + y * other) for x, y in zip(a, b, strict=True))

        tokens, ranked = both((self.tokens, self.ranked), (new.tokens, new.ranked))
        chosen = tuple(both(a, b) for a, b in zip(self.chosen, new.chosen, strict=True))
        ranks = both(self.ranks, new.ranks)
        return ExpertUses(tokens, chosen, ranked, ranks)


_NOTHING = ExpertUses(0, (), 0, ())


def _weights(old: int, new: int) -> tuple[float, float]:
    """The weights of old and new tokens, with which both are at most :data:`MOST_TOKENS`."""
    if new >= MOST_TOKENS:
        return 0.0, MOST_TOKENS / new
    return min(1.0, (MOST_TOKENS - new) / max(old, 1)), 1.0


def uses_name(path: Path, quantization: str | None, overrides: Mapping[str, Any]) -> str:
    """32 hexadecimal digits for a model. They do not depend on the CPU's level and on our version,
    as the name of its packed weights does: neither changes its routers.

    :raises CheckpointError: a file cannot be read.
    """
    facts = [files_key(path), quantization, dict(overrides)]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_uses(folder: Path, name: str) -> ExpertUses | None:
    """What is known of a model; ``None``: nothing, or the file is damaged."""
    path = folder / f"{name}{USES}"
    try:
        if (number := opened(path)) is None:
            return None
        with open(number, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"expected at most {_MOST_BYTES} bytes")
        return _parsed(json.loads(data))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.debug("%s: cannot be read, nothing is known of the experts: %s", path, error)
        return None


def _parsed(found: Any) -> ExpertUses:
    """:raises ValueError: it is not what was written; TypeError and KeyError say the same."""
    if found["version"] != VERSION:
        raise ValueError("another version")
    tokens, ranked = _numbers([found["tokens"], found["ranked"]], MOST_TOKENS)
    # A token may choose an expert once; rounding adds one.
    chosen = tuple(_numbers(layer, tokens + 1) for layer in found["chosen"])
    ranks = _numbers(found["ranks"], 1 << 53)
    if len(ranks) != RANKS + 1 or not tokens:
        raise ValueError("ranks or tokens are missing")
    return ExpertUses(tokens, chosen, ranked, ranks)


def _numbers(found: Any, most: int) -> tuple[int, ...]:
    if not isinstance(found, list):
        raise TypeError("expected a list of numbers")
    if not all(type(one) is int and 0 <= one <= most for one in found):
        raise ValueError(f"expected numbers from 0 to {most}")
    return tuple(found)


def keep_uses(folder: Path, name: str, new: ExpertUses) -> None:
    """Add what an engine has seen. If two do that at the same moment, what one saw is lost."""
    if not new.tokens:
        return
    both = (read_uses(folder, name) or _NOTHING).plus(new)
    content = {
        "version": VERSION,
        "tokens": both.tokens,
        "chosen": both.chosen,
        "ranked": both.ranked,
        "ranks": both.ranks,
    }
    try:
        made_folder(folder)
        replace_file(folder / f"{name}{USES}", json.dumps(content).encode(), sync=False)
        prune_uses(folder)
    except OSError as error:
        logger.debug("uses of experts are not kept in %s: %s", folder, error)
