"""Nothing loses or takes more than is committed; what is shown is what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.accuracy import baselines, frontier, tables
from tests.accuracy.baselines import Row, worse
from tests.accuracy.measuring import measure
from tests.accuracy.points import BASES, GEMMA3, SHORT, SMOLLM2, Base, Point

ROW = Row(0.0457, 0.262, 0.8784, 15.758, 4.759, 4.6, 80022016, 23040, 700, 90)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made")


def check(base: Base, point: Point, file: Path, made: Path) -> None:
    found = measure(point, file, SHORT, made)
    wrong = worse(baselines.read(base.name, "short")[point], found, "short")
    assert not wrong, f"{base.name}: {point}: {', '.join(wrong)}"


def points(base: Base, *fast: Point) -> list[Any]:
    """The short tier; only these are quick."""
    slow = pytest.mark.slow
    return [pytest.param(x, id=str(x), marks=() if x in fast else slow) for x in base.short]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("point", points(SMOLLM2, Point("base", "float16", "auto")))
def test_smollm2_loses_and_takes_no_more_than_before(
    point: Point, smollm2: Path, made: Path
) -> None:
    check(SMOLLM2, point, smollm2, made)


@pytest.mark.model
@pytest.mark.parametrize("point", points(GEMMA3))
def test_gemma_loses_and_takes_no_more_than_before(point: Point, gemma3: Path, made: Path) -> None:
    check(GEMMA3, point, gemma3, made)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kld": 0.0472}, "kld 0.0457 -> 0.0472"),
        ({"kld": float("nan")}, "kld 0.0457 -> nan"),
        ({"p99": 0.31}, "p99 0.262 -> 0.31"),
        ({"top1": 0.87}, "top1 0.8784 -> 0.8700"),
        ({"perplexity": 15.85}, "perplexity 15.758 -> 15.85"),
        ({"weight_bytes": 80022017}, "weight_bytes 80022016 -> 80022017"),
        ({"kv_bytes": 23041}, "kv_bytes 23040 -> 23041"),
    ],
)
def test_more_loss_and_more_bytes_are_worse(change: dict[str, float], expected: str) -> None:
    assert worse(ROW, replace(ROW, **change), "full") == [expected]  # type: ignore[arg-type]


def test_the_short_tier_has_more_room_and_an_end_of_it() -> None:
    for kld, wrong in ((0.0511, []), (0.0513, ["kld 0.0457 -> 0.0513"])):
        assert worse(ROW, replace(ROW, kld=kld), "short") == wrong
    assert worse(ROW, replace(ROW, top1=0.862), "short") == ["top1 0.8784 -> 0.8620"]


def test_less_is_never_worse_and_speed_is_not_compared() -> None:
    better = Row(0.04, 0.2, 0.9, 15.5, 4.7, 4.5, 79000000, 20000, 100, 10)
    for tier in ("short", "full"):
        assert worse(ROW, better, tier) == []
        assert worse(ROW, ROW, tier) == []


@pytest.mark.model
def test_the_command_fails_and_names_the_row_that_is_worse(
    smollm2: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = baselines.read(SMOLLM2.name, "short")
    found = {point: replace(row, kld=row.kld + 0.1) for point, row in known.items()}
    found[Point("base", "int8")] = known[Point("base", "int8")]
    monkeypatch.setattr(frontier, "measure", lambda point, *rest: found[point])
    command = ["--check", "--base", SMOLLM2.name, "--tier", "short", "--made", str(tmp_path)]
    assert frontier.main([*command, "--rows", "base int8 *"]) == 0
    assert frontier.main([*command, "--rows", "base int*"]) == 1
    worse_rows = [line for line in capsys.readouterr().out.splitlines() if "worse" in line]
    assert len(worse_rows) == 1
    assert worse_rows[0].startswith("smollm2-135m short: base int4 exact: worse: kld ")


@pytest.mark.parametrize("base", BASES.values(), ids=list(BASES))
def test_baselines_are_of_points_and_the_short_tier_has_all(base: Base) -> None:
    """Points of the full tier without a row are named on the page."""
    assert list(baselines.read(base.name, "short")) == list(base.short)
    full = baselines.read(base.name, "full")
    assert list(full) == [point for point in base.points if point in full]


def test_the_page_shows_what_is_committed() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page) == page


def test_the_expected_losses_are_what_is_committed() -> None:
    written = tables.LOSSES.read_text(encoding="utf-8")
    assert written == tables.expected_losses()
    found = json.loads(written)
    assert {"int4", "int8", "q4_0"} <= found["weights"].keys()
    assert {"float16", "int8", "int4"} <= found["kv"].keys()


def test_a_row_is_kept_where_it_belongs_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "FOLDER", tmp_path)
    first, second = Point("int8"), Point("base", "int4", "auto")
    baselines.write("any", "short", {first: ROW})
    baselines.write("any", "full", {second: replace(ROW, kld=0.5), first: ROW})
    assert baselines.read("any", "short") == {first: ROW}
    assert list(baselines.read("any", "full")) == [second, first]
    rows = [line for line in (tmp_path / "any.json").read_text().splitlines() if "kld" in line]
    assert len(rows) == 3, "a line per row"
