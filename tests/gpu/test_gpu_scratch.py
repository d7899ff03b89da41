"""What kernels ask for beside inputs and results, against what a plan counts for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdk.kernels.gpu import attention, attention_work, dense, scratch
from sdk.kernels.gpu.attention import Attention
from sdk.kernels.gpu.cudnn_attention import CudnnAttention
from sdk.kernels.gpu.dense import DenseLinear
from sdk.kernels.gpu.grouped_mm import GroupedMM
from sdk.kernels.gpu.linear import TritonLinear, add_chunks, product
from sdk.kernels.gpu.linear_as_file import TritonLinearAsFile
from sdk.kernels.gpu.packing import pack
from sdk.kernels.gpu.sampling import Sample
from sdk.kernels.gpu.scratch import CardScratch
from sdk.kernels.gpu.shares import Sharing
from sdk.kernels.gpu.tuning import Tiles, Tuning
from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import join_draws, pack_draw
from sdk.kernels.packed_shapes import PackedShapes, packed_bytes
from sdk.kernels.scratch import Matrix, Products
from sdk.kernels.weights.layouts import ActivationScheme, Dense
from tests.gpu.cudnn_stand_in import StandIn, library

__all__ = ["library"]  # a fixture

FEW = Tuning(programs=4, dense_from=16, experts_dense_from=16)
N, K = 32, 128


class Asked(TorchDispatchMode):
    """Bytes of the tensors made inside, at most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.set_:  # the interpreter's own
            return result
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor):
                storage = made.untyped_storage()
                at = storage.data_ptr()
                if at and at not in given and at not in self._known and "out" not in (kwargs or {}):
                    gc.collect()  # the interpreter's launches hold each other
                    self._known.add(at)
                    self.alive += storage.nbytes()
                    self.most = max(self.most, self.alive)
                    weakref.finalize(storage, self._gone, at, storage.nbytes())
        return result

    def _gone(self, at: int, nbytes: int) -> None:
        self._known.discard(at)
        self.alive -= nbytes


def asked(run: Callable[[], object]) -> int:
    gc.freeze()  # or each collection looks through all of torch
    try:
        with Asked() as seen:
            run()
    finally:
        gc.unfreeze()
    return seen.most


def of(
    matrix: Matrix, *, tuned: bool = False, wide_sums: bool = False, **options: Any
) -> CardScratch:
    """Of a model with one matrix."""
    given: dict[str, Any] = {
        "matrices": (matrix,),
        "head": replace(matrix, n=1, experts=0, plain=False, packed=False),
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 64,
        "copied": 0,
        "rounds": False,
        "exact": False,
        "fixed": False,
    }
    return CardScratch(
        Products(**given | options),
        programs=FEW.programs,
        dense_from=FEW.dense_from,
        experts_dense_from=FEW.experts_dense_from,
        tuned=tuned,
        library=0,
        wide_sums=wide_sums,
    )


PACKED = Matrix(N, K, plain=False, packed=True)
PLAIN = Matrix(N, K, plain=True, packed=False)
SHARED = {("linear", "int4g32m", N, K): [(99, Tiles(16, 16, 4, 1, 2))]}


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger is decoded, multiplied or rounded in turns."""
    monkeypatch.setattr(scratch, "SCRATCH", 1 << 12)
    monkeypatch.setattr(scratch, "EXPERTS_SCRATCH", 1 << 14)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize(
    ("exact", "fixed", "tuned"),
    [(False, False, False), (False, False, True), (True, False, False), (False, True, True)],
)
def test_a_packed_weight_s_products_ask_for_no_more_than_is_planned(
    cases: Any, tokens: int, exact: bool, fixed: bool, tuned: bool
) -> None:
    layout = cases.affine(N, K, 4, 32, "minus")
    tuning = replace(FEW, table=SHARED if tuned else None)
    linear = TritonLinear(torch.float32 if exact else torch.float16, tuning, fixed=fixed)
    packed, x, out = linear.pack(layout), cases.activations(tokens, K), torch.empty(tokens, N)
    wanted = x.double() @ linear_weight(linear, packed).t()
    found = asked(lambda: linear.matmul(packed, x, out))
    planned = of(PACKED, copied=2, exact=exact, fixed=fixed, tuned=tuned).nbytes(tokens, 1, 0)
    assert found <= planned
    assert found or tokens == 1
    assert (out - wanted).norm() <= 2e-3 * wanted.norm()


def linear_weight(linear: TritonLinear, packed: Any) -> Tensor:
    rows = torch.empty(N, K)
    linear.rows(packed, torch.arange(N), rows)
    return rows.double()


@pytest.mark.slow
def test_a_fixed_order_shares_k_for_some_rows_at_a_time(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k, parts = 16, 512, 16 * 4 * 16 * 4  # of 16 rows and 4 shares
    table = {("linear", "int4g32m", n, k): [(99, Tiles(16, 16, 4, 1, 2))]}
    linear = TritonLinear(torch.float16, replace(FEW, table=table), fixed=True)
    packed = linear.pack(cases.affine(n, k, 4, 32, "minus"))
    x, out, alone = cases.activations(40, k), torch.empty(40, n), torch.empty(40, n)
    assert asked(lambda: linear.matmul(packed, x, alone)) > 2.5 * parts
    monkeypatch.setattr(scratch, "SCRATCH", parts)
    assert parts < asked(lambda: linear.matmul(packed, x, out)) < 2 * parts
    assert torch.equal(out, alone)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("tokens", [2, 20])
@pytest.mark.parametrize("short", [False, True])
def test_a_plain_weight_s_products_ask_for_no_more_than_is_planned(
    cases: Any, tokens: int, short: bool
) -> None:
    linear, x = DenseLinear(), cases.activations(tokens, K)
    packed = linear.pack(cases.dense(N, K, torch.float16))
    x, out = x.half() if short else x, torch.empty(tokens, N)
    wanted = x.half().double() @ packed.values.double().t()
    dense.wide_sums(x.device, torch.float16)  # asks the library once
    found = asked(lambda: linear.matmul(packed, x, out))
    planned = of(PLAIN, copied=0 if short else 2).nbytes(tokens, 1, 0)
    assert 0 < found <= planned
    assert (out - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.fixture
def wide_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that writes float32 results of 16-bit products, as on NVIDIA's cards."""

    def mm(x: Tensor, w: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        for row in range(len(x)):  # a row's copies at a time
            torch.mv(w.t().float(), x[row].float(), out=out[row])
        return out

    monkeypatch.setattr(dense, "wide_sums", lambda device, dtype: True)
    monkeypatch.setattr(dense.torch, "mm", mm)


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("wide_library")
@pytest.mark.parametrize("short", [False, True])
def test_where_the_library_writes_float32_only_a_copy_of_the_inputs_is_planned(
    cases: Any, short: bool
) -> None:
    linear, x = DenseLinear(), cases.activations(20, K)
    packed = linear.pack(cases.dense(N, K, torch.float16))
    x, out = x.half() if short else x, torch.empty(20, N)
    wanted = x.half().double() @ packed.values.double().t()
    with Asked() as seen:
        linear.matmul(packed, x, out)
    own = 4 * (N * K + K)  # of the stand-in for the library
    planned = of(PLAIN, copied=0 if short else 2, wide_sums=True).nbytes(20, 1, 0)
    assert planned < (0 if short else 2 * 20 * K) + 4 * 20 * N
    assert seen.most <= planned + own
    assert (out - wanted).norm() <= 2e-3 * wanted.norm()


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("fixed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["packed", "codes", "rounded"])
def test_experts_products_ask_for_no_more_than_is_planned(
    cases: Any, tokens: int, fixed: bool, name: str
) -> None:
    count, used = 4, 2
    matrix = replace(PACKED, experts=count, per_token=used)
    scheme = ActivationScheme("e4m3", group=32 if name == "rounded" else 0)
    if name == "packed":
        layouts = [cases.affine(N, K, 4, 32, "minus", seed=seed) for seed in range(count)]
        linear: TritonLinear = TritonLinear(torch.float16, FEW, fixed=fixed)
    else:
        layouts = [
            replace(cases.float8(N, K, (1, K), seed=seed), inputs=scheme) for seed in range(count)
        ]
        linear = TritonLinearAsFile(FEW, ("int", "e4m3"), fixed=fixed)
    ops = Ops("cpu", backends=("reference",))
    routes = ops.moe.route(torch.randn(tokens, count), used)
    ops.close()
    group = linear.group([linear.pack(layout) for layout in layouts])
    assert group is not None
    x, out = cases.activations(tokens, K), torch.empty(tokens * used, N)
    found = asked(lambda: linear.matmul_routed(group, x, routes, True, out))
    plan = of(matrix, copied=2, fixed=fixed, rounds=name != "packed")
    assert found <= plan.nbytes(tokens, 1, 0)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("group", [0, 32])
def test_rounded_inputs_take_no_more_than_is_planned(cases: Any, group: int) -> None:
    scheme = ActivationScheme("e4m3", group=group)
    layout = replace(cases.float8(N, K, (1, K)), inputs=scheme)
    linear = TritonLinearAsFile(FEW, ("e4m3",))
    packed, x = linear.pack(layout), cases.activations(40, K)
    out, whole = torch.empty(40, N), torch.empty(40, N)
    found = asked(lambda: linear.matmul(packed, x, out))
    assert 0 < found <= of(PACKED, rounds=True).nbytes(40, 1, 0)
    for row in range(0, 40, 13):  # rows do not depend on those they are rounded with
        linear.matmul(packed, x[row : row + 1], whole[row : row + 1])
        assert (out[row] - whole[row]).norm() <= 1e-5 * whole[row].norm()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("length", [200, 600])
def test_attention_asks_for_no_more_parts_than_are_planned(
    length: int, queries: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KV_TYPES["float32"]
    pages = KVPages(torch.randn(60, 1, 16, 64), torch.randn(60, 1, 16, 64), kind, kind)
    table = torch.arange(57, dtype=torch.int32).repeat(3, 1)
    starts = torch.tensor([0, queries, queries + 1, queries + 2], dtype=torch.int32)
    lengths = torch.tensor([length, 70, 100], dtype=torch.int32)
    tokens = queries + 2
    places = torch.zeros(tokens, dtype=torch.int64)
    prefix = torch.tensor([64], dtype=torch.int32) if shared else None
    batch = AttentionBatch(
        places, starts, lengths, table, places, 16, queries, length, shared_len=prefix
    )
    q, out = torch.randn(tokens, 4, 64), torch.empty(tokens, 256)

    def run() -> None:
        Attention(True).run(q, pages, batch, 0.125, None, None, None, None, out)

    plan = of(PACKED, exact=True)
    assert 0 < asked(run) <= plan.nbytes(tokens, 3, length)
    if queries > 1 and (shared or length == 600):
        monkeypatch.setattr(scratch, "SCRATCH", 4096)  # one request with several queries at a time
        assert 4096 < asked(run) <= plan.nbytes(tokens, 3, length)


@pytest.mark.parametrize(
    ("queries", "context"), [pytest.param(700, 700, marks=pytest.mark.slow), (600, 1600)]
)
def test_a_library_s_attention_asks_for_no_more_than_is_planned(
    library: StandIn, queries: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "EXPERTS_SCRATCH", 1 << 17)
    libraries = {("cudnn_attention", "bfloat16", 16): 1}
    kind, count = KV_TYPES["bfloat16"], -(-context // 16)
    pages = KVPages(*(torch.randn(count, 2, 16, 16).bfloat16() for _ in range(2)), kind, kind)
    batch = AttentionBatch(
        *(torch.zeros(queries, dtype=torch.int64), torch.tensor([0, queries], dtype=torch.int32)),
        *(torch.tensor([context], dtype=torch.int32), torch.arange(count).int()[None]),
        *(torch.zeros(queries, dtype=torch.int64), 16, queries, context),
        lengths=((queries, context),),
    )
    q, out = torch.randn(queries, 4, 16), torch.empty(queries, 64)
    kernel = CudnnAttention(replace(FEW, libraries=libraries))
    found = asked(lambda: kernel.run(q, pages, batch, 0.25, None, None, None, None, out))
    assert len(library.calls) > 1
    plan = of(PACKED, head_dim=16)
    with_library = replace(plan, libraries=libraries).nbytes(queries, 1, context)
    assert plan.nbytes(queries, 1, context) < found <= with_library


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("by_token", [True, False])
def test_grouped_products_ask_for_no_more_than_is_planned(by_token: bool) -> None:
    libraries = {("grouped_mm", "bfloat16", N, K): 1}
    tokens, experts, used = 70, 4, 2
    matrix = replace(PLAIN, experts=experts, per_token=used)
    ops = Ops("cpu", backends=["gpu"])
    routes = ops.moe.route(torch.randn(tokens, experts), used)
    ops.close()
    kernel = GroupedMM(replace(FEW, libraries=libraries), torch.device("cpu"))
    weights = [Dense(torch.randn(N, K).bfloat16()) for _ in range(experts)]
    assert 0 < asked(lambda: kernel.group(weights)) <= 2 * experts * N * K
    group = kernel.group(weights)
    rows = tokens * used
    x, out = torch.randn(tokens if by_token else rows, K), torch.empty(rows, N)
    found = asked(lambda: kernel.matmul_routed(group, x, routes, by_token, out))
    exact = of(matrix, copied=2, wide_sums=True)
    planned = replace(exact, libraries=libraries).nbytes(tokens, 1, 0)
    assert exact.nbytes(tokens, 1, 0) < found <= planned


def test_experts_that_are_moved_into_one_memory_are_planned_while_weights_load() -> None:
    libraries = {("grouped_mm", "bfloat16", 1536, 2048): 1}
    matrix = Matrix(3072, 2048, plain=True, packed=False, experts=128)  # of two ranks

    def kept(matrix: Matrix, **options: Any) -> int:
        return replace(of(matrix, **options), libraries=libraries).kept(1)

    assert kept(matrix) == 2 * 128 * 3072 * 2048
    for other in (replace(matrix, n=3000), replace(matrix, plain=False, packed=True)):
        assert kept(other) == of(other).kept(1)
    assert kept(matrix, fixed=True) == kept(matrix, exact=True) == of(matrix).kept(1)


def test_weights_that_a_library_has_in_its_own_layout_are_planned() -> None:
    libraries = {("humming", "int4g128", 4096, 4096): 2, ("humming", "int8g64", 4096, 4096): 2}
    matrix = Matrix(8192, 4096, plain=False, packed=True)  # of two ranks

    def more(**options: Any) -> int:
        plan = of(options.pop("matrix", matrix), layers=3, **options)
        return replace(plan, libraries=libraries).kept(1) - plan.kept(1)

    assert more() == 3 * 8192 * 4096 * 9 // 8 > 0
    for other in ({"n": 8190}, {"experts": 8}, {"packed": False, "plain": True}):
        assert more(matrix=replace(matrix, **other)) == 0  # type: ignore[arg-type]
    assert more(blocks=True) == more(exact=True) == more(fixed=True) == 0


@pytest.mark.parametrize(("programs", "parts"), [(4, 32), (528, 128)])
def test_the_parts_of_few_key_heads_are_planned_for_the_card(
    programs: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a captured step, in which any request may be as long as the longest."""
    for module in (attention, attention_work):
        monkeypatch.setattr(module, "run_kernel", lambda *given, **constants: None)
    kind, longest = KV_TYPES["float32"], 1 << 15
    pages = KVPages(torch.zeros(2, 1, 16, 64), torch.zeros(2, 1, 16, 64), kind, kind)
    places, lengths = torch.zeros(3, dtype=torch.int64), torch.full((3,), 40, dtype=torch.int32)
    table, starts = torch.zeros(3, 3, dtype=torch.int32), torch.arange(4, dtype=torch.int32)
    batch = AttentionBatch(places, starts, lengths, table, places, 16, 1, longest)
    q, out = torch.zeros(3, 4, 64), torch.zeros(3, 256)
    kernels = Attention(True, programs=programs)
    found = asked(lambda: kernels.run(q, pages, batch, 0.125, None, None, None, None, out))
    planned = replace(of(PACKED, exact=True), programs=programs).nbytes(3, 3, longest)
    assert found == planned == 4 * (3 * 4 * parts * (64 + 2) + 4 * (parts + 1))


def test_more_queries_may_ask_for_more_scratch_up_to_a_limit() -> None:
    plan = of(PACKED, exact=True, heads=32, head_dim=128)
    one, several, many = (plan.nbytes(n, 64, 1 << 17) for n in (64, 65, 4096))
    assert one < several == many <= scratch.SCRATCH + (1 << 20)


@pytest.mark.parametrize("width", [100, 9000])
def test_the_sampler_asks_for_what_is_planned_beside_the_shapes(width: int) -> None:
    shapes = PackedShapes(torch.device("cpu"), 2, width, (2, 2, 2, 2))
    draws = torch.from_numpy(join_draws([pack_draw(top_p=0.9)] * 2, [0.5] * 2).view("f8"))
    logits = torch.randn(2, width)
    found = asked(lambda: Sample().rows(logits, draws.view(2, 8), shapes))
    planned = of(replace(PACKED, n=width), head=replace(PACKED, n=width)).kept(2)
    assert found == planned - packed_bytes(2, width) - 4 * scratch.COUNTERS


def test_grids_hold_more_rows_than_65535(cases: Any) -> None:
    """What a card takes: 2^31 - 1 programs in the first dimension, 65,535 in the others."""
    rows = torch.empty(1, K).expand(70_000, K)
    chunks = add_chunks(rows, torch.empty(K // 16, 1).expand(K // 16, 70_000), 16, torch.float16)
    assert chunks.grid[0] == 70_000
    assert max(chunks.grid[1:]) <= 65_535
    packed = pack(cases.affine(N, K, 4, 32, "zeros"))
    out = torch.empty(1, N).expand(16 * 70_000, N)
    tiles = Tiles(64, 16, 1, 4, 3)
    many = torch.empty(1, K).expand(16 * 70_000, K)
    launch = product(packed, many, None, out, Sharing(), tiles, torch.float16)
    assert launch.grid == (70_000, 1, 1)
