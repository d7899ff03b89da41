"""Measure the best tile sizes for this GPU and save them for all later starts.

An interrupted run continues where it stopped: entries of the table are not measured again. While
entries are measured, processes on the other cores compile the kernels of later ones
(``tune_compile.py``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.errors import RequestError
from sdk.api.load_progress import is_terminal

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.bench.gpu.card import Card
    from sdk.bench.tune.cases import Case, Product
    from sdk.bench.tune.libraries import Contest
    from sdk.kernels.gpu.tuning import Tiles, Tuning

#: Numbers of tokens, or rows of an expert, from which dequantizing into scratch may be faster.
_MANY = (64, 128, 256, 512, 1024)
#: Operator -> the table's name for the number of tokens from which it dequantizes its weights.
DENSE_FROM = {"linear": "dense_from", "linear_experts": "experts_dense_from"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="tune for the layers of this file or folder (default: layers of "
        "models from 0.6B to 70B in 4 and 8 bits)"
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="stop after this time (default: 540)"
    )
    parser.add_argument(
        "--out", metavar="FOLDER", help="default: the folder where this package reads tables"
    )
    parser.add_argument(
        "--again", action="store_true", help="start over: measure entries of the table again"
    )


class Table:
    """The table file of one card; every entry is written as soon as it is measured. ``facts`` are
    those by which its sisters find it.

    ``measuring`` in the file is the entry that was begun last. If the process was lost with it, as
    happens with a kernel that makes the card unusable, the next run leaves it out (``lost``).
    """

    def __init__(self, path: Path, *, again: bool, facts: Mapping[str, Any] | None = None) -> None:
        from sdk.kernels.gpu.tuning import OPS, VERSION, Tuning

        self.path = path
        self.data: dict[str, Any] = {"version": VERSION}
        self.data |= {name: getattr(Tuning(1), name) for name in DENSE_FROM.values()}
        self.data |= {op: {} for op in OPS} | {"libraries": {}, "slower": {}}
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = None
        if not again and isinstance(found, dict) and found.get("version") == VERSION:
            self.data |= found
        self.data |= facts or {}
        self.data.setdefault("lost", [])
        if begun := self.data.pop("measuring", None):
            self.data["lost"].append(begun)

    def has(self, case: Case, tokens: int) -> bool:
        """Whether nothing is to be measured: it was, or it ended a process."""
        n, k = case.shape
        if [case.op, case.type, n, k, tokens] in self.data["lost"]:
            return True
        size = {"max_m": tokens, "n": n, "k": k}
        return any(size.items() <= e.items() for e in self.data[case.op].get(case.type, ()))

    def begin(self, case: Case, tokens: int) -> None:
        """Before an entry is measured; :meth:`add` ends that."""
        self.data["measuring"] = [case.op, case.type, *case.shape, tokens]
        self.write()

    def add(self, case: Case, tokens: int, tiles: Tiles) -> None:
        n, k = case.shape
        self.data.pop("measuring", None)
        entry = {"max_m": tokens, "n": n, "k": k, **tiles._asdict()}
        self.data[case.op].setdefault(case.type, []).append(entry)
        self.write()

    def has_contest(self, contest: Contest) -> bool:
        """Like :meth:`has`."""
        if list(contest.key) in self.data["lost"]:
            return True
        entries = [*self._entries("libraries", contest), *self._entries("slower", contest)]
        return any(contest.fields.items() <= e.items() for e in entries)

    def begin_contest(self, contest: Contest) -> None:
        """Like :meth:`begin`."""
        self.data["measuring"] = list(contest.key)
        self.write()

    def add_contest(self, contest: Contest, found: int | str) -> None:
        """``found``: from how many tokens on the library is faster, or why it is not."""
        self.data.pop("measuring", None)
        if isinstance(found, int):
            self._entries("libraries", contest).append({**contest.fields, "from_m": found})
        else:
            self._entries("slower", contest).append({**contest.fields, "why": found})
        self.write()

    def _entries(self, section: str, contest: Contest) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.data[section].setdefault(contest.library, [])
        return entries

    def tuning(self, rule: Tuning) -> Tuning:
        """``rule`` with what was measured so far."""
        from sdk.kernels.gpu.tuning import parse_table

        measured = {name: self.data[name] for name in DENSE_FROM.values()}
        return replace(rule, table=parse_table(self.data), **measured)

    def write(self) -> None:
        """Replace the file in one step: a reader never sees half a table."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1) + "\n")
        part.replace(self.path)


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return [] if args.model is None else [args.model]


def run(args: argparse.Namespace) -> int:
    from sdk.bench.gpu.card import Card, no_card

    why = no_card()
    if why is not None:
        raise RequestError(f"tune: {why}")
    from sdk.bench.tune.cases import cases_of
    from sdk.bench.tune.compile import compiling
    from sdk.bench.tune.libraries import with_contests
    from sdk.kernels.gpu.tuning import TABLES, table_path

    end = time.monotonic() + args.seconds
    card = Card({})
    folder = Path(args.out) if args.out else TABLES
    table = Table(table_path(card.name, folder), again=args.again, facts=card.kind)
    table.write()  # fails before anything is measured if the file is not writable
    code = 0
    try:
        with compiling(card, args.model):
            cases = cases_of(card, args.model)
            every = with_contests(card, cases, args.model, lambda: table.tuning(card.tuning))
            done, left = tune(card, table, every, end)
    except KeyboardInterrupt:
        code = 130
        table.data.pop("measuring", None)
        table.write()
    else:
        over = f"; the time was over before {left}" if left else ""
        print(f"{done} entries measured{over}")
    finally:
        card.close()
    print(f"{table.path}")
    return code


def tune(card: Card, table: Table, cases: Iterator[Case | Contest], end: float) -> tuple[int, str]:
    """Fill the table until ``end``; the number of entries measured, and the first that was not."""
    from sdk.bench.tune.libraries import Contest, from_tokens

    done = 0
    for case in cases:
        if isinstance(case, Contest):
            if table.has_contest(case):
                continue
            what = " ".join(map(str, case.key))
            if time.monotonic() > end:
                return done, what
            table.begin_contest(case)
            table.add_contest(case, from_tokens(card, case))
            done += 1
            _tell(what)
            continue
        name = DENSE_FROM.get(case.op)
        if name and f"{name}_of" not in table.data and time.monotonic() < end:
            # before any tiles: it decides every prompt
            table.data[name] = dense_from(card, case)
            table.data[f"{name}_of"] = [case.type, *case.shape]
            table.write()
        for tokens in case.tokens[: card.size(len(case.tokens), 2)]:
            if table.has(case, tokens):
                continue
            what = f"{case.type} {case.shape}, {tokens} tokens"
            if time.monotonic() > end:  # and no later case is made: that takes a second
                return done, what
            table.begin(case, tokens)
            table.add(case, tokens, best_tiles(card, case, tokens))
            done += 1
            _tell(what)
    return done, ""


def _tell(what: str) -> None:
    if is_terminal(sys.stderr):
        print(what, file=sys.stderr)


def best_tiles(card: Card, case: Case, tokens: int) -> Tiles:
    """Start with the fastest of the rule's choices; change one number at a time by a step, and go
    on in that direction, where that is faster."""
    from sdk.bench.tune.cases import COORDINATES, GAIN, neighbours

    best, *others = case.begins(card, tokens)
    product = case.product(card, tokens)
    expected = _result(card, case, tokens, best, product)
    if expected is None:
        return best
    fastest = _seconds(card, case, tokens, best, product)

    def attempt(tiles: Tiles) -> bool:
        nonlocal best, fastest
        found = _result(card, case, tokens, tiles, product)
        if found is None or not _same(found, expected):
            return False
        seconds = _seconds(card, case, tokens, tiles, product)
        if seconds >= fastest * GAIN:
            return False
        best, fastest = tiles, seconds
        return True

    for tiles in others:
        attempt(tiles)
    for name in COORDINATES:
        # a step up, or else a step down; further steps only where the one before was faster
        for side in neighbours(case, tokens, best, name):
            steps = side[: card.size(len(side), 1)]
            if list(itertools.takewhile(attempt, steps)):
                break
    return best


def _result(card: Card, case: Case, tokens: int, tiles: Tiles, product: Product) -> Tensor | None:
    """``None`` if the card cannot run these tiles, for example for lack of shared memory."""
    import torch

    from sdk.bench.tune.cases import kernel_with

    multiply, rows = product
    shape = (rows, case.shape[0])
    out = torch.full(shape, torch.nan, dtype=case.outputs, device=card.device)
    try:
        multiply(kernel_with(case, tokens, tiles), case.packed[0], out)
        card.synchronize()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception:
        card.synchronize()  # raises if the card itself was lost
        return None
    return out


def _same(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.float(), expected.float()
    return bool((found - expected).norm() <= 1e-2 * expected.norm())


def _seconds(card: Card, case: Case, tokens: int, tiles: Tiles, product: Product) -> float:
    from sdk.bench.tune.cases import kernel_with

    return _timed(card, case, kernel_with(case, tokens, tiles), product)


def _timed(card: Card, case: Case, kernel: Any, product: Product) -> float:
    import torch

    multiply, rows = product
    out = torch.empty(rows, case.shape[0], dtype=case.outputs, device=card.device)

    def call(packed: Any) -> Callable[[], None]:
        return lambda: multiply(kernel, packed, out)

    return card.time([call(packed) for packed in case.packed])


def dense_from(card: Card, case: Case) -> int:
    """The number of tokens, or of an expert's rows, from which dequantizing is faster."""

    def kernel(first: int) -> Any:
        rule = replace(card.tuning, dense_from=first, experts_dense_from=first)
        return case.kernel.tuned(rule)

    for tokens in _MANY[: card.size(len(_MANY), 1)]:
        product = case.product(card, card.size(tokens, 2))
        tiled = _timed(card, case, kernel(1 << 30), product)
        if _timed(card, case, kernel(1), product) < tiled:
            return tokens
    return 2 * _MANY[-1]
