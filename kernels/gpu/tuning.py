"""Tile sizes: from the card's table if there is one, otherwise by a rule.

``kernels/tuned/<card>.json``: ``{"version": 4, "capability": [9, 0], "processors": 132,
"dense_from": 256, "experts_dense_from": 256, "linear": {"int4g128": [{"max_m", "n", "k", "block_n",
"block_m", "split", "warps", "stages"}]}}`` and the same for the other ``OPS``. An entry is for
weights of n rows and k columns and up to ``max_m`` tokens (for experts: rows per expert on
average), under the weight's name from :func:`type_of`. ``embedlm tune`` writes the table.

A card without a table takes that of a sister: one with as many processors of the same compute
capability, such as an H100's on an H200, which differ in their memory. ``capability`` and
``processors`` are for that alone; a table without them serves its own card. A card with no table,
or with one that cannot be read, uses the rule.

``"libraries": {"scaled_mm": [{"n", "k", "from_m"}]}`` is optional: for what a kernel of a library
is faster, and from how many tokens on. ``LIBRARIES`` has the fields by which its entries are found;
``type`` is that of the weight, or of the pages. For experts ``from_m`` counts rows of an expert on
average. ``"slower"`` lists what was measured and is not faster, or is wrong, with the reason: that
is for people, and for ``embedlm tune``, which does not measure it again.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile
from zipimport import zipimporter

from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.byte_rows import ByteRows
from sdk.kernels.gpu.packing import Packed
from sdk.kernels.gpu.scratch import MOST_SHARES

TABLES = Path(__file__).parents[1] / "tuned"
#: The version of tables; those of other versions were measured with other kernels.
VERSION = 4
#: Loads in flight on AMD's cards: with three, 64 tokens with 2 or 3 bits would need up to 72 KiB,
#: but a program may only have 64.
AMD_STAGES = 2
#: Kinds of bytes of which a tile may have 256 rows, by the major compute capability: those that the
#: matrix units read from shared memory. As registers they leave no room for 256 rows.
DOUBLED = {9: ("int", "e4m3"), 10: ("e4m3",)}
OPS = ("linear", "linear_bytes", "linear_experts", "linear_bytes_experts")
#: What reading a file raises that does not hold a table.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, KernelError)
logger = logging.getLogger("sdk")
#: Library -> the fields of its entries that say for what it is faster.
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "scaled_mm": ("n", "k"),
    "grouped_mm": ("type", "n", "k"),
    "cudnn_attention": ("type", "head_dim"),
    "humming": ("type", "n", "k"),
}
#: (library, values of these fields) -> the fewest tokens for which it is faster.
Libraries = Mapping[tuple[Any, ...], int]
#: Why the kernel of a library is not chosen though it could run.
NOT_FASTER = "no table of this card says that it is faster"
#: (op, type, rows, columns) -> (most tokens, tiles), fewest tokens first.
Table = Mapping[tuple[str, str, int, int], Sequence[tuple[int, "Tiles"]]]


class Tiles(NamedTuple):
    """Rows and tokens per program, programs that share K, warps, loads in flight."""

    block_n: int
    block_m: int
    split: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """``tiles`` for a weight and a number of tokens on one card.

    ``programs``: how many programs of four warps fill the card. ``stages``: loads in flight for a
    product of several tokens. ``dense_from``: from so many tokens on, a weight is dequantized into
    scratch; ``experts_dense_from``: the same for experts, in rows per expert on average.
    ``doubled``: see :data:`DOUBLED`. ``table``, ``libraries``: see the module.
    """

    programs: int
    dense_from: int = 256
    experts_dense_from: int = 256
    table: Table | None = None
    stages: int = 3
    doubled: tuple[str, ...] = ()
    libraries: Libraries = field(default_factory=dict)

    def tiles(
        self, w: Packed | ByteRows, tokens: int, op: str = "linear", experts: int = 1
    ) -> Tiles:
        """``experts``: how many weights of the same shape the card multiplies at the same time."""
        return self.measured(w, tokens, op) or self.choices(w, tokens, experts)[0]

    def choices(self, w: Packed | ByteRows, tokens: int, experts: int = 1) -> list[Tiles]:
        """The tiles among which the rule chooses, its choice first."""
        if isinstance(w, ByteRows):
            return self._of_bytes(w, tokens, experts)
        return [self._by_rule(w, tokens)]

    def measured(self, w: Packed | ByteRows, tokens: int, op: str) -> Tiles | None:
        """The table's tiles, or None."""
        if self.table is None:
            return None
        for max_m, tiles in self.table.get((op, type_of(w), *w.shape), ()):
            if tokens <= max_m:
                return tiles
        return None

    def _by_rule(self, w: Packed, tokens: int) -> Tiles:
        """For few tokens: enough programs to fill the card, each with two or four units of K."""
        if tokens == 1:
            # Rows for each value of x in a thread: 8, or 4 where codes of several planes or from a
            # table leave too few registers. Groups of 16 columns have half as many words at a time.
            many = w.kind == "table" or (len(w.planes) > 1 and w.pairs == 16)
            block_n, block_m, warps, least, stages = 32 if many else 64, 16, 1, 2, 1
        else:
            block_m = min(64, max(16, 1 << (tokens - 1).bit_length()))
            block_n, warps, least, stages = 64, 4, 4, self.stages
        tiles = -(-w.shape[0] // block_n) * -(-tokens // block_m)
        split = max(1, min(4 // warps * self.programs // tiles, w.units // least, 16))
        return Tiles(block_n, block_m, split, warps, stages)

    def _of_bytes(self, w: ByteRows, tokens: int, experts: int) -> list[Tiles]:
        """Narrow tiles and wide ones: first those with the fewest loads from the second-level cache
        per processor.

        For the pairs of bytes that a processor of Hopper multiplies per clock (4096), tiles of
        64 x 128, 128 x 128 and 256 x 128 load 96, 64 and 48 bytes; the cache delivers at most 40
        (5,120 per clock for all). The narrow ones share K and so leave no processor idle. With what
        experts need besides, or scales of groups, 256 rows do not fit the registers.
        """
        processors = max(1, self.programs // 4)

        def count(rows: int, columns: int) -> int:
            return -(-w.shape[0] // rows) * -(-tokens // columns)

        def loads(wide: Tiles) -> int:
            rows = wide.block_n
            return -(-count(rows, 128) * experts // processors) * (rows + 128)

        block_m = min(128, max(16, 1 << (tokens - 1).bit_length()))
        programs = count(64, block_m)
        fill = self.programs // max(1, block_m // 64)
        split = max(1, min(fill // programs, w.units // 4, MOST_SHARES))
        narrow = Tiles(64, block_m, split, 4, self.stages)
        if tokens <= 64:
            return [narrow]
        may_double = w.kind in self.doubled and not w.grouped and experts == 1
        rows = (128, 256) if may_double else (128,)
        wide = sorted((Tiles(n, 128, 1, 8, self.stages) for n in rows), key=loads)
        if loads(wide[0]) * processors <= programs * experts * (64 + block_m):
            return [*wide, narrow]
        return [narrow, *wide]


def type_of(w: Packed | ByteRows) -> str:
    """A name like ``int4g128`` of everything that affects the cost of dequantizing a weight.

    Suffixes: ``s``: two levels of scales; ``m``: minima; ``z``: zero points.
    """
    if isinstance(w, ByteRows):
        return f"{w.kind}8g{w.inputs.group if w.grouped else w.shape[1]}"
    more = (("s", w.super_scale is not None), ("m", w.has_minus), ("z", w.zeros is not None))
    return f"{w.kind}{w.bits}g{w.group}{''.join(letter for letter, there in more if there)}"


def table_path(card: str, folder: Path = TABLES) -> Path:
    """The path of a card's table, by the name from its driver."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}.json"


def find_table(
    card: str, capability: tuple[int, int], processors: int, folder: Path = TABLES
) -> tuple[Path, dict[str, Any]] | None:
    """The path and the data of the card's table, or of a sister's: of several the first by name.

    A file without a table gives a warning. If it is the card's own, sisters are not looked for.
    """
    own, names = table_path(card, folder), _names(folder)
    kind = {"capability": list(capability), "processors": processors}
    for path in [own] if own.name in names else [folder / name for name in names]:
        try:
            found = _read(path)
            if path == own or kind.items() <= found.items():
                return path, found
        except _UNREADABLE as error:
            _warn(path, error)
    return None


def read_tuning(
    card: str, programs: int, folder: Path = TABLES, capability: tuple[int, int] = (0, 0)
) -> Tuning:
    """The tuning with the table of :func:`find_table`; a damaged or old one only gives a warning.

    ``programs``: four for each of the card's processors.
    """
    table = find_table(card, capability, programs // 4, folder)
    if table is not None:
        path, found = table
        try:
            dense_from = int(found["dense_from"]), int(found["experts_dense_from"])
            libraries = _parse_libraries(found.get("libraries", {}))
            return Tuning(programs, *dense_from, parse_table(found), libraries=libraries)
        except _UNREADABLE as error:
            _warn(path, error)
    return Tuning(programs)


def _warn(path: Path, error: Exception) -> None:
    logger.warning("%s: not a table of tile sizes, kernels run untuned: %r", path, error)


def _names(folder: Path) -> list[str]:
    """The names of all tables. This package may be inside a zip file."""
    loader = getattr(__spec__, "loader", None)
    if folder == TABLES and isinstance(loader, zipimporter):
        inside = folder.relative_to(loader.archive).as_posix()
        with ZipFile(loader.archive) as archive:
            paths = [Path(name) for name in archive.namelist()]
        return sorted(
            p.name for p in paths if p.parent.as_posix() == inside and p.suffix == ".json"
        )
    return sorted(path.name for path in folder.glob("*.json"))


def _read(path: Path) -> dict[str, Any]:
    """A table of today's version, from the disk or from inside a zip file."""
    loader = getattr(__spec__, "loader", None)
    inside = path.parent == TABLES and isinstance(loader, zipimporter)
    data = loader.get_data(str(path)) if inside and loader is not None else path.read_bytes()
    found: dict[str, Any] = json.loads(data)
    if found["version"] != VERSION:
        raise KernelError(f"expected version {VERSION}, found {found['version']!r}")
    return found


def parse_table(found: Any) -> Table:
    """The tiles of a table file."""
    table: dict[tuple[str, str, int, int], list[tuple[int, Tiles]]] = {}
    for op in OPS:
        for kind, entries in found[op].items():
            for e in sorted(entries, key=lambda e: int(e["max_m"])):
                tiles = _checked(Tiles(*(e[name] for name in Tiles._fields)))
                table.setdefault((op, kind, e["n"], e["k"]), []).append((e["max_m"], tiles))
    return table


def _parse_libraries(found: Any) -> Libraries:
    if unknown := sorted(set(found) - set(LIBRARIES)):
        raise KernelError(f"libraries: expected {', '.join(LIBRARIES)}, found {unknown[0]!r}")
    libraries: dict[tuple[Any, ...], int] = {}
    for name, entries in found.items():
        for e in entries:
            if type(e["from_m"]) is not int or e["from_m"] < 1:
                raise KernelError(f"libraries: expected from_m of at least 1, found {e['from_m']}")
            key = (name, *(e[field] for field in LIBRARIES[name]))
            libraries[key] = e["from_m"]
    return libraries


def _checked(tiles: Tiles) -> Tiles:
    powers = (tiles.block_n, tiles.block_m, tiles.warps)
    if any(n < 1 or n & (n - 1) for n in powers) or min(tiles.block_n, tiles.block_m) < 16:
        raise KernelError(f"tiles: expected powers of 2, blocks from 16, found {tiles}")
    if tiles.split < 1 or tiles.stages < 1:
        raise KernelError(f"tiles: expected split and stages from 1, found {tiles}")
    return tiles
