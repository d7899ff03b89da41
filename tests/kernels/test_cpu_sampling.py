"""The native choice of tokens at every SIMD level, against the reference on random rows.

The two round weights differently (float32 against float64), so a token may differ where the draw or
a truncation's mass lies within 1e-6 of a boundary: then the reference chooses the native token with
the numbers moved by that much.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdk.kernels.cpu import CpuBackend, open_backend
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import DRAW, Draws, SampleBuffers, Tokens, join_draws, pack_draw
from sdk.kernels.reference.sampling import Sample as Reference, truncate

INF, NAN = float("inf"), float("nan")
WIDTHS = (1, 2, 15, 16, 17, 511, 512, 513, 1000, 4096, 9001)


class Sampled:
    """A kernel with buffers of its own for every call."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def run(self, logits: Tensor, draws: Draws | None) -> Tokens:
        out = SampleBuffers(len(logits))
        self._kernel.run(logits, draws, out)
        return out.read(len(logits))


def native(backend: CpuBackend) -> Sampled:
    (kernel,) = backend.implementations("sample")
    return Sampled(kernel)


def logits_of(kind: str, rows: int, width: int, rng: np.random.Generator) -> Tensor:
    x = rng.standard_normal((rows, width)).astype(np.float32) * 3
    if kind == "peaked":
        x[:, : width // 100 + 1] += 10 * rng.random((rows, width // 100 + 1), dtype=np.float32)
    elif kind == "ties":
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


KINDS = ("normal", "peaked", "ties", "flat", "forbidden", "one", "huge")


def random_draws(rows: int, rng: np.random.Generator) -> Draws:
    """Every parameter off in about half of the rows, and its extremes among the others."""

    def mixed(off: float, values: list[float]) -> np.ndarray:
        return np.where(rng.random(rows) < 0.5, off, rng.choice(values, rows))

    draws = np.zeros(rows, DRAW)
    draws["temperature"] = mixed(1.0, [0.8, 1.3, 1e-3, 0.009, 1e-30, 1e-45, 100.0, 1e6, 0.0])
    draws["min_p"] = mixed(0.0, [0.05, 1e-6, 0.5, 1.0, 1e-44])
    draws["top_k"] = mixed(0, [1, 2, 40, 500, 3000, 2**31 - 1])
    draws["top_p"] = mixed(1.0, [0.95, 0.5, 0.999, 1e-9, 5e-324, 1 - 1e-6])
    draws["typical_p"] = np.where(rng.random(rows) < 0.8, 1.0, rng.choice([0.2, 0.9], rows))
    draws["xtc_threshold"] = np.where(rng.random(rows) < 0.8, -1.0, rng.choice([0.0, 0.1], rows))
    draws["mirostat_mu"] = np.where(rng.random(rows) < 0.9, NAN, rng.choice([-5.0, 0.0, 7.0], rows))
    draws["uniform"] = mixed(0.0, list(rng.random(20))) + mixed(0.0, [0.0])
    draws["uniform"][rng.random(rows) < 0.05] = 1 - 2**-52
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
            if Sampled(Reference()).run(row, moved).tokens[0] == token:
                return True
    return False


@pytest.mark.quick_cases(13)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_reference_s_but_for_rounding(
    backend: CpuBackend, kind: str, width: int
) -> None:
    rng = np.random.default_rng(width)
    logits, draws = logits_of(kind, 150, width, rng), random_draws(150, rng)
    found, expected = native(backend).run(logits, draws), Sampled(Reference()).run(logits, draws)
    assert found.best == expected.best
    different = [i for i in range(150) if found.tokens[i] != expected.tokens[i]]
    unexplained = [
        (i, draws[i], found.tokens[i], expected.tokens[i])
        for i in different
        if not explained(logits[i : i + 1], draws[i : i + 1], found.tokens[i])
    ]
    assert not unexplained
    assert len(different) <= 3
    for i in set(range(150)) - set(different):
        if draws[i]["typical_p"] < 1 or draws[i]["top_p"] < 1:
            continue  # one token more or less may be left
        assert found.probabilities[i] == pytest.approx(expected.probabilities[i], rel=1e-4)


def test_every_token_that_the_reference_keeps_can_be_drawn_and_no_other(
    backend: CpuBackend,
) -> None:
    """Just inside and in the middle of every token's share of the uniforms."""
    rng = np.random.default_rng(5)
    row = torch.from_numpy(rng.integers(-8, 9, (1, 60)).astype(np.float32) / 2)
    for fields in (
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"typical_p": 0.7},
        {"xtc_threshold": 0.05},
        {"mirostat_mu": 3.0},
        {"temperature": 2.0, "min_p": 0.02, "top_k": 20, "typical_p": 0.95, "top_p": 0.9},
    ):
        packed = pack_draw(**fields)
        gaps = (row.max() - row) / fields.get("temperature", 1.0)
        left = truncate(gaps.clone(), join_draws([packed], [0.0]))
        ids = left[0].isfinite().nonzero()[:, 0].tolist()
        shares = torch.softmax(-left[0, ids].double(), 0).numpy()
        ends = shares.cumsum()
        inside = [*(ends - shares + 1e-6), *(ends - shares / 2), *(ends - 1e-6)]
        found = native(backend).run(
            row.expand(len(inside), -1), join_draws([packed] * len(inside), inside)
        )
        assert found.tokens == ids * 3
        assert found.probabilities == pytest.approx([*shares] * 3, rel=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_argmax_is_the_first_of_the_best(backend: CpuBackend, width: int) -> None:
    rng = np.random.default_rng(width)
    logits = torch.from_numpy(rng.integers(-3, 3, (40, width)).astype(np.float32))
    logits[1] = -INF
    logits[2, width // 2] = INF
    logits[3] = -0.0
    logits[3, width // 2] = 0.0
    logits[4, width - 1] = 9.0
    found = native(backend).run(logits, None)
    array = logits.numpy()
    assert found.tokens == array.argmax(-1).tolist()
    assert found.best == array.max(-1).tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_a_nan_anywhere_is_found_and_its_row_is_not_drawn_from(
    backend: CpuBackend, width: int
) -> None:
    places = sorted({0, width // 3, width - 1})
    logits = torch.zeros(len(places) + 2, width)
    for row, place in enumerate(places):
        logits[row, place] = NAN
    logits[-2], logits[-1, 0] = -INF, INF
    draws = join_draws([pack_draw(top_p=0.9, top_k=3)] * len(logits), [0.5] * len(logits))
    for found in (native(backend).run(logits, None), native(backend).run(logits, draws)):
        assert found.tokens[: len(places)] == places
        assert np.isnan(found.best[: len(places)]).all()
        assert found.best[-2:] == [-INF, INF] and found.tokens[-2:] == [0, 0]


def some_rows() -> tuple[Tensor, Draws]:
    rng = np.random.default_rng(3)
    logits = torch.cat([logits_of(kind, 12, 5003, rng) for kind in KINDS])
    return logits, random_draws(len(logits), rng)


def test_a_row_s_token_depends_on_nothing_but_the_row(backend: CpuBackend) -> None:
    logits, draws = some_rows()
    together = native(backend).run(logits, draws)
    order = np.random.default_rng(4).permutation(len(logits))
    shuffled = native(backend).run(logits[torch.from_numpy(order)], draws[order])
    assert [[column[i] for i in order] for column in together] == list(shuffled)
    room = torch.empty(len(logits), 5003 + 7)
    room[:, 3:-4] = logits  # other alignment, rows apart
    assert native(backend).run(room[:, 3:-4], draws) == together
    one = open_backend("cpu", 1, backend.runtime.level)
    alone = [native(one).run(logits[i : i + 1], draws[i : i + 1]) for i in range(len(logits))]
    one.close()
    assert [list(column) for column in zip(*alone, strict=True)] == [
        [[value] for value in column] for column in together
    ]


def test_the_levels_with_fused_multiplications_agree_bit_for_bit(backend: CpuBackend) -> None:
    if backend.runtime.level == "portable":
        return  # no fused multiplication: its weights may differ in the last bit
    logits, draws = some_rows()
    best = open_backend("cpu", 1)
    assert native(best).run(logits, draws) == native(backend).run(logits, draws)
    best.close()


def test_wrong_arguments_raise() -> None:
    ops = Ops(num_threads=1, backends=["cpu"])
    draws = join_draws([pack_draw()], [0.5])
    with pytest.raises(KernelError, match=r"expected one DRAW for each row .*\[2, 8\], found"):
        ops.sampling.sample(torch.zeros(2, 8), draws)
    with pytest.raises(KernelError, match=r"expected one DRAW .* found float64 \[1\]"):
        ops.sampling.sample(torch.zeros(1, 8), np.zeros(1))
    with pytest.raises(KernelError, match=r"expected float32 logits \[R, V\], found torch.float16"):
        ops.sampling.argmax(torch.zeros(1, 8, dtype=torch.float16))
    for shape in ((8,), (1, 0)):
        with pytest.raises(KernelError, match=r"expected float32 logits \[R, V\]"):
            ops.sampling.argmax(torch.zeros(shape))
    with pytest.raises(KernelError, match="expected logits on cpu, found meta"):
        ops.sampling.argmax(torch.zeros(1, 8, device="meta"))
    assert ops.sampling.argmax(torch.zeros(0, 8)) == ([], [], [])
    ops.close()
    with pytest.raises(KernelError, match="sample: the engine is closed"):
        ops.sampling.argmax(torch.zeros(1, 8))
