"""Prompts of experts in 16-bit floats by torch's ``grouped_mm``, which runs on a CPU too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sdk.kernels import gpu
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import grouped_mm
from sdk.kernels.gpu.grouped_mm import GroupedMM, StackedExperts, step_of, waits_for_host
from sdk.kernels.gpu.tuning import NOT_FASTER, Tuning
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.routes import Routes
from sdk.kernels.weights.host_layers import HostLayers
from sdk.kernels.weights.layouts import Dense
from sdk.quant.expert_weights import ExpertWeights
from sdk.quant.weight import DenseWeight

N, K, EXPERTS = 24, 32, 5
CPU = torch.device("cpu")


def table(dtype: str = "bfloat16", start: int = 3) -> Tuning:
    return Tuning(programs=4, libraries={("grouped_mm", dtype, N, K): start})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ends of the experts' rows of each product that the library got."""
    found: list[list[int]] = []
    real = functional.grouped_mm

    def grouped(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        assert b.stride(1) == 1 and b.shape[0] == offs.shape[0]
        found.append(offs.tolist())
        return real(a, b, offs=offs)

    monkeypatch.setattr(functional, "grouped_mm", grouped)
    return found


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """An engine's operators, with a table for bfloat16."""
    monkeypatch.setattr(gpu, "tuning_of", lambda device: table())
    monkeypatch.setattr("sdk.kernels.known_answers.check.machine", lambda device: {})
    opened = Ops("cpu", backends=("gpu", "reference"), activations="bfloat16")
    yield opened
    opened.close()


def weights(dtype: torch.dtype = torch.bfloat16, count: int = EXPERTS) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(N, K, generator=random).to(dtype) for _ in range(count)]


def routes_of(ops: Ops, tokens: int, k: int = 2) -> Routes:
    """Expert 1 has no row, the last one most."""
    random = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, EXPERTS, generator=random)
    logits[:, 1] -= 50.0
    logits[::2, -1] += 5.0
    return ops.moe.route(logits, k)


def away(found: Tensor, x: Tensor, given: list[Tensor], routes: Routes, by_token: bool) -> float:
    rows = x[routes.tokens.long()] if by_token else x
    every = torch.stack(given).double()[routes.owners.long()]
    wanted = torch.einsum("rk,rnk->rn", rows.double(), every)
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("by_token", [True, False])
def test_many_rows_are_the_librarys_and_few_ours(
    ops: Ops, calls: list[list[int]], by_token: bool
) -> None:
    given = weights()
    experts = ExpertWeights([DenseWeight(Dense(w.clone())) for w in given])
    experts.bind(ops)
    assert [part.bound.choice.name for part in experts.parts] == ["gpu.grouped_mm"] * EXPERTS  # type: ignore[union-attr]
    for tokens, library in ((1, False), (7, False), (8, True), (40, True)):
        calls.clear()
        routes = routes_of(ops, tokens)
        x = torch.randn(tokens if by_token else 2 * tokens, K).bfloat16()
        found = experts.matmul_routed(x, routes, by_token=by_token)
        assert found.dtype == torch.bfloat16
        assert away(found, x, given, routes, by_token) < 4e-3
        assert calls == ([routes.starts[1:].tolist()] if library else [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_are_gathered_some_at_a_time(
    ops: Ops, calls: list[list[int]], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(grouped_mm, "grouped_rows", lambda n, k: 16)
    kernel = GroupedMM(table(str(dtype).removeprefix("torch.")), CPU)
    given = weights(dtype)
    group = kernel.group([Dense(w.clone()) for w in given])
    routes = routes_of(ops, 21)
    x, out = torch.randn(21, K), torch.empty(42, N)
    kernel.matmul_routed(group, x, routes, True, out)
    assert away(out, x.to(dtype), given, routes, True) < 4e-3
    assert [ends[-1] for ends in calls] == [16, 16, 10]
    assert sum(ends[0] for ends in calls) == int(routes.starts[1])


def test_rows_on_other_ranks_are_ours(ops: Ops, calls: list[list[int]]) -> None:
    """There R rows are more than those of this rank's experts, and the others have no values."""
    kernel = GroupedMM(table(), CPU)
    group = kernel.group([Dense(w) for w in weights()])
    routes = replace(routes_of(ops, 40), experts=object())  # type: ignore[arg-type]
    kernel.matmul_routed(group, torch.randn(40, K), routes, True, torch.empty(80, N))
    assert calls == []


def test_float16_is_ours_while_the_process_lets_the_library_round_sums(
    ops: Ops, calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = GroupedMM(table("float16"), CPU)
    group = kernel.group([Dense(w) for w in weights(torch.float16)])
    monkeypatch.setattr(grouped_mm, "library_rounds", lambda dtype: dtype == torch.float16)
    kernel.matmul_routed(group, torch.randn(40, K), routes_of(ops, 40), True, torch.empty(80, N))
    assert calls == []


class NoCopies:
    """In place of the stream that copies weights of offloaded layers: nothing runs."""

    def event(self) -> None:
        return None


def test_weights_are_moved_into_one_memory_and_their_own_is_freed() -> None:
    given = weights()
    copies = [w.clone() for w in given]
    group = GroupedMM(table(), CPU).group([Dense(w) for w in given])
    assert isinstance(group, StackedExperts)
    assert torch.equal(group.values, torch.stack(copies))
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
    memory = {w.untyped_storage().data_ptr() for w in given}
    assert memory == {group.values.data_ptr()}
    assert step_of(given) == N * K  # as a second engine with the same weights does
    assert {w.untyped_storage().data_ptr() for w in given} == memory


def test_experts_that_move_after_they_were_grouped_are_found_where_they_are() -> None:
    """Offloaded layers grow their buffer while later layers are loaded, and weights with it."""
    layers = HostLayers(0, CPU, copies=NoCopies())
    kernel = GroupedMM(table(), CPU)
    given = [torch.randn(64, 64).bfloat16() for _ in range(EXPERTS)]
    with layers.load(0):
        packed = [layers.keep(Dense(w.clone())) for w in given]
        group = kernel.group(packed)
        before = packed[0].values.data_ptr()
        layers.keep(Dense(torch.zeros(512, 64).bfloat16()))
    assert isinstance(group, StackedExperts)
    assert packed[0].values.data_ptr() != before
    assert group.values.data_ptr() == packed[0].values.data_ptr()
    assert torch.equal(group.values, torch.stack(given))


def test_weights_that_lie_at_equal_distances_are_not_moved() -> None:
    memory = torch.randn(EXPERTS, N + 8, K).bfloat16()
    parts = [memory[e, :N] for e in range(EXPERTS)]
    group = GroupedMM(table(), CPU).group([Dense(part) for part in parts])
    assert isinstance(group, StackedExperts)
    assert group.values.data_ptr() == memory.data_ptr()
    assert torch.equal(group.values, memory[:, :N])


def other_memory() -> dict[str, list[Tensor]]:
    memory = torch.randn(6, N, K).bfloat16()
    return {
        "unequal": [memory[0], memory[1], memory[4]],
        "backwards": [memory[2], memory[1], memory[0]],
        "overlapping": [memory.view(-1, K)[i : i + N] for i in (0, 8, 16)],
        "parts of others": [memory[0], torch.randn(2, N, K).bfloat16()[1]],
        "transposed": [torch.randn(K, N).bfloat16().t() for _ in range(2)],
        "types": [memory[0].clone(), memory[1].half()],
        "shapes": [memory[0].clone(), torch.randn(N, 2 * K).bfloat16()],
    }


@pytest.mark.parametrize("name", other_memory())
def test_weights_elsewhere_stay_where_they_are(name: str) -> None:
    given = other_memory()[name]
    before = [w.data_ptr() for w in given]
    assert step_of(given) is None
    assert [w.data_ptr() for w in given] == before


def test_an_exchanged_expert_has_memory_of_its_own_and_all_are_ours(
    ops: Ops, calls: list[list[int]]
) -> None:
    given = weights()
    experts = ExpertWeights([DenseWeight(Dense(w.clone())) for w in given])
    experts.bind(ops)
    other = DenseWeight(Dense(given[0] * 2))
    other.bind(ops)
    experts.replace(3, other)
    given[3] = given[0] * 2
    calls.clear()
    routes, x = routes_of(ops, 40), torch.randn(40, K).bfloat16()
    found = experts.matmul_routed(x, routes, by_token=True)
    assert away(found, x, given, routes, True) < 4e-3
    assert calls == []


def why(ops: Ops, values: Tensor) -> str | None:
    return dict(ops.linear(Dense(values)).choice.declined).get("gpu.grouped_mm")


def test_what_it_does_not_take_is_said(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why(ops, torch.randn(N, K)) == "float32 dense: expected dense bfloat16, float16"
    assert why(ops, torch.randn(20, K).half()) == "20 x 32: expected multiples of 8"
    assert why(ops, torch.randn(N, 2 * K).bfloat16()) == NOT_FASTER
    problem = ops.linear(Dense(weights()[0])).problem
    assert GroupedMM(table(), CPU).reject(problem) is None
    fixed = GroupedMM(table(), CPU, fixed=True)
    assert fixed.reject(problem) == "the library's order of additions depends on the batch"
    exact = replace(problem, compute="exact")
    assert "rounds activations to bfloat16" in str(GroupedMM(table(), CPU).reject(exact))
    monkeypatch.delattr(functional, "grouped_mm")
    assert why(ops, weights()[0]) == f"torch {torch.__version__} has no grouped_mm"


@pytest.mark.parametrize(
    ("capability", "dtype", "waits"),
    [
        ((9, 0), "bfloat16", False),
        ((10, 0), "bfloat16", False),
        ((9, 0), "float16", True),
        ((8, 0), "bfloat16", True),
        ((12, 0), "bfloat16", True),
    ],
)
def test_a_product_that_waits_for_the_host_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str, waits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = waits_for_host(torch.device("cuda"), dtype)
    assert (found is not None) == waits
    if found is not None:
        assert found.startswith(f"{dtype} on compute capability {capability[0]}.{capability[1]}: ")
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD" in str(waits_for_host(torch.device("cuda"), dtype))


@pytest.mark.parametrize("wrong", ["values", "raises"])
def test_a_library_that_is_wrong_is_replaced_and_named(
    ops: Ops, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    real = functional.grouped_mm

    def broken(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        if wrong == "raises":
            raise RuntimeError("no such kernel")
        result = real(a, b, offs=offs)
        result[-1] = 0
        return result

    monkeypatch.setattr(functional, "grouped_mm", broken)
    bound = ops.linear(Dense(weights()[0]))
    assert bound.choice.name == "gpu.dense"
    expected = "RuntimeError: no such" if wrong == "raises" else "KernelError: grouped_mm: 0.0"
    assert str(dict(bound.choice.declined)["gpu.grouped_mm"]).startswith(
        f"failed its self-check: {expected}"
    )


def test_the_check_itself_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        functional, "grouped_mm", lambda a, b, offs: a.new_zeros(a.shape[0], b.shape[2])
    )
    with pytest.raises(KernelError, match="grouped_mm: 1 of the norm from float64"):
        grouped_mm.check(weights()[0])


def test_experts_of_a_checked_engine_are_the_librarys(ops: Ops, calls: list[list[int]]) -> None:
    """The known answers of experts have 37 tokens, and of few experts so many that these rows are
    the library's."""
    ops.check_answers(None)
    experts = ExpertWeights([DenseWeight(Dense(w)) for w in weights()])
    experts.bind(ops)
    assert isinstance(experts._grouped.packed, StackedExperts)  # type: ignore[union-attr]
    assert any(ends[-1] > 500 for ends in calls)
