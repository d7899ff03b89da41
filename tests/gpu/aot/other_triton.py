"""What another Triton makes of the kernels: its records of a card beside those committed.

    PYTHONPATH=FOLDER python tests/gpu/aot/sweep.py sm_90 --out OTHER   # FOLDER: the other Triton
    python tests/gpu/aot/other_triton.py OTHER/sm_90.txt

Prints a table by kernel and each variant that fits fewer programs on a processor or spills more.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.gpu.aot.records import Compiled, Record, together
from tests.gpu.aot.sweep import COMPILED

Pair = tuple[Compiled, Compiled]


def pairs(ours: Record, other: Record) -> dict[str, Pair]:
    """The variants that both records have, by name."""
    both = ours.variants.keys() & other.variants.keys()
    return {case: (ours.variants[case], other.variants[case]) for case in sorted(both)}


def share(pair: Pair) -> float | None:
    """Instructions of the loop, or of a kernel without one, as a share of ours; None: not read."""
    ours, other = (x.numbers.get("loop") or x.numbers.get("instructions") for x in pair)
    return other / ours if ours and other else None


def table(found: dict[str, Pair]) -> str:
    """Of each kernel: variants, the share of instructions (median and range), who became worse."""
    head = ("kernel", "variants", "instructions", "from", "to", "spill more", "fewer programs")
    rows = [head, ("---",) + ("---:",) * 6]
    by_kernel = sorted(found.values(), key=lambda pair: pair[0].kernel)
    for kernel, group in itertools.groupby(by_kernel, key=lambda pair: pair[0].kernel):
        some = list(group)
        shares = [x for pair in some if (x := share(pair)) is not None]
        numbers = (
            [f"{x:.2f}" for x in (statistics.median(shares), min(shares), max(shares))]
            if shares
            else [""] * 3
        )
        spill = sum(spills_more(pair) for pair in some)
        fewer = sum(fits_less(pair) for pair in some)
        rows.append((kernel, str(len(some)), *numbers, str(spill), str(fewer)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def spills_more(pair: Pair) -> bool:
    ours, other = (x.numbers["stack"] for x in pair)
    return other > ours


def fits_less(pair: Pair, card: str = "sm_90") -> bool:
    ours, other = (together(card, x.numbers) for x in pair)
    return other < ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path, help="OTHER/CARD.txt, written by another Triton")
    path = parser.parse_args().record
    card = path.stem
    ours, other = Record(COMPILED, card), Record(path.parent, card)
    found = pairs(ours, other)
    print(f"Triton {other.triton} beside {ours.triton}: {len(found)} of {len(ours.variants)}")
    print(table(found))
    for case, (before, now) in found.items():
        if spills_more((before, now)) or fits_less((before, now), card):
            names = ("registers", "stack", "shared")
            numbers = (f"{before.numbers[n]:g} -> {now.numbers[n]:g} {n}" for n in names)
            print(f"{case}: " + ", ".join(numbers))


if __name__ == "__main__":
    main()
