"""`embedlm tune` beside libraries: who is entered, from how many tokens on, and why not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.bench import tune
from sdk.bench.gpu.card import Card
from sdk.bench.gpu.weights import affine, float8, int8
from sdk.bench.random_models import SHAPES, Shape, write_random
from sdk.bench.tune import libraries as tune_libraries
from sdk.bench.tune.cases import cases_of, single_case
from sdk.bench.tune.libraries import Contest, contests_of, from_tokens, own_contests, with_contests
from sdk.kernels.gpu import grouped_mm, scaled_mm
from sdk.kernels.gpu.tuning import Tuning, read_tuning
from tests.gpu.cudnn_stand_in import StandIn, library
from tests.gpu.humming_stand_in import Method, package

__all__ = ["library", "package"]  # fixtures

Calls = Sequence[Callable[[], Any]]


class TimedCard(Card):
    """Runs what is timed once, on a clock of its own: ``seconds(theirs, tokens)``."""

    def __init__(self, seconds: Callable[[bool, int], float]) -> None:
        super().__init__({})
        self._seconds = seconds
        self.timed: list[tuple[bool, int]] = []
        self.tokens = 0
        self.theirs = False

    def time(self, calls: Calls, *, graph: bool = True) -> float:
        calls[0]()
        self.timed.append((self.theirs, self.tokens))
        seconds = self._seconds(self.theirs, self.tokens)
        self.theirs = not self.theirs
        return seconds


def race(seconds: Callable[[bool, int], float], tokens: tuple[int, ...]) -> tuple[Any, list[int]]:
    """What is found, and the numbers of tokens that were measured."""
    card = TimedCard(seconds)
    card.tiny = False

    def calls(number: int) -> tuple[Calls, Calls]:
        card.tokens = number
        return [lambda: None], [lambda: None]

    found = from_tokens(card, Contest("grouped_mm", {}, tokens, lambda: None, calls))
    card.close()
    return found, [number for theirs, number in card.timed if theirs]


def test_the_fewest_tokens_are_those_from_which_on_it_is_always_faster() -> None:
    def seconds(theirs: bool, tokens: int) -> float:
        return 1.0 if not theirs else {16: 0.5, 64: 1.1, 256: 0.9, 1024: 0.5}[tokens]

    assert race(seconds, (16, 64, 256, 1024)) == (256, [1024, 256, 64])


@pytest.mark.parametrize(("theirs", "found"), [(0.5, 16), (0.979, 16), (0.99, None), (2.0, None)])
def test_a_difference_within_the_noise_is_none(theirs: float, found: int | None) -> None:
    result, measured = race(lambda who, _: theirs if who else 1.0, (16, 64))
    assert result == (found or "not faster with 64")
    assert measured == ([64, 16] if found else [64])


def test_a_library_that_fails_is_no_entry_and_the_reason_is_kept() -> None:
    card = Card({})

    def raises(*_: Any) -> Any:
        raise RuntimeError("no plan\nfor this")

    never = Contest("grouped_mm", {}, (16,), raises, lambda n: pytest.fail("timed"))
    assert from_tokens(card, never) == "RuntimeError: no plan"
    later = Contest("grouped_mm", {}, (16,), lambda: None, raises)
    assert from_tokens(card, later) == "RuntimeError: no plan"

    def no_room() -> None:
        raise torch.cuda.OutOfMemoryError("no room")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        from_tokens(card, Contest("grouped_mm", {}, (16,), no_room, raises))
    card.close()


@pytest.fixture
def card() -> Iterator[TimedCard]:
    """On which every library takes half as long."""
    made = TimedCard(lambda theirs, _: 0.5 if theirs else 1.0)
    yield made
    made.close()


def table_of(folder: Path) -> tune.Table:
    return tune.Table(folder / "card.json", again=False)


def test_every_library_is_entered_where_it_is_right_and_faster(
    tmp_path: Path, card: TimedCard, library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel and the library's really run, on what they would run on in an engine."""
    monkeypatch.setattr(tune, "best_tiles", lambda card, case, n: case.begins(card, n)[0])
    monkeypatch.setattr(tune, "dense_from", lambda card, case: 128)
    case = replace(single_case(card, lambda n, k: float8(card, n, k), 48, 256), tokens=(4,))
    table = table_of(tmp_path)

    def everything() -> Iterator[Any]:
        tuned = lambda: table.tuning(card.tuning)  # noqa: E731
        return with_contests(card, iter([case]), None, tuned)

    library.dtype = torch.float16
    scaled: list[int] = []
    real = scaled_mm.multiply_scaled
    monkeypatch.setattr(
        scaled_mm, "multiply_scaled", lambda *given: scaled.append(len(given[1])) or real(*given)
    )
    # one tile; FP8, attention with float16 pages, experts
    assert tune.tune(card, table, everything(), float("inf")) == (4, "")
    assert table.data["slower"] == {"scaled_mm": [], "cudnn_attention": [], "grouped_mm": []}
    short = str(card.activations).removeprefix("torch.")
    found = read_tuning("card", 4, tmp_path).libraries
    assert found == {
        ("scaled_mm", 48, 256): 64,
        ("cudnn_attention", "float16", 64): 512,
        ("grouped_mm", short, 32, 256): 16,
    }
    assert scaled == [64, 64, 2]  # its check in two types, and once timed
    # of the check a prompt, and a chunk from 1016 on with the 512 before its run; one that is timed
    prompt, chunk = (512, 512, True), [(1024, 1024, True), (1024, 512, False)]
    assert library.calls == [prompt, *chunk, prompt]
    # nothing is measured again
    assert tune.tune(card, table_of(tmp_path), everything(), float("inf")) == (0, "")


def test_a_package_is_measured_where_it_is_installed(
    tmp_path: Path, card: TimedCard, package: Method
) -> None:
    case = single_case(card, lambda n, k: affine(card, n, k, 8, 64), 64, 256)
    layout = case.kernel.unpack(case.first)
    other = case.kernel.pack(replace(layout, scale=layout.scale.float() * 1.001))  # no 16 bits
    for packed, slower in ((case.first, 0), (other, 1)):
        table = tune.Table(tmp_path / f"{slower}.json", again=True)
        contests = contests_of(card, replace(case, packed=[packed]), lambda: Tuning(4))
        assert tune.tune(card, table, contests, float("inf")) == (1, "")
        assert len(table.data["slower"].get("humming", [])) == slower
    assert read_tuning("0", 4, tmp_path).libraries == {("humming", "int8g64", 64, 256): 4}
    assert package.calls == [24, 2]  # its check, and once timed


def test_ours_is_measured_with_its_best_tiles_and_without_the_library(card: TimedCard) -> None:
    case = single_case(card, lambda n, k: float8(card, n, k), 48, 256)
    seen: list[Any] = []

    class Kernel:
        def tuned(self, tuning: Tuning) -> Any:
            seen.append(tuning)
            return case.kernel.tuned(tuning)

    measured = Tuning(4, table={}, libraries={("scaled_mm", 48, 256): 1})
    (contest,) = contests_of(card, replace(case, kernel=Kernel()), lambda: measured)
    contest.calls(64)
    assert [(t.table, t.libraries) for t in seen] == [({}, {})]


def test_a_library_that_is_wrong_is_slower_with_the_reason(
    tmp_path: Path, card: TimedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        grouped_mm.functional, "grouped_mm", lambda a, b, offs: a.new_zeros(len(a), b.shape[2])
    )
    table = table_of(tmp_path)
    own = [one for one in own_contests(card, None) if one.library == "grouped_mm"]
    assert tune.tune(card, table, iter(own), float("inf")) == (1, "")
    ((entry,),) = table.data["slower"].values()
    assert entry["why"] == "KernelError: grouped_mm: 1 of the norm from float64"
    assert read_tuning("card", 4, tmp_path).libraries == {}
    assert card.timed == []


def test_libraries_that_cannot_run_here_are_not_written_down(
    card: TimedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be there after the next update."""
    monkeypatch.setattr(grouped_mm, "waits_for_host", lambda device, dtype: "it waits")
    monkeypatch.setattr("sdk.kernels.gpu.cudnn_attention.operator", lambda: None)
    monkeypatch.delattr(torch, "_scaled_mm")
    assert list(own_contests(card, None)) == []
    for make in (float8, int8):
        case = single_case(card, lambda n, k, make=make: make(card, n, k), 48, 256)  # type: ignore[misc]
        assert list(contests_of(card, case, lambda: Tuning(4))) == []


def test_a_library_that_ended_the_process_is_left_out_of_the_next_run(
    tmp_path: Path, card: TimedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(BaseException):
        pass

    def lost(*_: Any) -> Any:
        raise Lost

    own = list(own_contests(card, None))
    with monkeypatch.context() as patch:
        patch.setattr(tune_libraries, "from_tokens", lost)
        with pytest.raises(Lost):
            tune.tune(card, table_of(tmp_path), iter(own), float("inf"))
    table = table_of(tmp_path)
    assert table.data["lost"] == [["cudnn_attention", "float16", 64]]
    monkeypatch.setattr(tune_libraries, "from_tokens", lambda *_: 64)
    assert tune.tune(card, table, iter(own), float("inf")) == (1, "")
    assert list(json.loads((tmp_path / "card.json").read_text())["libraries"]) == [
        "cudnn_attention",
        "grouped_mm",
    ]


def test_the_time_is_over_before_a_library(tmp_path: Path, card: TimedCard) -> None:
    found = tune.tune(card, table_of(tmp_path), own_contests(card, None), 0.0)
    assert found == (0, "cudnn_attention float16 64")


def test_a_model_s_heads_and_experts_are_measured(
    tmp_path: Path, card: TimedCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Shape(64, 1, 2, 1, 32, 64, vocab=64, experts=4, used=2)
    monkeypatch.setitem(SHAPES, "tiny-moe", made)
    path = tmp_path / "model.gguf"
    write_random(path, "tiny-moe")
    keys = {"Q4_0": [contest.key for contest in own_contests(card, str(path))]}
    monkeypatch.setattr("sdk.memory.weights.matrix_formats", lambda *_: ({"f16"}, {"f16"}))
    keys["F16"] = [contest.key for contest in own_contests(card, str(path))]
    short = str(card.activations).removeprefix("torch.")
    assert keys["Q4_0"] == [("cudnn_attention", "float16", 32)]
    assert keys["F16"][1:] == [
        ("grouped_mm", short, 128, 64),
        ("grouped_mm", short, 64, 64),
    ]


def test_libraries_without_weights_of_a_case_come_behind_the_first_shape(card: TimedCard) -> None:
    count = [0]

    def cases() -> Iterator[Any]:
        for case in cases_of(card, None):
            count[0] += 1
            yield case

    order = [type(item).__name__ for item in with_contests(card, cases(), None, lambda: Tuning(4))]
    first = order.index("Contest")
    assert order[:first] == ["Case"] and order[first : first + 2] == ["Contest"] * 2
