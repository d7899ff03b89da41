"""Tile sizes: from a table of the card where there is one, otherwise by a rule.

``kernels/tuned/<card>.json``: ``{"dense_from": 256, "linear": {"<kind><bits>g<group>": [{"max_m",
"n", "k", "block_n", "block_m", "split", "warps", "stages"}, ...]}}``. An entry is for weights of n
rows and k columns and up to ``max_m`` tokens. A card without a table starts at once, by the rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.packing import Packed

TABLES = Path(__file__).parents[1] / "tuned"


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows and tokens of a program, programs that share K, warps, loads in flight."""

    block_n: int
    block_m: int
    split: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        powers = (self.block_n, self.block_m, self.warps)
        if any(n < 1 or n & (n - 1) for n in powers) or min(self.block_n, self.block_m) < 16:
            raise KernelError(f"tiles: expected powers of 2, blocks from 16, found {self}")
        if self.split < 1 or self.stages < 1:
            raise KernelError(f"tiles: expected split and stages from 1, found {self}")


@dataclass(frozen=True, slots=True)
class Tuning:
    """``tiles`` for a weight and a number of tokens on one card.

    ``programs``: how many of four warps fill the card. ``dense_from``: tokens from which on a
    weight is decoded into scratch. ``table``: see the module.
    """

    programs: int
    dense_from: int = 256
    table: Mapping[tuple[str, int, int], Sequence[tuple[int, Tiles]]] | None = None

    def tiles(self, w: Packed, tokens: int) -> Tiles:
        n, k = w.shape
        for max_m, tiles in (self.table or {}).get((_key(w), n, k), ()):
            if tokens <= max_m:
                return tiles
        return self._by_rule(w, tokens)

    def _by_rule(self, w: Packed, tokens: int) -> Tiles:
        """Few tokens: enough programs to fill the card, each with two or four units of K."""
        if tokens == 1:
            # four rows of a thread for each value of x; look-ups leave no registers for that
            block_n, block_m, warps, least, stages = 32, 16, 4 if w.kind == "table" else 1, 2, 1
        else:
            block_m = min(64, max(16, 1 << (tokens - 1).bit_length()))
            block_n, warps, least, stages = 64, 4, 4, 3
        tiles = -(-w.shape[0] // block_n) * -(-tokens // block_m)
        split = max(1, min(4 // warps * self.programs // tiles, w.units // least, 16))
        return Tiles(block_n, block_m, split, warps, stages)


def _key(w: Packed) -> str:
    return f"{w.kind}{w.bits}g{w.group}"


def read_tuning(card: str, programs: int, folder: Path = TABLES) -> Tuning:
    """The card's table, or none. :raises KernelError: for a table that is not as described."""
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.json"
    if not path.is_file():
        return Tuning(programs)
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")), programs)
    except (ValueError, KeyError, TypeError, AttributeError, KernelError) as error:
        raise KernelError(f"{path}: not a table of tile sizes: {error!r}") from error


def _parse(found: Any, programs: int) -> Tuning:
    table: dict[tuple[str, int, int], list[tuple[int, Tiles]]] = {}
    for kind, entries in found["linear"].items():
        for e in sorted(entries, key=lambda e: int(e["max_m"])):
            tiles = Tiles(e["block_n"], e["block_m"], e["split"], e["warps"], e["stages"])
            table.setdefault((kind, e["n"], e["k"]), []).append((e["max_m"], tiles))
    return Tuning(programs, int(found["dense_from"]), table)
