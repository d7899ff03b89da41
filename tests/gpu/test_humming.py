"""Products by ``humming-kernels``: the package has a stand-in with the same calls, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels import gpu
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import humming
from sdk.kernels.gpu.humming import HummingLinear, HummingWeight
from sdk.kernels.gpu.packing import Packed
from sdk.kernels.gpu.tuning import NOT_FASTER, Tuning
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.decode import decode
from sdk.kernels.weights.host_layers import HostLayers
from sdk.kernels.weights.layouts import Affine
from tests.gpu.humming_stand_in import Method, package

__all__ = ["package"]  # a fixture

N, K, GROUP = 64, 128, 32


def table(kind: str = "int4g32", start: int = 3) -> Tuning:
    return Tuning(programs=4, libraries={("humming", kind, N, K): start})


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    monkeypatch.setattr(gpu, "tuning_of", lambda device: table())
    opened = Ops("cpu", backends=("gpu", "reference"), activations="float16")
    yield opened
    opened.close()


def weight(bits: int = 4, group: int = GROUP, n: int = N, k: int = K) -> Affine:
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, generator=random)
    scale = (torch.rand(n, k // group, generator=random) + 0.5).half()
    return Affine((n, k), bits, group, codes, scale, zero=1 << bits - 1)


def rows(tokens: int, k: int = K) -> Tensor:
    return torch.randn(tokens, k, generator=torch.Generator().manual_seed(tokens)).half()


def away(found: Tensor, x: Tensor, layout: Affine) -> float:
    wanted = x.double() @ decode(layout).double().t()
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 64)])
def test_several_tokens_are_the_package_s_and_one_is_ours(
    package: Method, monkeypatch: pytest.MonkeyPatch, bits: int, group: int
) -> None:
    monkeypatch.setattr(gpu, "tuning_of", lambda device: table(f"int{bits}g{group}"))
    own = Ops("cpu", backends=("gpu", "reference"), activations="float16")
    layout = weight(bits, group)
    bound = own.linear(layout)
    assert bound.choice.name == "gpu.humming"
    assert bound.nbytes > 2 * layout.codes.nbytes
    assert torch.equal(bound.layout().codes, layout.codes)  # type: ignore[union-attr]
    assert torch.equal(bound.rows(torch.tensor([5, 0])), decode(layout)[[5, 0]])
    for tokens, library in ((1, []), (2, []), (3, [3]), (20, [20])):
        package.calls.clear()
        x, out = rows(tokens), torch.empty(tokens, N, dtype=torch.float16)
        assert away(bound.matmul(x, out), x, layout) < 4e-3
        assert package.calls == library
    own.close()


def test_one_token_is_ours_whatever_the_table_says(package: Method) -> None:
    kernel = HummingLinear(torch.float16, table(start=1))
    packed = kernel.pack(weight())
    package.calls.clear()
    kernel.matmul(packed, rows(1), torch.empty(1, N, dtype=torch.float16))
    assert package.calls == []


def test_float32_results_and_rows_apart_are_ours(package: Method, ops: Ops) -> None:
    """The package rounds results to 16 bits; what is added to the residual stream is float32."""
    bound = ops.linear(weight())
    package.calls.clear()
    x = rows(5)
    wide = torch.empty(5, 2 * N, dtype=torch.float16)
    assert away(bound.matmul(x), x, weight()) < 1e-3
    assert away(bound.matmul(x, wide[:, :N]), x, weight()) < 4e-3
    assert package.calls == []


def test_an_activation_follows_the_package_s_product(package: Method, ops: Ops) -> None:
    bound = ops.linear(weight())
    package.calls.clear()
    x, out = rows(5), torch.empty(5, N // 2, dtype=torch.float16)
    bound.matmul(x, out, "silu")
    assert package.calls == [5]
    gate, up = (x.float() @ decode(weight()).t()).chunk(2, dim=1)
    right = torch.nn.functional.silu(gate) * up
    assert float((out.float() - right).norm() / right.norm()) < 4e-3


CHANGED: dict[str, Any] = {
    "zero": lambda w: replace(w, zero=0),
    "zeros": lambda w: replace(w, zero=0, zeros=torch.full((N, K // GROUP // 2), 0x77).byte()),
    "minus": lambda w: replace(w, zero=0, minus=torch.rand(N, K // GROUP)),
    "scales": lambda w: replace(w, scale=torch.rand(N, K // GROUP)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_the_package_would_change_is_ours(package: Method, ops: Ops, name: str) -> None:
    layout = CHANGED[name](weight())
    bound = ops.linear(layout)
    assert not isinstance(bound.packed, HummingWeight)
    x = rows(9)
    out = bound.matmul(x, torch.empty(9, N, dtype=torch.float16))
    assert package.calls == [] and away(out, x, layout) < 4e-3


def test_of_an_offloaded_layer_only_our_weight_is_there(package: Method) -> None:
    kernel = HummingLinear(torch.float16, table())
    layers = HostLayers(0, torch.device("cpu"), copies=SimpleNamespace(event=lambda: None))  # type: ignore[arg-type]
    with layers.load(0):
        kept = layers.keep(kernel.pack(weight()))
    assert isinstance(kept, Packed) and kept.rewritten
    assert layers.nbytes >= weight().codes.nbytes
    package.calls.clear()
    x, out = rows(9), torch.empty(9, N, dtype=torch.float16)
    kernel.matmul(kept, x, out)
    assert package.calls == [] and away(out, x, weight()) < 4e-3


def test_experts_are_ours(package: Method, ops: Ops) -> None:
    layouts = [weight(), replace(weight(), codes=weight().codes.flip(0))]
    group = ops.moe.group([ops.linear(layout) for layout in layouts])
    assert group is not None
    package.calls.clear()
    routes = ops.moe.route(torch.randn(9, 2), 1)
    x = rows(9)
    found = group.matmul(x, routes, by_token=True)
    for expert, own, given in routes.parts(x, True):
        assert away(found[own], given, layouts[expert]) < 4e-3
    assert package.calls == []


def why(layout: Any, ops: Ops) -> str:
    return str(dict(ops.linear(layout).choice.declined)["gpu.humming"])


def test_what_it_does_not_take_is_said(
    package: Method, ops: Ops, cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why(weight(2), ops) == "2 affine: expected affine integers of (4, 8) bits"
    assert "q4_0 blocks: expected affine" in why(cases.blocks(N, 256, "q4_0"), ops)
    assert why(weight(n=72), ops) == "72 x 128: expected multiples of 64 x 32"
    assert why(weight(k=48, group=16), ops) == "64 x 48: expected multiples of 64 x 32"
    uneven = replace(weight(k=96, group=32), group=64, scale=torch.ones(N, 2).half())
    assert why(uneven, ops) == "groups of 64: expected whole ones in 96"
    assert why(weight(8), ops) == NOT_FASTER
    problem = ops.linear(weight()).problem
    fixed = HummingLinear(torch.float16, table(), fixed=True)
    assert fixed.reject(problem) == "the library's order of additions depends on the batch"
    kernel = HummingLinear(torch.float16, table())
    assert kernel.reject(replace(problem, super_group=256)) == "two levels of scales"
    assert "compute is exact" in str(kernel.reject(replace(problem, compute="exact")))
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.0")
        assert kernel.reject(problem) == "humming-kernels has none for AMD's cards"
    monkeypatch.setattr(humming, "installed", lambda: False)
    expected = 'humming-kernels is not installed: pip install "embedlm[humming]"'
    assert kernel.reject(problem) == expected


def test_a_package_that_is_wrong_is_replaced_and_named(package: Method, ops: Ops) -> None:
    package.factor = 1.1
    bound = ops.linear(weight())
    assert bound.choice.name == "gpu.linear"
    reason = dict(bound.choice.declined)["gpu.humming"]
    assert reason.startswith("failed its self-check: KernelError: humming-kernels: 0.1 of the norm")
    with pytest.raises(KernelError, match=r"0\.1 of the norm from float64"):
        HummingLinear(torch.float16, table()).pack(weight())


def test_a_package_with_other_calls_is_replaced_and_named(
    package: Method, ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Method, "transform_humming_layer")
    bound = ops.linear(weight())
    assert bound.choice.name == "gpu.linear"
    assert "AttributeError: " in dict(bound.choice.declined)["gpu.humming"]
