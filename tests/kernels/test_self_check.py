"""The check of kernels at load, with kernels that are wrong on purpose."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk import LLM, SamplingParams
from sdk.kernels.cpu.packed_linear import PackedLinear
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.decode import decode
from sdk.kernels.weights.layouts import ActivationScheme, Affine, Dense, on_device

PARAMS = SamplingParams(temperature=0.0, max_tokens=4)
Matmul = Callable[[PackedLinear, Any, Tensor, Tensor], None]


def double(right: Matmul, kernel: PackedLinear, packed: Any, x: Tensor, out: Tensor) -> None:
    right(kernel, packed, x, out)
    out *= 2.0


def forget_a_row(right: Matmul, kernel: PackedLinear, packed: Any, x: Tensor, out: Tensor) -> None:
    right(kernel, packed, x, out)
    out[-1] = torch.nan


def turn_columns(right: Matmul, kernel: PackedLinear, packed: Any, x: Tensor, out: Tensor) -> None:
    right(kernel, packed, x.flip(1), out)


def spoil_several(right: Matmul, kernel: PackedLinear, packed: Any, x: Tensor, out: Tensor) -> None:
    right(kernel, packed, x, out)
    if x.shape[0] > 1:
        out[1] = out[0]


def fail(right: Matmul, kernel: PackedLinear, packed: Any, x: Tensor, out: Tensor) -> None:
    raise RuntimeError("no such instruction")


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    right = PackedLinear.matmul

    def spoil(wrong: Any) -> None:
        def matmul(self: PackedLinear, packed: Any, x: Tensor, out: Tensor) -> None:
            wrong(right, self, packed, x, out)

        monkeypatch.setattr(PackedLinear, "matmul", matmul)

    return spoil


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (double, "of the norm from the reference for 1 token"),
        (forget_a_row, "nan of the norm from the reference for 1 token"),
        (turn_columns, "of the norm from the reference for 1 token"),
        (spoil_several, "of the norm from the reference for 3 tokens"),
        (fail, "RuntimeError: no such instruction"),
    ],
)
def test_a_wrong_kernel_is_passed_over_and_says_why(
    cases: Any, spoil: Callable[[Any], None], wrong: Any, why: str
) -> None:
    layout = cases.affine(40, 128)
    x = cases.activations(3, 128)
    spoil(wrong)
    ops = Ops(num_threads=1)
    bound = ops.linear(layout)
    assert bound.choice.name == "reference.linear"
    reasons = dict(bound.choice.declined)
    assert reasons["cpu.linear"].startswith("failed its self-check: ")
    assert why in reasons["cpu.linear"]
    expected = x.double() @ decode(layout).double().t()
    assert torch.allclose(bound.matmul(x).double(), expected, rtol=1e-5, atol=1e-5)
    ops.close()


def test_right_kernels_pass_with_every_kind_of_weight(cases: Any) -> None:
    for compute in ("auto", "exact"):
        ops = Ops(compute=compute, num_threads=1)  # type: ignore[arg-type]
        for layout in (
            cases.affine(40, 96, 2, 32, "zeros"),
            cases.affine(7, 64),
            replace(cases.affine(8, 96, 8, 96, "zero"), inputs=ActivationScheme("int")),
            replace(cases.table(8, 64), inputs=ActivationScheme("e2m1", 4, 16, "nv", factor=0.1)),
            cases.nested(18, 192, 64, 4),
            cases.repeating(64, 32, 4, 16, "zeros"),
            cases.float8(130, 160, (128, 128)),
            cases.blocks(40, 256, "q3_k"),
            Dense(torch.zeros(8, 32)),
        ):
            declined = ops.linear(layout).choice.declined
            assert not any("self-check" in why for _, why in declined)
        ops.close()


def test_a_product_next_to_nothing_is_no_fault_of_the_kernel(cases: Any) -> None:
    """Of a matrix of one row a product may be a hundredth of what its parts are."""
    for seed in range(60):
        ops = Ops(num_threads=1)  # what passed once is not asked again
        bound = ops.linear(cases.affine(1, 300, 2, 16, "minus", seed=seed))
        assert bound.choice.name == "cpu.linear"
        ops.close()


def test_a_kind_of_weight_is_checked_once(cases: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    right = PackedLinear.matmul

    def matmul(self: PackedLinear, packed: Any, x: Tensor, out: Tensor) -> None:
        calls.append(x.shape[0])
        right(self, packed, x, out)

    monkeypatch.setattr(PackedLinear, "matmul", matmul)
    ops = Ops(num_threads=1)
    for rows in (40, 64, 40):
        ops.linear(cases.affine(rows, 128))
    assert calls == [1, 3]
    ops.linear(cases.affine(40, 256))
    assert calls == [1, 3, 1, 3]
    ops.close()


def test_weights_that_are_not_finite_are_no_fault_of_the_kernel(cases: Any) -> None:
    ops = Ops(num_threads=1)
    layout = cases.affine(8, 64)
    layout.scale[3] = float("inf")
    assert ops.linear(layout).choice.name == "cpu.linear"
    ops.close()


def test_a_broken_layout_is_an_error_and_not_a_wrong_kernel(cases: Any) -> None:
    ops = Ops(num_threads=1)
    with pytest.raises(KernelError, match="affine scale: expected"):
        ops.linear(replace(cases.affine(8, 64), scale=torch.ones(8, 1)))
    ops.close()


def test_weights_move_to_the_device_of_their_engine(cases: Any) -> None:
    # meta stands for a device that is not the CPU: its tensors have no contents to check
    layout = cases.affine(8, 64, 4, 32, "zeros")
    moved = on_device(layout, torch.device("meta"))
    assert isinstance(moved, Affine)
    assert moved.zeros is not None
    assert {moved.codes.device.type, moved.scale.device.type, moved.zeros.device.type} == {"meta"}
    assert (moved.shape, moved.bits, moved.minus) == (layout.shape, layout.bits, None)


def test_an_engine_hands_its_kernels_weights_on_its_own_device(cases: Any) -> None:
    ops = Ops("meta", num_threads=1)
    bound = ops.linear(cases.affine(8, 64))
    assert bound.choice.name == "reference.linear"
    assert bound.packed.codes.device.type == "meta"
    ops.close()


def test_a_model_runs_on_the_next_kernel_and_the_layers_are_named(
    golden: Path, spoil: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = golden / "gguf-Q8_0" / "model.gguf"
    with LLM(path, compute="exact", max_model_len=64) as llm:
        wanted = llm.generate([[5, 9, 30]], PARAMS)[0].outputs[0].token_ids
        assert llm.load_warnings == ()
    spoil(double)
    with caplog.at_level(logging.WARNING, "sdk"), LLM(path, max_model_len=64) as llm:
        found = llm.generate([[5, 9, 30]], PARAMS)[0].outputs[0].token_ids
        explained = llm.explain()
        warnings = llm.load_warnings
    assert found == wanted
    named = "model.layers.0.mlp.down_proj: cpu.linear failed its self-check"
    assert any(text.startswith(named) and "reference.linear runs it" in text for text in warnings)
    assert any(text.startswith("lm_head: ") for text in warnings)
    assert set(warnings) == {record.getMessage() for record in caplog.records}
    assert "not cpu.linear: failed its self-check" in explained
