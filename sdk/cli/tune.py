"""Measure the best tile sizes for this GPU and keep them, so that every later start uses them.

An interrupted run goes on where it was: what a table has already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.cli.bench.gpu.card import Card
    from sdk.kernels.gpu.tuning import Tiles
    from sdk.quant.weight import Weight

#: Numbers of tokens that get tiles of their own, each up to the next smaller one.
TOKENS = (1, 4, 8, 16, 32, 64, 128)
#: The same where decoding into scratch may be faster already.
_MANY = (64, 128, 256, 512, 1024)
#: Rows and columns of the layers of 0.6B, 1B, 8B and 70B models, largest first.
SHAPES = (
    *((28672, 8192), (8192, 28672), (28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096)),
    *((16384, 2048), (2048, 8192), (3072, 2048), (2048, 2048), (6144, 1024), (1024, 3072)),
)
#: A better tile must be faster by more than the spread of measuring.
_GAIN = 0.98
_COORDINATES: dict[str, tuple[int, ...]] = {
    "block_n": (16, 32, 64, 128),
    "split": (1, 2, 3, 4, 6, 8, 12, 16),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4, 5),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help="tune for the layers of this file or folder (default: layers of "
        "models from 0.6B to 70B in 4 and 8 bits)"
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=540.0, help="stop after so many (default: 540)"
    )
    parser.add_argument("--out", metavar="FOLDER", help="default: where this package looks")
    parser.add_argument("--again", action="store_true", help="measure what the table has, too")


@dataclass(frozen=True)
class Case:
    """Weights of one type and shape, in the hands of their kernel."""

    op: str
    type: str
    shape: tuple[int, int]
    kernel: Any
    packed: Sequence[Any]


class Table:
    """The file of one card; every entry is written as soon as it is known."""

    def __init__(self, path: Path, *, again: bool) -> None:
        from sdk.kernels.gpu.tuning import OPS, VERSION, Tuning

        self.path = path
        self.data: dict[str, Any] = {"version": VERSION, "dense_from": Tuning(1).dense_from}
        self.data |= {op: {} for op in OPS}
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = None
        if not again and isinstance(found, dict) and found.get("version") == VERSION:
            self.data |= found

    def has(self, case: Case, tokens: int) -> bool:
        n, k = case.shape
        wanted = {"max_m": tokens, "n": n, "k": k}
        return any(wanted.items() <= e.items() for e in self.data[case.op].get(case.type, ()))

    def add(self, case: Case, tokens: int, tiles: Tiles) -> None:
        n, k = case.shape
        entry = {"max_m": tokens, "n": n, "k": k, **asdict(tiles)}
        self.data[case.op].setdefault(case.type, []).append(entry)
        self.write()

    def write(self) -> None:
        """All of it or nothing: a reader never sees half a table."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.data, indent=1) + "\n")
        beside.replace(self.path)


def run(args: argparse.Namespace) -> int:
    from sdk.cli.bench.gpu.card import Card, no_card
    from sdk.kernels.gpu.tuning import TABLES, table_path

    why = no_card()
    if why is not None:
        raise RequestError(f"tune: {why}")
    card = Card({})
    folder = Path(args.out) if args.out else TABLES
    table = Table(table_path(card.name, folder), again=args.again)
    table.write()  # where that is not allowed, before anything is measured
    end = time.monotonic() + args.seconds
    code = 0
    try:
        done, left = tune(card, table, _cases(card, args.model), end)
    except KeyboardInterrupt:
        code = 130
    else:
        print(f"{done} entries measured, {left} left to the time limit")
    finally:
        card.close()
    print(f"{table.path}")
    return code


def tune(card: Card, table: Table, cases: Iterator[Case], end: float) -> tuple[int, int]:
    """Fill the table until ``end``; entries measured, and those there was no time for."""
    done = left = 0
    for case in cases:
        for tokens in TOKENS[: card.size(len(TOKENS), 2)]:
            if table.has(case, tokens) or (tokens == 1 and case.op == "linear_bytes"):
                continue
            if time.monotonic() > end:
                left += 1
                continue
            table.add(case, tokens, best_tiles(card, case, tokens))
            done += 1
            if sys.stderr.isatty():
                print(f"{case.type} {case.shape}, {tokens} tokens", file=sys.stderr)
        if "dense_from_of" not in table.data and case.op == "linear" and time.monotonic() < end:
            table.data["dense_from"] = dense_from(card, case)
            table.data["dense_from_of"] = [case.type, *case.shape]
            table.write()
    return done, left


def best_tiles(card: Card, case: Case, tokens: int) -> Tiles:
    """One number changed at a time from the rule's tiles, as long as that helps."""
    from sdk.kernels.gpu.tuning import Tuning

    best = Tuning(card.programs).tiles(case.packed[0], tokens, case.op)
    x = card.normal(tokens, case.shape[1])
    expected = _product(card, case, tokens, best, x)
    if expected is None:
        return best
    fastest = _seconds(card, case, tokens, best, x)
    for name, values in _COORDINATES.items():
        for value in values[: card.size(len(values), 1)]:
            if value == getattr(best, name) or not _sensible(case, tokens, name, value):
                continue
            tiles = replace(best, **{name: value})
            found = _product(card, case, tokens, tiles, x)
            if found is None or not _same(found, expected):
                continue
            seconds = _seconds(card, case, tokens, tiles, x)
            if seconds < fastest * _GAIN:
                best, fastest = tiles, seconds
    return best


def _sensible(case: Case, tokens: int, name: str, value: int) -> bool:
    """Whether a value differs from the others at all."""
    if name == "split":
        return bool(value <= case.packed[0].units)
    return not (name == "stages" and tokens == 1)


def _kernel(case: Case, tokens: int, tiles: Tiles) -> Any:
    from sdk.kernels.gpu.tuning import Tuning

    only = {(case.op, case.type, *case.shape): [(tokens, tiles)]}
    return case.kernel.tuned(Tuning(1, dense_from=1 << 30, table=only))


def _product(card: Card, case: Case, tokens: int, tiles: Tiles, x: Tensor) -> Tensor | None:
    """``None`` where the card cannot run these tiles: too much shared memory, say."""
    import torch

    out = torch.full((tokens, case.shape[0]), torch.nan, device=card.device)
    try:
        _kernel(case, tokens, tiles).matmul(case.packed[0], x, out)
        card.synchronize()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception:
        card.synchronize()  # raises where the card itself was lost
        return None
    return out


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-2 * expected.norm())


def _seconds(card: Card, case: Case, tokens: int, tiles: Tiles, x: Tensor) -> float:
    kernel = _kernel(case, tokens, tiles)
    return _timed(card, case, kernel, x)


def _timed(card: Card, case: Case, kernel: Any, x: Tensor) -> float:
    import torch

    out = torch.empty(x.shape[0], case.shape[0], device=card.device)

    def call(packed: Any) -> Callable[[], None]:
        return lambda: kernel.matmul(packed, x, out)

    return card.time([call(packed) for packed in case.packed])


def dense_from(card: Card, case: Case) -> int:
    """From how many tokens on decoding into scratch and a library product are faster."""
    from sdk.kernels.gpu.tuning import Tuning

    for tokens in _MANY[: card.size(len(_MANY), 1)]:
        x = card.normal(tokens, case.shape[1])
        tiled = case.kernel.tuned(Tuning(card.programs, dense_from=1 << 30))
        dense = case.kernel.tuned(Tuning(card.programs, dense_from=1))
        if _timed(card, case, dense, x) < _timed(card, case, tiled, x):
            return tokens
    return 2 * _MANY[-1]


def _cases(card: Card, model: str | None) -> Iterator[Case]:
    return _default_cases(card) if model is None else _model_cases(card, model)


def _default_cases(card: Card) -> Iterator[Case]:
    """The formats of most files, each in all shapes, before the next."""
    from sdk.cli.bench.gpu.weights import Weights, affine, blocks, float8

    makes: tuple[Callable[..., Any], ...] = (
        lambda n, k: affine(card, n, k, 4, 128),
        lambda n, k: blocks(card, n, k, "q4_k"),
        lambda n, k: float8(card, n, k),
        lambda n, k: blocks(card, n, k, "q4_0"),
        lambda n, k: blocks(card, n, k, "q6_k"),
        lambda n, k: affine(card, n, k, 8, 128),
        lambda n, k: blocks(card, n, k, "q8_0"),
    )
    for make in makes[: card.size(len(makes), 1)]:
        for n, k in SHAPES if not card.tiny else ((32, 256),):
            weights = Weights(card, partial(make, n, k))
            yield _case(weights.kernel, weights.packed)


def _model_cases(card: Card, model: str) -> Iterator[Case]:
    """The model's own layers, those of one shape in turn."""
    from sdk.config import EngineConfig
    from sdk.loading import load

    device: Any = "auto" if card.tiny else "cuda"
    config = EngineConfig(model=model, device=device, max_model_len=64, skip_tokenizer_init=True)
    loaded = load(config)
    try:
        found: dict[tuple[Any, ...], list[Case]] = {}
        for _, linear in loaded.runner.model.linears():
            for case in _parts(linear.weight):
                found.setdefault((case.op, case.type, case.shape), []).append(case)
        for cases in found.values():
            first = cases[0]
            some = cases[: card.copies(first.packed[0].nbytes)]
            yield replace(first, packed=[case.packed[0] for case in some])
    finally:
        loaded.engine.close()


def _parts(weight: Weight) -> Iterator[Case]:
    """What of a weight the Triton kernels multiply; experts have tiles by the rule."""
    from sdk.kernels.gpu.linear import Linear
    from sdk.quant.weight import PackedWeight, StackedWeight

    for part in weight.parts if isinstance(weight, StackedWeight) else (weight,):
        if isinstance(part, PackedWeight):
            kernel = part.bound.choice.implementation
            if isinstance(kernel, Linear):
                yield _case(kernel, [part.bound.packed])


def _case(kernel: Any, packed: Sequence[Any]) -> Case:
    from sdk.kernels.gpu.tuning import type_of

    first = packed[0]
    return Case(kernel.op_of(first), type_of(first), first.shape, kernel, packed)
