"""FP8 prompts by torch's ``_scaled_mm``, which runs on a CPU too."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels import gpu
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import scaled_mm
from sdk.kernels.gpu.tuning import OPS, VERSION, Tuning, read_tuning
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.weights.layouts import ActivationScheme

N, K = 48, 80


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that says: from three tokens on."""
    tuning = Tuning(programs=4, libraries={("scaled_mm", N, K): 3})
    monkeypatch.setattr(gpu, "tuning_of", lambda device: tuning)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each product that the library got, with exact accumulation."""
    found: list[int] = []
    real = torch._scaled_mm

    def scaled(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        assert more["use_fast_accum"] is False
        found.append(a.shape[0])
        return real(a, b, **more)

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    return found


def weight(cases: Any, block: tuple[int, int] = (1, K), n: int = N, **scheme: Any) -> Any:
    inputs = ActivationScheme("e4m3", **scheme)
    return replace(cases.float8(n, K, block), inputs=inputs)


def linear(layout: Any, **options: Any) -> Any:
    return Ops("cpu", backends=("gpu", "reference"), **options).linear(layout)


def why(bound: Any) -> str:
    return str(dict(bound.choice.declined)["gpu.scaled_mm"])


@pytest.mark.parametrize("activations", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [(1, K), (N, K)], ids=["rows", "tensor"])
def test_many_tokens_are_the_librarys_and_few_ours(
    cases: Any, measured: None, calls: list[int], activations: str, block: tuple[int, int]
) -> None:
    layout = weight(cases, block)
    bound = linear(layout, activations=activations)
    assert bound.choice.name == "gpu.scaled_mm"
    dtype = getattr(torch, activations)
    for tokens, library in ((2, []), (3, [3]), (70, [70])):
        calls.clear()
        x = cases.activations(tokens, K).to(dtype)
        found = bound.matmul(x, torch.empty(tokens, N, dtype=dtype)).double()
        assert calls == library
        right = fake_quantize(x.float(), layout.inputs).double() @ decode(layout).double().t()
        limit = 1e-5 if activations == "float32" else 4e-3  # sums in float32; 8 bits of a result
        assert float((found - right).norm() / right.norm()) < limit


def test_rows_apart_are_ours(cases: Any, measured: None, calls: list[int]) -> None:
    bound = linear(weight(cases))
    calls.clear()
    x, wide = cases.activations(5, K), torch.empty(5, 2 * N)
    torch.testing.assert_close(bound.matmul(x, wide[:, :N]), bound.matmul(x))
    assert calls == [5]


def test_without_a_measurement_it_is_not_chosen(cases: Any) -> None:
    bound = linear(weight(cases))
    assert bound.choice.name == "gpu.linear_as_file"
    assert why(bound) == "no table of this card says that it is faster"


def test_what_it_does_not_take_is_said(
    cases: Any, measured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "inputs: expected float8_e4m3fn" in why(linear(weight(cases, static=0.01)))
    other = scaled_mm.ScaledMM(Tuning(programs=4), ("e4m3",))
    assert "with exact inputs: exp" in other.reject(linear(cases.blocks(N, 256, "q4_0")).problem)
    assert why(linear(weight(cases, (16, 16)))) == "groups of 16: expected one scale for a row"
    assert why(linear(weight(cases, n=40))) == "40 rows: expected a multiple of 16"
    problem = linear(weight(cases)).problem
    fixed = scaled_mm.ScaledMM(Tuning(programs=4), ("e4m3",), fixed=True)
    assert fixed.reject(problem) == "the library's order of additions depends on the batch"
    kernel = scaled_mm.ScaledMM(Tuning(programs=4), ("int",))
    assert kernel.reject(problem) == "the card multiplies no e4m3"
    monkeypatch.delattr(torch, "_scaled_mm")
    assert why(linear(weight(cases))) == f"torch {torch.__version__} has no _scaled_mm"


@pytest.mark.parametrize("wrong", ["scales", "raises"])
def test_a_library_that_is_wrong_is_replaced_and_named(
    cases: Any, measured: None, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    real = torch._scaled_mm

    def broken(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        if wrong == "raises":
            raise RuntimeError("no such algorithm")
        result = real(a, b, **more)
        result[:, -1] = 0
        return result

    monkeypatch.setattr(torch, "_scaled_mm", broken)
    bound = linear(weight(cases))
    assert bound.choice.name == "gpu.linear_as_file"
    expected = "RuntimeError: no such" if wrong == "raises" else "KernelError: _scaled_mm: 0."
    assert why(bound).startswith(f"failed its self-check: {expected}")


def test_the_check_itself_raises(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = scaled_mm.ScaledMM(Tuning(programs=4), ("e4m3",)).pack(weight(cases))
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, out, **more: out.zero_())
    with pytest.raises(KernelError, match=r"_scaled_mm: 1 of the norm from float64 in bfloat16"):
        scaled_mm.check(packed, torch.bfloat16)


def table(folder: Path, libraries: Any) -> Path:
    found = {"version": VERSION, "dense_from": 64, "experts_dense_from": 64}
    found |= {op: {} for op in OPS} | {"libraries": libraries}
    (folder / "card.json").write_text(json.dumps(found))
    return folder


def test_the_cards_table_says_from_how_many_tokens(tmp_path: Path) -> None:
    folder = table(tmp_path, {"scaled_mm": [{"n": N, "k": K, "from_m": 64}]})
    assert read_tuning("card", 4, folder).libraries == {("scaled_mm", N, K): 64}


def test_a_table_has_entries_of_every_library(tmp_path: Path) -> None:
    weight = {"type": "int4g128", "n": N, "k": K, "from_m": 2}
    heads = {"type": "float16", "head_dim": 128, "from_m": 2048}
    entries = {"grouped_mm": [weight], "humming": [weight], "cudnn_attention": [heads]}
    assert read_tuning("card", 4, table(tmp_path, entries)).libraries == {
        ("grouped_mm", "int4g128", N, K): 2,
        ("humming", "int4g128", N, K): 2,
        ("cudnn_attention", "float16", 128): 2048,
    }


@pytest.mark.parametrize(
    ("libraries", "message"),
    [
        ({"other": []}, "expected scaled_mm, grouped_mm, cudnn_attention, humming, found 'other'"),
        ({"scaled_mm": [{"n": N, "k": K, "from_m": 0}]}, "from_m of at least 1, found 0"),
        ({"scaled_mm": [{"n": N, "k": K, "from_m": True}]}, "from_m of at least 1, found True"),
        ({"cudnn_attention": [{"head_dim": 128, "from_m": 64}]}, "KeyError('type')"),
    ],
)
def test_a_damaged_section_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, libraries: Any, message: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_tuning("card", 4, table(tmp_path, libraries)) == Tuning(4)
    assert message in caplog.text
