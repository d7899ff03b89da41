"""The choice of tokens under the Triton interpreter, against the reference on random rows.

The two round weights differently (float32 against float64), so a token may differ where the draw or
a truncation's mass lies within 1e-6 of a boundary: then the reference chooses the kernel's token
with the numbers moved by that much.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.sampling import Sample
from sdk.kernels.ops import Ops
from sdk.kernels.packed_shapes import PackedShapes
from sdk.kernels.reference.sampling import Sample as Reference, truncate
from sdk.kernels.sampling import (
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
from tests.shaping import buffers_of, expected, logits_for

INF, NAN = float("inf"), float("nan")
KINDS = ("normal", "ties", "flat", "forbidden", "one", "huge")


def chosen(kernel: Any, logits: Tensor, draws: Draws | None) -> Tokens:
    out = SampleBuffers(len(logits))
    kernel.run(logits, draws, out)
    return out.read(len(logits))


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


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"typical_p": 0.7},
        {"xtc_threshold": 0.05},
        {"mirostat_mu": 3.0},
        {"temperature": 2.0, "min_p": 0.02, "top_k": 20, "typical_p": 0.95, "top_p": 0.9},
    ],
)
def test_every_token_that_the_reference_keeps_can_be_drawn_and_no_other(fields: Any) -> None:
    """In the middle of every token's share of the uniforms; many logits are equal."""
    rng = np.random.default_rng(5)
    row = torch.from_numpy(rng.integers(-8, 9, (1, 60)).astype(np.float32) / 2)
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
def test_a_row_s_token_depends_on_nothing_but_the_row() -> None:
    rng = np.random.default_rng(3)
    logits = torch.cat([logits_of(kind, 1, 1300, rng) for kind in KINDS])
    draws = random_draws(len(logits), rng)
    together = chosen(Sample(), logits, draws)
    order = rng.permutation(len(logits))[:3]
    room = torch.empty(3, 1307)
    room[:, 3:-4] = logits[torch.from_numpy(order)]  # other alignment, rows apart
    found = chosen(Sample(), room[:, 3:-4], draws[order])
    assert list(found) == [[column[i] for i in order] for column in together]


@pytest.mark.parametrize(
    ("width", "drawn"), [(33, True), (100, False), (8200, False), (16384, False)]
)
def test_the_draw_is_that_of_the_changed_rows(width: int, drawn: bool) -> None:
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
