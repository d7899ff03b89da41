"""The choice of tokens under the Triton interpreter, against the reference on random rows.

The two round weights differently (float32 against float64), so a token may differ where the draw or
a truncation's mass lies within 1e-6 of a boundary: then the reference chooses the kernel's token
with the numbers moved by that much.

A row's candidates are listed (``listed``), or only those that one truncation has to decide on
(``between``), or there is no room for them (``whole``). With small sizes rows of some 100 logits
are all three, in several chunks and blocks (:func:`small`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import sampling
from sdk.kernels.gpu.sampling import Sample
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import (
    DRAW,
    Change,
    ChangeKind,
    Draws,
    SampleBuffers,
    Shape,
    Tokens,
    join_draws,
    mask_of,
    pack_draw,
)
from sdk.kernels.packed_shapes import PackedShapes
from sdk.kernels.reference.sampling import Sample as Reference, truncate
from tests.shaping import buffers_of, expected, logits_for

INF, NAN = float("inf"), float("nan")
KINDS = ("normal", "ties", "flat", "forbidden", "one", "huge")


def chosen(kernel: Any, logits: Tensor, draws: Draws | None) -> Tokens:
    out = SampleBuffers(len(logits))
    kernel.run(logits, draws, out)
    return out.read(len(logits))


def small(patch: pytest.MonkeyPatch, room: int, chunk: int = 64, block: int = 16) -> list[str]:
    """Sizes of the kernels for rows of some 100 logits; lists how each drawn row is read."""
    patch.setattr(sampling, "SAMPLER_CHUNK", chunk)
    patch.setattr(sampling, "SAMPLER_ROOM", room)
    patch.setattr(sampling, "_BLOCK", block)
    return watched(patch)


def watched(patch: pytest.MonkeyPatch) -> list[str]:
    """Lists how each row is read whose temperature is positive."""
    found: list[str] = []
    original = sampling._candidates

    def candidates(given: Any, *options: Any) -> Any:
        result = original(given, *options)
        for draw, (listed, sure, *_) in zip(given[3].tolist(), result[1].tolist(), strict=True):
            if draw[0] > 0:
                found.append("whole" if listed < 0 else "between" if sure else "listed")
        return result

    patch.setattr(sampling, "_candidates", candidates)
    return found


def logits_of(kind: str, rows: int, width: int, rng: np.random.Generator) -> Tensor:
    x = rng.standard_normal((rows, width)).astype(np.float32) * 3
    if kind == "ties":
        x = np.round(x)
    elif kind == "flat":
        x *= 1e-7
    elif kind == "forbidden":
        x[rng.random(x.shape) < 0.9] = -INF
        x[:, rng.integers(width)] = 1.0
    elif kind == "one":
        x[:] = -INF
        x[:, rng.integers(width)] = -3.0
    elif kind == "huge":
        x *= 1e37
    return torch.from_numpy(x)


def random_draws(rows: int, rng: np.random.Generator) -> Draws:
    """Every parameter off in about half of the rows, and its extremes among the others."""

    def mixed(off: float, values: list[float]) -> np.ndarray:
        return np.where(rng.random(rows) < 0.5, off, rng.choice(values, rows))

    draws = np.zeros(rows, DRAW)
    draws["temperature"] = mixed(1.0, [0.8, 1.3, 1e-3, 1e-45, 100.0, 0.0])
    draws["min_p"] = mixed(0.0, [0.05, 1e-6, 1.0])
    draws["top_k"] = mixed(0, [1, 2, 40, 500, 2**31 - 1])
    draws["top_p"] = mixed(1.0, [0.95, 0.5, 1e-9, 5e-324, 1 - 1e-6])
    draws["typical_p"] = np.where(rng.random(rows) < 0.7, 1.0, rng.choice([0.2, 0.9], rows))
    draws["xtc_threshold"] = np.where(rng.random(rows) < 0.7, -1.0, rng.choice([0.0, 0.1], rows))
    draws["mirostat_mu"] = np.where(rng.random(rows) < 0.9, NAN, rng.choice([-5.0, 0.0, 7.0], rows))
    draws["uniform"] = mixed(0.0, list(rng.random(20)))
    draws["uniform"][rng.random(rows) < 0.1] = 1 - 2**-52
    return draws


def explained(row: Tensor, draw: Draws, token: int) -> bool:
    """Whether the reference chooses ``token`` with the draw's numbers moved by 1e-6."""
    for du in (0.0, -1e-6, 1e-6):
        for dm in (0.0, -1e-6, 1e-6):
            moved = draw.copy()
            moved["uniform"] = np.clip(moved["uniform"] + du, 0, 1 - 2**-52)
            for name in ("top_p", "typical_p"):
                if moved[name][0] < 1:
                    moved[name] = np.clip(moved[name] + dm, 5e-324, 1 - 1e-16)
            moved["mirostat_mu"] += dm
            moved["xtc_threshold"] += dm
            if chosen(Reference(), row, moved).tokens[0] == token:
                return True
    return False


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "width", [17, *(pytest.param(x, marks=pytest.mark.slow) for x in (1, 1100))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_reference_s_but_for_rounding(kind: str, width: int) -> None:
    rng = np.random.default_rng(width)
    rows = 5 if width < 100 else 3  # of 80 ms and more each
    logits, draws = logits_of(kind, rows, width, rng), random_draws(rows, rng)
    found, wanted = chosen(Sample(), logits, draws), chosen(Reference(), logits, draws)
    assert found.best == wanted.best
    different = [i for i in range(rows) if found.tokens[i] != wanted.tokens[i]]
    for i in different:
        assert explained(logits[i : i + 1], draws[i : i + 1], found.tokens[i]), draws[i]
    assert len(different) <= 1
    for i in set(range(rows)) - set(different):
        if draws[i]["typical_p"] == 1 and draws[i]["top_p"] == 1:  # else one more may be left
            assert found.probabilities[i] == pytest.approx(wanted.probabilities[i], rel=1e-4)


ALONE = [
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"typical_p": 0.7},
    {"xtc_threshold": 0.05},
    {"mirostat_mu": 3.0},
    {"min_p": 0.02, "top_p": 0.7},
    {"min_p": 0.1, "top_k": 17},
]
TOGETHER = {"temperature": 2.0, "min_p": 0.02, "top_k": 20, "typical_p": 0.95, "top_p": 0.9}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("room", "fields"),
    [
        *((8192, fields) for fields in (*ALONE, TOGETHER)),
        *(pytest.param(12, fields, marks=pytest.mark.slow) for fields in (*ALONE, {}, TOGETHER)),
        *(pytest.param(1, fields, marks=pytest.mark.slow) for fields in (*ALONE, {}, TOGETHER)),
    ],
)
def test_every_token_that_the_reference_keeps_can_be_drawn_and_no_other(
    room: int, fields: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of every token's share of the uniforms; many logits are equal."""
    read = small(monkeypatch, room) if room < 8192 else watched(monkeypatch)
    rng = np.random.default_rng(5)
    row = torch.from_numpy(rng.integers(-8, 9, (1, 130)).astype(np.float32) / 2)
    packed = pack_draw(**fields)
    gaps = (row.max() - row) / fields.get("temperature", 1.0)
    left = truncate(gaps.clone(), join_draws([packed], [0.0]))
    ids = left[0].isfinite().nonzero()[:, 0].tolist()
    shares = torch.softmax(-left[0, ids].double(), 0).numpy()
    middle = shares.cumsum() - shares / 2
    some = sorted({*range(0, len(ids), 7), len(ids) - 1})  # a row takes 60 ms here
    draws = join_draws([packed] * len(some), list(middle[some]))
    found = chosen(Sample(), row.expand(len(some), -1), draws)
    assert found.tokens == [ids[i] for i in some]
    assert found.probabilities == pytest.approx(list(shares[some]), rel=1e-5)
    several = fields is TOGETHER or "typical_p" in fields or "xtc_threshold" in fields
    expected = {8192: {"listed"}, 1: {"whole"} if several else {"between", "whole"}}
    if set(fields) <= {"min_p"}:  # nothing to search for
        expected = {key: {"between"} for key in expected}
    assert set(read) <= expected.get(room, {"listed", "between", "whole"})


@pytest.mark.slow
@pytest.mark.parametrize("room", [1, 12, 40])
def test_rows_of_several_chunks_are_read_in_three_ways_with_the_reference_s_tokens(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = small(monkeypatch, room)
    rng = np.random.default_rng(room)
    logits = torch.cat([logits_of(kind, 4, 333, rng) for kind in KINDS])
    draws = random_draws(len(logits), rng)
    for row, name in enumerate(rng.choice(("top_k", "top_p", "none", ""), len(draws))):
        if name:  # one truncation at most beside min_p
            draws["typical_p"][row], draws["xtc_threshold"][row] = 1.0, -1.0
            draws["mirostat_mu"][row] = NAN
            draws["top_k"][row] = rng.integers(1, 333) if name == "top_k" else 0
            draws["top_p"][row] = rng.random() if name == "top_p" else 1.0
            draws["temperature"][row] = rng.choice([0.1, 1.0, 3.0, 1e4, 1e30])
    found, wanted = chosen(Sample(), logits, draws), chosen(Reference(), logits, draws)
    assert set(read) == {"listed", "between", "whole"}
    for i in range(len(logits)):
        if found.tokens[i] != wanted.tokens[i]:
            assert explained(logits[i : i + 1], draws[i : i + 1], found.tokens[i]), draws[i]
    assert found.best == wanted.best


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("fields", "read", "kept"),
    [
        ({}, "between", range(200)),
        ({"top_k": 7}, "whole", range(7)),
        pytest.param({"top_p": 0.5}, "whole", range(100), marks=pytest.mark.slow),
        ({"min_p": 1.0}, "between", range(200)),
        ({"temperature": 1e-30}, "between", range(200)),
        *(
            pytest.param(fields, "whole", kept, marks=pytest.mark.slow)
            for fields, kept in (
                ({"top_k": 150, "top_p": 0.1}, range(15)),
                ({"temperature": 1e4, "xtc_threshold": 0.001}, [199]),
            )
        ),
    ],
)
def test_equal_logits_are_kept_and_drawn_in_the_order_of_ids(
    fields: Any, read: str, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = small(monkeypatch, room=32)
    uniforms = [0.26, 1 - 2**-52]
    logits = torch.zeros(2, 200)
    logits[:, ::3] = -0.0  # no less than 0
    found = chosen(Sample(), logits, join_draws([pack_draw(**fields)] * 2, uniforms))
    assert ways == [read] * 2
    assert found.tokens == [kept[int(u * len(kept))] for u in uniforms]
    assert found.probabilities == pytest.approx([1 / len(kept)] * 2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("temperature", [1e-30, 1.0, 1e30])
def test_more_tokens_than_have_a_weight_may_be_kept(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = small(monkeypatch, room=8)
    logits = torch.full((1, 150), -INF)
    logits[0, [40, 90]] = 3.0
    packed = pack_draw(temperature=temperature, top_k=119)
    for uniform, token in ((0.4, 40), (0.6, 90)):
        found = chosen(Sample(), logits, join_draws([packed], [uniform]))
        assert (found.tokens, found.probabilities) == ([token], [0.5])
    assert set(ways) == {"whole" if temperature > 1 else "between"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "fields", "read"),
    [
        (7, {"top_k": 3, "top_p": 0.9}, "listed"),
        (32_000, {"top_k": 50, "top_p": 0.95}, "listed"),
        (128_256, {"top_k": 50, "top_p": 0.95}, "listed"),
        (128_256, {}, "between"),
        (128_256, {"top_p": 0.6}, "between"),
        (128_256, {"min_p": 1e-3}, "between"),
        (128_256, {"top_k": 40_000}, "between"),
        (128_256, {"mirostat_mu": 16.0}, "between"),
        (151_937, {"top_p": 0.9, "temperature": 0.5, "xtc_threshold": 0.01}, "listed"),
    ],
)
def test_vocabularies_of_real_models(
    width: int, fields: Any, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = watched(monkeypatch)
    rng = np.random.default_rng(width)
    logits = torch.from_numpy(rng.standard_normal((3, width)).astype(np.float32) * 2)
    draws = join_draws([pack_draw(**fields)] * 3, list(rng.random(3)))
    found, wanted = chosen(Sample(), logits, draws), chosen(Reference(), logits, draws)
    assert ways == [read] * 3
    assert found.tokens == wanted.tokens
    assert found.probabilities == pytest.approx(wanted.probabilities, rel=1e-5)


@pytest.mark.slow
def test_draws_have_the_frequencies_of_their_probabilities() -> None:
    """Pearson's chi-square of 120 draws; above 18.47 once in 1,000 times with four degrees."""
    rng = np.random.default_rng(8)
    row = torch.tensor([[0.5, -9.0, 1.0, 0.0, -0.5, -1.0, -30.0, -20.0]])
    draws = join_draws([pack_draw(top_p=0.999)] * 120, list(rng.random(120)))
    found = chosen(Sample(), row.expand(120, -1), draws).tokens
    kept = [0, 2, 3, 4, 5]
    assert set(found) <= set(kept)
    wanted = 120 * torch.softmax(row[0, kept].double(), 0).numpy()
    counts = np.array([found.count(token) for token in kept])
    assert ((counts - wanted) ** 2 / wanted).sum() < 18.47


@pytest.mark.slow
def test_nothing_is_left_from_what_the_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a graph, whose replays find what the last one left."""
    small(monkeypatch, room=12)
    rng = np.random.default_rng(4)
    logits = logits_of("normal", 4, 150, rng)
    fields: list[Any] = [{"top_k": 3}, {"top_p": 0.9}, {"typical_p": 0.5}, {"temperature": 0.0}]
    draws = join_draws([pack_draw(**each) for each in fields], [0.3, 0.8, 0.5, 0.0])
    wanted = chosen(Sample(), logits, draws)
    empty = Tensor.new_empty
    for filling in (1, -1):
        patched = lambda *a, fill=filling, **k: empty(*a, **k).fill_(fill)  # noqa: E731
        monkeypatch.setattr(Tensor, "new_empty", patched)
        assert chosen(Sample(), logits, draws) == wanted


@pytest.mark.parametrize("width", [1, 2, 1025, 9001])
def test_the_argmax_is_the_first_of_the_best(width: int) -> None:
    rng = np.random.default_rng(width)
    logits = torch.from_numpy(rng.integers(-3, 3, (6, width)).astype(np.float32))
    logits[1] = -INF
    logits[2, width // 2] = INF
    logits[3] = -0.0
    logits[3, width // 2] = 0.0
    logits[4, width - 1] = 9.0
    found = chosen(Sample(), logits, None)
    assert found.tokens == logits.numpy().argmax(-1).tolist()
    assert found.best == logits.numpy().max(-1).tolist()


@pytest.mark.parametrize("width", [1, 300, 9001])
def test_a_nan_anywhere_is_found_and_its_row_is_not_drawn_from(width: int) -> None:
    places = sorted({0, width // 3, width - 1})
    logits = torch.zeros(len(places) + 2, width)
    for row, place in enumerate(places):
        logits[row, place] = NAN
    logits[-2], logits[-1, 0] = -INF, INF
    draws = join_draws([pack_draw(top_p=0.9, top_k=3)] * len(logits), [0.5] * len(logits))
    for found in (chosen(Sample(), logits, None), chosen(Sample(), logits, draws)):
        assert found.tokens[: len(places)] == places
        assert np.isnan(found.best[: len(places)]).all()
        assert found.best[-2:] == [-INF, INF] and found.tokens[-2:] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("room", [160, 8192])
def test_a_row_s_token_depends_on_nothing_but_the_row(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if room < 8192:
        small(monkeypatch, room, chunk=512, block=64)
    rng = np.random.default_rng(3)
    logits = torch.cat([logits_of(kind, 1, 1300, rng) for kind in KINDS])
    draws = random_draws(len(logits), rng)
    together = chosen(Sample(), logits, draws)
    order = rng.permutation(len(logits))[:3]
    room = torch.empty(3, 1307)
    room[:, 3:-4] = logits[torch.from_numpy(order)]  # other alignment, rows apart
    found = chosen(Sample(), room[:, 3:-4], draws[order])
    assert list(found) == [[column[i] for i in order] for column in together]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("width", "drawn"),
    [(33, True), pytest.param(230, True, marks=pytest.mark.slow), (100, False), (8200, False)],
)
def test_the_draw_is_that_of_the_changed_rows(
    width: int, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """230 logits: in four chunks, read in at least two ways."""
    read = small(monkeypatch, room=32) if width == 230 else []
    rng = np.random.default_rng(width)
    buffers = buffers_of(width, rng)
    logits = logits_for(buffers, width, rng)
    untouched = logits.clone()
    packed = [pack_draw(**({"top_k": 3} if row % 3 else {})) for row in range(len(logits))]
    draws = join_draws(packed, list(rng.random(len(logits)))) if drawn else None
    Sample().run(logits, draws, buffers)
    found, wanted = buffers.read(len(logits)), expected(Sample(), logits, draws, buffers)
    assert found.tokens == wanted.tokens
    np.testing.assert_array_equal(found.best, wanted.best)
    assert found.probabilities == wanted.probabilities
    assert np.array_equal(logits.numpy(), untouched.numpy(), equal_nan=True)
    assert set(read) >= ({"listed", "between"} if read else set())


def packed_of(sizes: tuple[int, int, int, int]) -> tuple[PackedShapes, SampleBuffers]:
    """Shapes of five rows: two changes, none, a mask, a mask of a slot, a change of seven ids."""
    buffers = SampleBuffers(5)
    two = [Change(ChangeKind.ADD, [50], [9.0]), Change(ChangeKind.FORBID, [50, 51])]
    buffers.set_shape(0, Shape(None, two))
    buffers.set_shape(2, Shape(mask_of([70, 71])))
    buffers.use_masks(100, 1)[0] = [0, 0, 0, 8]
    buffers.set_mask(3, 0)
    buffers.set_shape(4, Shape(None, [Change(ChangeKind.FORBID, range(50, 57))]))
    return PackedShapes(torch.device("cpu"), 5, 100, sizes), buffers


@pytest.mark.parametrize(
    ("sizes", "left_out", "wanted"),
    [
        ((4, 3, 10, 2), [], [52, 50, 70, 99, 57]),
        ((3, 3, 10, 2), [4], [52, 50, 70, 99, 50]),
        ((4, 2, 10, 2), [4], [52, 50, 70, 99, 50]),
        ((4, 1, 10, 2), [0], [50, 50, 70, 99, 57]),
        ((4, 3, 9, 2), [4], [52, 50, 70, 99, 50]),
        ((4, 3, 2, 2), [0, 4], [50, 50, 70, 99, 50]),
        ((4, 3, 10, 1), [3], [52, 50, 70, 50, 57]),
        ((0, 0, 0, 0), [0, 2, 3, 4], [50] * 5),
    ],
)
def test_rows_without_room_are_named_and_drawn_unchanged(
    sizes: tuple[int, int, int, int], left_out: list[int], wanted: list[int]
) -> None:
    packed, buffers = packed_of(sizes)
    assert packed.pack(buffers, 5) == left_out
    logits = torch.zeros(5, 100)
    logits[:, 50:60] = torch.arange(10, 0, -1)
    assert Sample().rows(logits, None, packed)[:, 0].tolist() == wanted


def test_the_same_tensors_hold_the_next_step_s_shapes() -> None:
    """As in a graph: what is packed is read where it was, by fewer rows than it has room for."""
    packed, buffers = packed_of((4, 3, 10, 2))
    ops = Ops(num_threads=1, backends=["gpu"])
    draws = torch.zeros(3, 8, dtype=torch.float64)
    logits = torch.zeros(3, 100)
    logits[:, 50:60] = torch.arange(10, 0, -1)
    places = [x.data_ptr() for x in (packed.owners, packed.entries, packed.masks, packed.side)]

    def tokens() -> list[int]:
        packed.pack(buffers, 3)
        return [int(x) for x in ops.sampling.sample_rows(logits, draws, packed)[:, 0]]

    assert tokens() == [52, 50, 70]
    buffers.set_shape(0, None)
    buffers.set_mask(1, 0)
    buffers.set_shape(2, Shape(mask_of([59])))
    assert tokens() == [50, 99, 59]
    assert places == [
        x.data_ptr() for x in (packed.owners, packed.entries, packed.masks, packed.side)
    ]
    with pytest.raises(KernelError, match="expected shapes for 6 rows, found 5"):
        ops.sampling.sample_rows(
            torch.zeros(6, 100), torch.zeros(6, 8, dtype=torch.float64), packed
        )
    with pytest.raises(KernelError, match="sample side"):
        ops.sampling.sample_rows(torch.zeros(3, 99), draws, packed)
    ops.close()
