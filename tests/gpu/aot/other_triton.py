"""What another version of Triton makes of the kernels, beside the records of the usual one.

    PYTHONPATH=FOLDER python tests/gpu/aot/sweep.py sm_90 --sample --out OTHER
    python tests/gpu/aot/other_triton.py OTHER/sm_90.txt

FOLDER has the other Triton (``pip install --no-deps --target FOLDER triton==3.7.1``). Without
``--sample`` all variants are compiled.

Prints a table by kernel, and each variant that spills more or fits fewer programs on a processor.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.gpu.aot.records import Compiled, Record, together
from tests.gpu.aot.sweep import COMPILED

HEAD = ("kernel", "variants", "instructions", "from", "to", "spill more", "fewer programs")
NAMES = ("registers", "stack", "shared")


@dataclass(frozen=True)
class Pair:
    """A variant as both versions compile it."""

    card: str
    case: str
    ours: Compiled
    other: Compiled

    @property
    def share(self) -> float | None:
        """Instructions of the loop, or of a kernel without one, as a share of ours.

        None: they were not read, or only one of the two has a loop.
        """
        ours, other = self.ours.numbers, self.other.numbers
        if bool(ours.get("loop")) != bool(other.get("loop")):
            return None
        name = "loop" if ours.get("loop") else "instructions"
        return other[name] / ours[name] if ours.get(name) and other.get(name) else None

    @property
    def spills_more(self) -> bool:
        return self.other.numbers["stack"] > self.ours.numbers["stack"]

    @property
    def fits_less(self) -> bool:
        fits = [together(self.card, one.numbers) for one in (self.ours, self.other)]
        return fits[1] < fits[0]


def pairs(ours: Record, other: Record, card: str) -> list[Pair]:
    """Of the variants that both records have."""
    both = sorted(ours.variants.keys() & other.variants.keys())
    return [Pair(card, case, ours.variants[case], other.variants[case]) for case in both]


def table(found: Sequence[Pair]) -> str:
    """Of each kernel: variants, the share of instructions (median, range), which became worse."""
    rows: list[Sequence[str]] = [HEAD, ("---",) + ("---:",) * (len(HEAD) - 1)]
    in_order = sorted(found, key=lambda pair: pair.ours.kernel)
    for kernel, group in itertools.groupby(in_order, key=lambda pair: pair.ours.kernel):
        some = list(group)
        shares = [share for pair in some if (share := pair.share) is not None]
        span = (statistics.median(shares), min(shares), max(shares)) if shares else ()
        numbers = [f"{x:.2f}" for x in span] or [""] * 3
        worse = (sum(pair.spills_more for pair in some), sum(pair.fits_less for pair in some))
        rows.append((kernel, str(len(some)), *numbers, *map(str, worse)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def worse(found: Sequence[Pair]) -> Iterator[str]:
    """A line for each variant that spills more or fits fewer programs on a processor."""
    for pair in found:
        if pair.spills_more or pair.fits_less:
            ours, other = pair.ours.numbers, pair.other.numbers
            yield f"{pair.case}: " + ", ".join(f"{ours[n]:g} -> {other[n]:g} {n}" for n in NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="OTHER/CARD.txt, written by another Triton")
    path = parser.parse_args().record
    ours, other = Record(COMPILED, path.stem), Record(path.parent, path.stem)
    found = pairs(ours, other, path.stem)
    print(f"Triton {other.triton} beside {ours.triton}: {len(found)} of {len(ours.variants)}")
    print("\n".join([table(found), *worse(found)]))


if __name__ == "__main__":
    main()
