"""Tensors without torch compute what torch computes: types, values and views."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sdk.kernels.errors import CaptureError
from sdk.kernels.host import functions
from sdk.kernels.host.arithmetic import only_views, result_type
from sdk.kernels.host.dtypes import DTYPES, device_of
from sdk.kernels.host.tensor import HostTensor

#: Types that engines compute with; others of ``DTYPES`` are only stored.
COMPUTED = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)
VALUES = [-3.7, -1.0, 0.0, 0.1, 1.0, 2.5, 77.3, 100.0]


def pair(name: str, values: Any = VALUES, shape: tuple[int, ...] = (-1,)) -> tuple[Any, Any]:
    """The same numbers as a tensor of torch and as a host tensor."""
    source = torch.tensor(values, dtype=torch.float64).reshape(shape)
    if not getattr(torch, name).is_floating_point:
        source = source.abs() if name == "uint8" else source.trunc()
    theirs = source.to(getattr(torch, name))
    return theirs, host_of(theirs)


def host_of(x: torch.Tensor) -> HostTensor:
    """A copy of a tensor of torch."""
    dtype = DTYPES[str(x.dtype).removeprefix("torch.")]
    stored = x.contiguous().reshape(-1).view(torch.uint8) if x.dtype != torch.bool else x
    array = stored.numpy().copy().view(dtype.storage).reshape(x.shape)
    return HostTensor(array, dtype)


def same(theirs: Any, ours: Any, ulps: int = 0) -> None:
    """Type, shape and bits are equal; ``ulps``: this many units of the last place may differ."""
    assert isinstance(ours, HostTensor)
    assert ours.host_dtype.name == str(theirs.dtype).removeprefix("torch.")
    assert ours.shape == tuple(theirs.shape)
    expected, found = theirs.double().numpy(), ours.double().numpy()
    if ulps:
        step = torch.finfo(theirs.dtype).eps * np.abs(expected) * ulps
        assert (np.abs(found - expected) <= step).all()
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("b", COMPUTED)
@pytest.mark.parametrize("a", COMPUTED)
def test_results_have_torchs_types(a: str, b: str) -> None:
    for first, second in (((4,), (4,)), ((4,), ()), ((), (4,)), ((), ())):
        x, y = (
            torch.zeros(first, dtype=getattr(torch, a)),
            torch.zeros(second, dtype=getattr(torch, b)),
        )
        expected = str(torch.result_type(x, y)).removeprefix("torch.")
        assert result_type(host_of(x), host_of(y)).name == expected
    for number in (True, 3, 0.5):
        expected = str(torch.result_type(x, number)).removeprefix("torch.")
        assert result_type(host_of(x), number).name == expected


ARITHMETIC: list[Callable[[Any, Any], Any]] = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
]


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("function", ARITHMETIC, ids=lambda f: f.__name__)
def test_operators_give_torchs_bits(function: Any, name: str) -> None:
    theirs, ours = pair(name)
    others: list[tuple[Any, Any]] = [(number, number) for number in (2, 0.3, 7)]
    others += [pair(kind, VALUES[::-1]) for kind in ("float32", "int64", name)]
    others += [pair(kind, [3.0], ()) for kind in ("float64", "int32", name)]
    compared = 0
    for them, us in others:
        sides = [((theirs, them), (ours, us)), ((them, theirs), (us, ours))]
        if name in ("float16", "bfloat16") and getattr(them, "shape", (1,)) == ():
            del sides[1]  # torch rounds a first operand without dimensions once more
        for left, right in sides:
            try:
                expected = function(*left)
            except (RuntimeError, ZeroDivisionError):  # torch has no bool - bool; integers by 0
                continue
            found = function(*right)
            if found is NotImplemented:
                raise AssertionError(function)
            if function in (operator.mod, operator.floordiv) and expected.is_floating_point():
                close(expected, found)
            else:
                same(expected, found)
            compared += 1
    assert compared or name == "bool"


def close(expected: torch.Tensor, found: HostTensor) -> None:
    """Remainders of roundings differ where the quotient is near an integer."""
    assert found.host_dtype.name == str(expected.dtype).removeprefix("torch.")
    with np.errstate(invalid="ignore"):
        apart = np.abs(found.double().numpy() - expected.double().numpy())
    assert np.isnan(apart).sum() + (apart < 1e-2).sum() >= apart.size - 1


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize(
    "function", [operator.iadd, operator.isub, operator.imul, operator.itruediv]
)
def test_changes_in_place_keep_the_type(function: Any, name: str) -> None:
    for other in (3, 0.5, pair("float32"), pair(name)):
        theirs, ours = pair(name)
        them, us = other if isinstance(other, tuple) else (other, other)
        try:
            expected = function(theirs, them)
        except RuntimeError:  # torch: the result is a float, the tensor is not
            continue
        address = ours.data_ptr()
        found = function(ours, us)
        same(expected, found)
        assert found.data_ptr() == address


@pytest.mark.parametrize("name", ["uint8", "int16", "int32", "int64"])
@pytest.mark.parametrize(
    "function",
    [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift],
)
def test_bits_of_integers(function: Any, name: str) -> None:
    theirs, ours = pair(name, [0, 1, 2, 5, 77, 100])
    same(function(theirs, 3), function(ours, 3))
    same(function(theirs, theirs % 4), function(ours, ours % 4))
    same(~theirs, ~ours)
    if function is operator.or_:
        theirs |= 9
        ours |= 9
        same(theirs, ours)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_functions_of_one_float(name: str) -> None:
    theirs, ours = pair(name)
    for method in ("abs", "square", "round", "isfinite", "isnan", "__neg__"):
        same(getattr(theirs, method)(), getattr(ours, method)())
    for method in ("sqrt", "exp", "log"):
        positive = theirs.abs() / 16 + 1
        same(getattr(positive, method)(), getattr(ours.abs() / 16 + 1, method)(), ulps=2)
    for low, high in ((-1, 1), (None, 0.25), (0.5, None)):
        same(theirs.clamp(low, high), ours.clamp(low, high))


@pytest.mark.parametrize("name", COMPUTED)
def test_reductions(name: str) -> None:
    theirs, ours = pair(name, VALUES, (2, 4))
    for dim, keep in ((None, False), (0, False), (-1, True), ((0, 1), False)):
        where = {} if dim is None else {"dim": dim, "keepdim": keep}
        same(theirs.sum(**where), ours.sum(**where), ulps=4 * theirs.is_floating_point())
        if not isinstance(dim, tuple):
            same((theirs != 0).all(**where), (ours != 0).all(**where))
            same((theirs != 0).any(**where), (ours != 0).any(**where))
        if name != "bool":
            where = {"dim": (0, 1) if dim is None else dim, "keepdim": keep}
            same(theirs.amax(**where), ours.amax(**where))
            same(theirs.amin(**where), ours.amin(**where))
        if theirs.is_floating_point():
            same(theirs.mean(**where), ours.mean(**where), ulps=4)
    same(theirs.sum(dtype=torch.float64), ours.sum(dtype=DTYPES["float64"]), ulps=4)
    if name != "bool":
        same(theirs.max(), ours.max())
        assert ours.argmin().item() == theirs.argmin().item()


@pytest.mark.parametrize("wanted", [name for name in DTYPES if name not in ("uint32", "uint64")])
@pytest.mark.parametrize("name", COMPUTED)
def test_conversions(name: str, wanted: str) -> None:
    values = [*VALUES, 0.0625, 3.14159, 448.0, 1e-3]
    if not getattr(torch, name).is_floating_point or not getattr(torch, wanted).is_floating_point:
        values = [x for x in map(abs, values) if x < 128]
    theirs, ours = pair(name, values)
    if "e8m0" in wanted:
        theirs, ours = pair(name, [1.0, 2.0, 4.0])
    expected = theirs.to(getattr(torch, wanted))
    found = ours.to(DTYPES[wanted])
    assert found.host_dtype.name == wanted
    same(expected.float(), found.float())


def test_all_codes_of_short_floats_have_torchs_values() -> None:
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        expected = codes.view(getattr(torch, name)).float()
        found = HostTensor(codes.numpy()).view(DTYPES[name]).float()
        same(expected, found)
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    same(
        codes.view(torch.bfloat16).float(),
        HostTensor(codes.numpy()).view(DTYPES["bfloat16"]).float(),
    )


def test_views_share_memory_and_have_torchs_shapes() -> None:
    theirs = torch.arange(48, dtype=torch.float32).reshape(2, 4, 6)
    ours = host_of(theirs)
    views: list[Callable[[Any], Any]] = [
        lambda x: x.view(8, -1),
        lambda x: x.view(-1)[3:],
        lambda x: x.view(x.new_empty(0, dtype=x.dtype).dtype),
        lambda x: x.transpose(0, 2),
        lambda x: x.permute(2, 0, 1),
        lambda x: x[0].t(),
        lambda x: x[1].T,
        lambda x: x.unsqueeze(1),
        lambda x: x[0].expand(3, -1, -1),
        lambda x: x.flatten(1),
        lambda x: x.flatten(0, 1),
        lambda x: x.select(1, 2),
        lambda x: x.select(-1, 2),
        lambda x: x.narrow(2, 1, 3),
        lambda x: x.split(2, dim=1)[1],
        lambda x: x.split([1, 5], dim=2)[1],
        lambda x: x.split_with_sizes([1, 3], dim=1)[0],
        lambda x: x.chunk(2, dim=-1)[1],
        lambda x: x.unbind(1)[3],
        lambda x: x[1, 2, 3],
        lambda x: x[..., 1],
        lambda x: x[:, 1:3, ::2],
        lambda x: x[None, 0],
        lambda x: x.as_strided((2, 3), (6, 2), 1),
        lambda x: list(x)[1],
        lambda x: x.detach(),
    ]
    for view in views:
        expected, found = view(theirs), view(ours)
        same(expected, found)
        steps = zip(found.stride(), expected.stride(), expected.shape, strict=True)
        assert all(ours_ == theirs_ for ours_, theirs_, n in steps if n > 1)
        assert found.is_contiguous() == expected.is_contiguous()
        assert found.data_ptr() - ours.data_ptr() == expected.data_ptr() - theirs.data_ptr()
    same(theirs.view(torch.int32), ours.view(DTYPES["int32"]))
    same(theirs.view(torch.uint8), ours.view(DTYPES["uint8"]))
    same(
        theirs.view(torch.uint8).view(torch.int64), ours.view(DTYPES["uint8"]).view(DTYPES["int64"])
    )
    for shape in ((5, -1), (7,)):
        with pytest.raises(RuntimeError):
            theirs.view(shape)
        with pytest.raises(RuntimeError):
            ours.view(shape)
    with pytest.raises(RuntimeError, match="use reshape"):
        ours.transpose(0, 1).view(-1)
    same(theirs.transpose(0, 1).reshape(-1), ours.transpose(0, 1).reshape(-1))
    assert ours.view(0, -1, 5).shape == (0, 0, 5) if ours.numel() == 0 else True
    empty = functions.empty(0, 6)
    assert empty.view(0, 2, 3).shape == (0, 2, 3) and empty.data_ptr() == 0


def test_indices_of_tensors_copy_and_assignments_convert() -> None:
    theirs = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    ours = host_of(theirs)
    rows = torch.tensor([2, 0])
    same(theirs[rows], ours[host_of(rows)])
    same(theirs[theirs > 5], ours[ours > 5])
    same(theirs[rows, rows], ours[host_of(rows), host_of(rows)])
    for x, index in ((theirs, rows), (ours, host_of(rows))):
        x[index] = 7
        x[0, 1] = -1.5
        x[:, 2] = x[:, 0] * 2
        x[x < 0] = 0.25
    same(theirs, ours)
    half, own = pair("bfloat16")
    half[1:3], own[1:3] = theirs[0, :2], ours[0, :2]
    half.fill_(0.1), own.fill_(0.1)
    same(half, own)
    half.zero_(), own.zero_()
    same(half, own)
    half.copy_(torch.full((8,), 3.3)), own.copy_(functions.full((8,), 3.3))
    same(half, own)


def test_functions_make_what_torch_makes() -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda t: t.zeros(2, 3),
        lambda t: t.zeros((2, 3)),
        lambda t: t.zeros(4, dtype=t.bfloat16),
        lambda t: t.ones(2, dtype=t.int8),
        lambda t: t.full((2,), 3),
        lambda t: t.full((2,), 3.5),
        lambda t: t.full((2,), True),
        lambda t: t.full((2, 2), 0.1, dtype=t.float16),
        lambda t: t.zeros_like(t.ones(3, dtype=t.int16)),
        lambda t: t.full_like(t.ones(3, dtype=t.bfloat16), 0.3),
        lambda t: t.tensor([1, 2]),
        lambda t: t.tensor([1.5, 2]),
        lambda t: t.tensor(True),
        lambda t: t.tensor(np.arange(3, dtype=np.int16)),
        lambda t: t.tensor([1, 2], dtype=t.bfloat16),
        lambda t: t.arange(5),
        lambda t: t.arange(2, 9, 3),
        lambda t: t.arange(0.0, 2, 0.5),
        lambda t: t.arange(4, dtype=t.float32),
        lambda t: t.cat([t.ones(2, 1), t.zeros(2, 3)], 1),
        lambda t: t.cat([t.ones(2, dtype=t.bfloat16), t.zeros(1, dtype=t.bfloat16)]),
        lambda t: t.cat([t.ones(2, dtype=t.int8), t.zeros(1)]),
        lambda t: t.stack([t.ones(2), t.zeros(2)], dim=1),
        lambda t: t.where(t.arange(4) > 1, t.arange(4), 0.5),
        lambda t: t.where(t.arange(4) > 1, t.ones(4), t.zeros(4)),
        lambda t: t.maximum(t.arange(4), t.full((4,), 2)),
        lambda t: t.copysign(t.ones(3), t.tensor([-1.0, 2.0, -0.0])),
        lambda t: t.isfinite(t.tensor([1.0, float("inf"), float("nan")])),
        lambda t: t.nn.functional.pad(t.ones(2, 3), (1, 2)),
        lambda t: t.nn.functional.pad(t.ones(2, 3, dtype=t.int8), (0, 0, 1, 0), value=5),
        lambda t: t.arange(6).reshape(2, 3).repeat_interleave(2, 1),
        lambda t: t.arange(6).reshape(2, 3).transpose(0, 1).contiguous(),
        lambda t: t.arange(6).clone(),
    ]

    class Ours:
        def __getattr__(self, name: str) -> Any:
            return DTYPES[name] if name in DTYPES else getattr(functions, name)

    ours: Any = Ours()
    ours.nn = type("nn", (), {"functional": type("f", (), {"pad": staticmethod(functions.pad)})})
    for call in calls:
        same(call(torch), call(ours))
    assert functions.equal(functions.ones(3), functions.full((3,), 1.0))
    assert not functions.equal(functions.ones(3), functions.ones(4))
    assert functions.empty(2, 3).shape == (2, 3) and functions.empty((2, 3)).shape == (2, 3)


def test_host_tensors_work_with_those_of_torch() -> None:
    """A program may import torch while an engine has host tensors."""
    theirs, ours = pair("float32")
    assert torch.equal(theirs + ours, theirs * 2) and torch.equal(ours + theirs, theirs * 2)
    assert torch.equal(torch.cat([theirs, ours]), torch.cat([theirs, theirs]))
    assert torch.equal(torch.softmax(ours, 0), torch.softmax(theirs, 0))
    assert torch.equal(ours.cumsum(0), theirs.cumsum(0))  # a method that only torch has
    into = torch.zeros(8)
    into.copy_(ours)
    into[2:4] = ours[2:4]
    assert torch.equal(into, theirs)
    ours += theirs
    assert torch.equal(ours.torch(), theirs * 2)
    ours[1:3] = theirs[1:3]
    ours.copy_(theirs)
    assert torch.equal(ours.torch(), theirs)
    assert ours.torch().data_ptr() == ours.data_ptr()
    assert ours.dtype == torch.float32 and DTYPES["float32"] == torch.float32
    assert torch.float32 == DTYPES["float32"] and torch.float16 != DTYPES["float32"]
    assert device_of() == torch.device("cpu") and torch.zeros(2, device=ours.device).sum() == 0
    for name in DTYPES:
        stored = functions.zeros(3, dtype=DTYPES[name])
        assert stored.torch().dtype == getattr(torch, name)
        stored.torch().view(torch.uint8).fill_(1)
        assert (stored.view(DTYPES["uint8"]) == 1).all()


def test_parts_of_files_that_cannot_be_written_are_given_to_torch_without_a_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    tensor = HostTensor(array[:, 1:])
    assert tensor.torch().tolist() == [[1, 2], [4, 5]]
    assert tensor.torch().data_ptr() == tensor.data_ptr()


def test_nothing_but_views_is_made_while_a_step_is_recorded() -> None:
    x = functions.zeros(4, 4)
    copies: list[Callable[[], Any]] = [
        lambda: x + 1,
        lambda: x.clone(),
        lambda: x.t().contiguous(),
        lambda: x.t().reshape(-1),
        lambda: x[x > 0],
        lambda: x.sum(),
        lambda: x.double(),
        lambda: x.tolist(),
        lambda: x.fill_(1),
        lambda: x.clamp(0),
        lambda: functions.zeros(1),
        lambda: functions.cat([x, x]),
        lambda: bool(x[0, 0]),
        lambda: operator.iadd(x, 1),
    ]
    with only_views():
        assert x.view(-1)[3:].view(13).shape == (13,)
        for copied in copies:
            with pytest.raises(CaptureError, match="cannot be recorded"):
                copied()
    assert (x + 1).sum().item() == 16


def test_copies_and_pickles_are_the_same_tensor() -> None:
    _, ours = pair("bfloat16", VALUES, (2, 4))
    for made in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours), copy.copy(ours)):
        assert made.host_dtype is ours.host_dtype and functions.equal(made, ours)
    assert repr(ours).startswith("HostTensor(array([[ -3.7") and "bfloat16" in repr(ours)
    with pytest.raises(TypeError, match="bfloat16"):
        ours.numpy()
    assert float(ours[0, 0]) == ours[0, 0].item() and int(ours[1, 3]) == 100
    assert ours.to("cpu") is ours and ours.to(torch.bfloat16) is ours
    assert ours.to("meta").shape == (2, 4) and ours.to("meta").array.strides == (0, 0)
