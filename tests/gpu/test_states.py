"""The operators of recurrent layers under the Triton interpreter, against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from tests.recurrent import Operator, Row, conv, delta, rwkv, scan, several, space

CASES = [
    conv(40, 4),
    conv(23, 3, gated=True),
    conv(300, 2, activation=None),
    several(),
    delta(2, 4, 24, 40),
    delta(1, 3, 16, 21, rows=True),
    delta(2, 4, 7, 5, tiled=True, eps=None),
    rwkv(2, 24),
    rwkv(3, 7, first=True),
    space(),
    space(3, 5, 3, 7, skip=False),
    scan(),
    scan(7, 5, skip=False),
]


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    opened = Ops("cpu", num_threads=1, backends=["gpu"])
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Ops]:
    opened = Ops("cpu", num_threads=1, backends=["reference"])
    yield opened
    opened.close()


def _part(inputs: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    return {name: x[begin:end] for name, x in inputs.items()}


def _close(found: Tensor, expected: Tensor) -> None:
    limit = 3e-6 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=limit)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_agree_with_the_reference_and_with_themselves(
    ops: Ops, plain: Ops, case: Operator
) -> None:
    """In one step beside another request, in chunks, from a slot and with several saves."""
    count = 37 if case.name.startswith("conv") else 12  # of a convolution, two blocks of tokens
    inputs, other = case.inputs(count, 1), case.inputs(3, 2)
    begin = case.plain(plain, case.inputs(4, 3))[1][-1]
    expected, states = case.plain(plain, inputs, begin)
    state = case.slots()
    state[5] = begin
    rows = [Row(other, -1, [(3, 2)]), Row(inputs, 5, [(1, 5), (9, 6), (9, 7), (count, 8)])]
    out = case.step(ops, state, rows)[1]
    _close(out, expected)
    for slot, tokens in ((5, 1), (6, 9), (7, 9), (8, count)):
        _close(state[slot], states[tokens - 1])
    assert state[[0, 1, 3, 4, 9, 10, 11]].eq(7.5).all()

    again = case.slots()
    again[5] = begin
    found = case.step(ops, again, [Row(_part(inputs, 0, 1), 5, [(1, 5)])])
    found += case.step(ops, again, [Row(_part(inputs, 1, 9), 5, [(8, 6)])])
    found += case.step(ops, again, [Row(_part(inputs, 9, count), 6, [(count - 9, 6)])])
    assert torch.equal(torch.cat(found), out)
    assert torch.equal(again[6], state[8])


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_a_nan_stays_in_its_request(ops: Ops, case: Operator) -> None:
    inputs, bad = case.inputs(2, 4), {name: x.clone() for name, x in case.inputs(2, 5).items()}
    next(iter(bad.values()))[1] = float("nan")
    state, alone = case.slots(), case.slots()
    out = case.step(ops, alone, [Row(inputs, -1, [(2, 3)])])[0]
    empty = Row(case.inputs(0, 1), 1, [])
    found = case.step(ops, state, [Row(bad, -1, [(2, 2)]), empty, Row(inputs, -1, [(2, 3)])])
    assert torch.equal(found[2], out) and torch.equal(state[3], alone[3])
    assert found[0][1].isnan().all() and not found[0][0].isnan().any()


def test_rates_agree_with_the_reference(ops: Ops, plain: Ops) -> None:
    random = torch.Generator().manual_seed(6)
    x = torch.randn(3, 50, generator=random)[:, 5:41] * 10
    x[0, 0], x[0, 1], x[1, 0] = 90.0, -90.0, float("nan")
    bias, factor = torch.randn(36, generator=random), torch.randn(4, generator=random)
    for how in (
        {"kind": "softplus", "bias": bias, "factor": factor},
        {"kind": "softplus", "limits": (0.01, 3.0)},
        {"kind": "sigmoid", "factor": torch.full((1,), 2.0)},
        {"kind": "tanh"},
    ):
        found, expected = (one.states.rates(x, **how) for one in (ops, plain))  # type: ignore[arg-type]
        least = 2e-7 if how["kind"] == "tanh" else 1e-37  # by the exponential, which is near 1
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=least, equal_nan=True)


@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
@pytest.mark.parametrize("first", [False, True])
def test_gated_norms_agree_with_the_reference(ops: Ops, plain: Ops, kind: str, first: bool) -> None:
    random = torch.Generator().manual_seed(7)
    both = torch.randn(3, 2, 66, generator=random)
    x, gate = both[:, :, :33], both[:, :, 33:]
    for weight in (None, torch.randn(33, generator=random), torch.randn(2, 33, generator=random)):
        norm = Norm(weight, 1e-5)
        how = {"kind": kind, "first": first}
        found, expected = (
            one.states.gated_norm(x, gate, norm, **how)  # type: ignore[arg-type]
            for one in (ops, plain)
        )
        torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations_of_16_bits_are_read_exactly_and_rounded_once(dtype: torch.dtype) -> None:
    case = delta(2, 4, 16, 32)
    inputs = case.inputs(5, 8)
    inputs["qkv"] = inputs["qkv"].to(dtype)
    found = []
    for name in ("gpu", "reference"):
        opened = Ops("cpu", num_threads=1, backends=[name], activations=dtype)
        state = case.slots()
        out = case.step(opened, state, [Row(inputs, -1, [(5, 3)])])[0]
        assert out.dtype == dtype
        found.append((out.float(), state[3]))
        opened.close()
    _close(found[0][1], found[1][1])
    torch.testing.assert_close(*(out for out, _ in found), rtol=torch.finfo(dtype).eps, atol=1e-6)
