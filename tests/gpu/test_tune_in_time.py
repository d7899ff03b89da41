"""How far `embedlm tune` comes on a card in two minutes, in a model of it with a clock of its own.

A kernel takes two seconds to compile, in fifteen processes that begin after twelve seconds, and in
the measuring one if they have not come to it. The order and the searches are the real ones; seconds
are assumptions.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdk.bench import tune
from sdk.bench.gpu.card import Card
from sdk.bench.tune import cases as tune_cases, compile as tune_compile, libraries as tune_libraries
from sdk.kernels.gpu.tuning import Tiles, Tuning

SECONDS, COMPILE, START, PROCESSES, WEIGHT, TIMED = 120.0, 2.0, 12.0, 15, 1.5, 0.12
#: Stand for the four shapes of an 8B model, and another model.
SHAPES = (((32, 256), (48, 256), (64, 256), (80, 256)), ((96, 256),))
Key = tuple[str, bool, bool, Tiles]


def key(case: Any, tokens: int, tiles: Tiles) -> Key:
    """What a kernel depends on: of ``split`` only whether K is shared."""
    return case.type, tokens == 1, tiles.split > 1, tiles._replace(split=0)


class Model:
    """One run; ``table`` has what was measured in time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.compiled = 0.0, 0
        self.card = Card({})
        self.card.tiny = False  # of what follows only the shapes depend on it
        monkeypatch.setattr(self.card, "copies", lambda nbytes: 1)
        self.card.tuning = replace(self.card.tuning, programs=528, doubled=("int", "e4m3"))
        self.ready: dict[Key, float] = {}
        listed = dict.fromkeys(key(*x) for x in tune_compile.kernels_to_compile(self.card))
        for number, name in enumerate(listed):
            self.ready[name] = START + (number // PROCESSES + 1) * COMPILE
        monkeypatch.setattr(tune, "_result", self.result)
        monkeypatch.setattr(tune, "_seconds", self.seconds)
        monkeypatch.setattr(tune, "dense_from", self.dense_from)
        monkeypatch.setattr(tune_libraries, "from_tokens", self.from_tokens)
        monkeypatch.setattr(tune, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.path = folder / "card.json"
        table = tune.Table(self.path, again=False)
        every = tune_libraries.with_contests(self.card, self.cases(), None, lambda: Tuning(4))
        tune.tune(self.card, table, every, SECONDS)
        self.card.close()
        self.table: dict[str, Any] = json.loads(self.path.read_text())

    def cases(self) -> Iterator[Any]:
        for case in tune_cases.cases_of(self.card, None):
            self.now += WEIGHT
            yield case

    def result(self, card: Any, case: Any, tokens: int, tiles: Tiles, product: Any) -> Any:
        name = key(case, tokens, tiles)
        if self.ready.get(name, float("inf")) > self.now:
            self.now += COMPILE
            self.compiled += 1
            self.ready[name] = self.now
        return torch.ones(1)

    def seconds(self, *_: Any) -> float:
        self.now += TIMED
        return 1.0  # nothing is faster than the rule's choice

    def dense_from(self, card: Any, case: Any) -> int:
        self.first = not self.table_has_entries()
        self.now += 10 * TIMED
        return 128

    def from_tokens(self, card: Any, contest: Any) -> int | str:
        """Two kernels at four numbers of tokens, of weights of its own but for FP8."""
        self.now += 8 * TIMED + (0.0 if contest.library == "scaled_mm" else WEIGHT)
        return 256

    def table_has_entries(self) -> bool:
        return self.path.is_file() and '"max_m"' in self.path.read_text()

    @property
    def count(self) -> int:
        return len(self.entries) + sum(map(len, self.table["libraries"].values()))

    @property
    def entries(self) -> list[tuple[str, int, int]]:
        ops = ("linear", "linear_bytes")
        return [
            (kind, e["n"], e["max_m"])
            for op in ops
            for kind, entries in self.table[op].items()
            for e in entries
        ]


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_cases, "SHAPES", SHAPES)
    monkeypatch.setattr(tune_cases, "MIXTURES", ())
    monkeypatch.setattr(tune_libraries, "MIXTURES", ((128, 8, (1536, 2048)), (128, 8, (2048, 768))))
    monkeypatch.setattr(tune_compile, "SHAPES", ((32, 256),))


def old_product(nearest: Any, case: Any, begin: Tiles, tokens: int) -> Iterator[Tiles]:
    """What was compiled before: every combination of all numbers."""
    names = ("block_n", "warps", "stages")
    choices = [
        {begin, *(tiles for side in nearest(case, tokens, begin, name) for tiles in side)}
        for name in names
    ]
    for split, *parts in itertools.product((1, 2), *choices):
        given = {name: getattr(t, name) for name, t in zip(names, parts, strict=True)}
        yield begin._replace(split=split, **given)


def test_more_entries_of_more_formats_than_with_all_combinations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "after").mkdir()
    after = Model(tmp_path / "after", monkeypatch)
    nearest = tune_cases.neighbours

    def all_values(case: Any, tokens: int, tiles: Tiles, name: str) -> list[list[Tiles]]:
        return [[tile] for side in nearest(case, tokens, tiles, name) for tile in side]

    def format_by_format(card: Any) -> Iterator[Any]:
        for shapes, make in itertools.product(SHAPES, tune_cases.default_makes(card)):
            for n, k in shapes:
                yield tune_cases.single_case(card, make, n, k)

    with monkeypatch.context() as patch:
        patch.setattr(tune_cases, "first_tokens", tuple)
        patch.setattr(tune_cases, "_default_cases", format_by_format)
        patch.setattr(tune_cases, "neighbours", all_values)
        patch.setattr(tune_compile, "candidates", lambda *x: old_product(nearest, *x))
        (tmp_path / "before").mkdir()
        before = Model(tmp_path / "before", patch)
    kinds = {kind for kind, _, _ in after.entries}
    assert len(kinds) == 8 and len({kind for kind, _, _ in before.entries}) < 5
    assert after.count > 2 * before.count  # 65 of tiles and 8 of libraries, and 34
    assert after.compiled < before.compiled / 2  # by the measuring process itself: 8 and 41
    largest = {(kind, tokens) for kind, n, tokens in after.entries if n == 32}
    assert {kind for kind, tokens in largest if tokens == 64} == kinds
    assert {kind for kind, tokens in largest if tokens == 16} == kinds
    assert after.first and after.table["dense_from"] == 128
    libraries = {name: len(found) for name, found in after.table["libraries"].items()}
    assert libraries["scaled_mm"] >= 2 and libraries["cudnn_attention"] == 3
