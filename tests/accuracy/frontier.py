"""The measured frontier: every weight format and type of keys and values of two real models.

    python -m tests.accuracy.frontier              # measure what is not in tests/accuracy/baselines
    python -m tests.accuracy.frontier --check      # everything again: exit 1 naming what is worse
    python -m tests.accuracy.frontier --rows 'int4 *'

Every row is kept as soon as it is known, so that a stopped run goes on where it was (delete a line
of a baseline to have it measured again). Behind the rows it writes the tables and the plot of
docs/quantization.md and quant/expected_loss.json. Nothing is downloaded: ``make models`` before it.
About an hour on two cores, most of it GPTQ; files made stay in build/frontier.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import torch

from tests.accuracy import baselines
from tests.accuracy.baselines import Row, worse
from tests.accuracy.measuring import ROOT, made_by_this_code, measure
from tests.accuracy.points import BASES, Base, Point, Tier
from tests.accuracy.tables import write_documents


def missing(base: Base, tier: Tier, rows: Sequence[str], check: bool) -> Iterator[Point]:
    """Points to measure: what is not committed, or with ``check`` what is."""
    known = baselines.read(base.name, tier)
    for point in base.tier(tier)[1]:
        if (point in known) == check and any(fnmatch(str(point), row) for row in rows):
            yield point


def add(base: Base, tier: Tier, point: Point, row: Row) -> None:
    """Keep a row, in the order of the points."""
    known = {**baselines.read(base.name, tier), point: row}
    order = [point for point in base.tier(tier)[1] if point in known]
    baselines.write(base.name, tier, {point: known[point] for point in order})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with what is committed")
    parser.add_argument("--base", choices=BASES, action="append", help="default: all")
    parser.add_argument("--tier", choices=get_args(Tier), action="append", help="default: both")
    parser.add_argument("--rows", action="append", help="a pattern: 'int4 *', '* k8v4 *'")
    parser.add_argument("--made", type=Path, default=ROOT / "build" / "frontier")
    args = parser.parse_args(argv)
    # torch adds in another order on more threads, and what GPTQ then rounds the other way moves a
    # divergence by 5 %: gptq-w4g64 of SmolLM2 is 0.0693 made on one, 0.0726 on two.
    torch.set_num_threads(1)
    failed = 0
    for base in (BASES[name] for name in args.base or BASES):
        file = _file(base)
        folder = made_by_this_code(args.made / base.name)
        folder.mkdir(parents=True, exist_ok=True)
        for tier in args.tier or get_args(Tier):
            for point in missing(base, tier, args.rows or ["*"], args.check):
                row = measure(point, file, base.tier(tier)[0], folder)
                told = f"KLD {row.kld:.4f}, {row.bits:.2f} bits"
                if args.check:
                    wrong = worse(baselines.read(base.name, tier)[point], row, tier)
                    failed += bool(wrong)
                    told = "worse: " + ", ".join(wrong) if wrong else told
                else:
                    add(base, tier, point, row)
                print(f"{base.name} {tier}: {point}: {told}", flush=True)
    if not args.check:
        write_documents()
    return 1 if failed else 0


def _file(base: Base) -> Path:
    """Where the tests find it too."""
    from sdk.api.machine import cache_folder

    folder = os.environ.get("EMBEDLM_TEST_MODELS")
    path = (Path(folder) if folder else cache_folder()) / base.file
    if not path.is_file():
        raise SystemExit(f"{path} is missing: run `make models`")
    return path


if __name__ == "__main__":
    sys.exit(main())
