"""What only a card can break: races, addresses beyond 32 bits, streams, instructions fused by a
compiler. Triton's interpreter runs one program after the other, on small tensors.

A race shows as bits that change from run to run, so many tests compare runs with each other.
Under the interpreter sizes are small: it shows that a test itself is right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdk import LLM, SamplingParams
from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.gpu.attention import Attention
from sdk.kernels.gpu.rope import RopeAndCache
from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.low_rank import Shape, factor_memory
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import DRAW, SampleBuffers
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.reference.rope import RopeAndCache as ReferenceRope
from sdk.kernels.reference.sampling import Sample as ReferenceSample
from sdk.kernels.weights.layouts import ActivationScheme, Layout
from sdk.quant.spec import KVSpec
from tests.shaping import expected, logits_for, shapes_of, some_mask

pytestmark = pytest.mark.gpu

Size = Callable[[int, int], int]
PAGE, HEAD_DIM, SCALE = 16, 128, 0.1
#: More keys than that times a page's numbers have addresses above 32 bits.
FAR = 2**31


@pytest.fixture
def ops(device: str) -> Any:
    opened = Ops(device, num_threads=1, backends=("gpu", "reference"))
    yield opened
    opened.close()


# Attention


def make_batch(
    device: str, requests: list[tuple[int, int]], tables: list[Tensor], shared: int = 0
) -> AttentionBatch:
    """Requests of (context, new tokens) in these pages."""
    starts = np.cumsum([0, *(new for _, new in requests)])
    positions = [torch.arange(context - new, context) for context, new in requests]
    slots = [
        table.long()[at // PAGE] * PAGE + at % PAGE
        for table, at in zip(tables, positions, strict=True)
    ]
    int32: Any = {"dtype": torch.int32, "device": device}
    return AttentionBatch(
        positions=torch.cat(positions).to(device),
        query_start=torch.tensor(starts.tolist(), **int32),
        context_len=torch.tensor([context for context, _ in requests], **int32),
        page_table=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).int().to(device),
        slots=torch.cat(slots).to(device),
        page_size=PAGE,
        max_query_len=max(new for _, new in requests),
        max_context_len=max(context for context, _ in requests),
        shared_len=torch.tensor([shared], **int32) if shared else None,
    )


def make_pages(device: str, pages: int, kv_heads: int, used: Tensor) -> KVPages:
    """Keys and values in float16, of which only the ``used`` pages are written."""
    random = torch.Generator(device).manual_seed(kv_heads)
    sides = [
        torch.empty(pages, kv_heads, PAGE, HEAD_DIM, dtype=torch.float16, device=device)
        for _ in range(2)
    ]
    ids = used.long().to(device)
    for part in ids.split(1024):
        for side in sides:
            shape = (len(part), *side.shape[1:])
            side[part] = torch.randn(shape, generator=random, device=device).half()
    return KVPages(sides[0], sides[1], KV_TYPES["float16"], KV_TYPES["float16"])


#: Of an H100: one key head has up to 128 splits of a request.
PROGRAMS = 528


def queries(device: str, batch: AttentionBatch, heads: int) -> Tensor:
    random = torch.Generator(device).manual_seed(7)
    shape = (batch.num_tokens, heads, HEAD_DIM)
    return torch.randn(shape, generator=random, device=device)


def attend(q: Tensor, pages: KVPages, batch: AttentionBatch, out: Tensor | None = None) -> Tensor:
    """``[T, heads, head_dim]``."""
    if out is None:
        out = torch.full((len(q), q[0].numel()), torch.nan, device=q.device)
    Attention(False, programs=PROGRAMS).run(q, pages, batch, SCALE, None, None, None, None, out)
    return out.view(q.shape)


def definition(
    q: Tensor, pages: KVPages, batch: AttentionBatch, request: int, head: int
) -> tuple[Tensor, Tensor]:
    """The rows of a request, and the softmax in float64 of one key head's queries over them."""
    start, end = batch.query_start[request : request + 2].tolist()
    length = int(batch.context_len[request])
    table = batch.page_table[request, : -(-length // PAGE)].long()
    k, v = (x[table, head].flatten(0, 1)[:length].double() for x in (pages.k, pages.v))
    group = q.shape[1] // pages.k.shape[1]
    own = q[start:end, head * group : (head + 1) * group].double()
    scores = torch.einsum("thd,kd->htk", own, k) * SCALE
    last = torch.arange(length - (end - start), length, device=q.device)
    hidden = torch.arange(length, device=q.device)[None] > last[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(2)
    rows = torch.arange(start, end, device=q.device)
    return rows, torch.einsum("htk,kd->thd", weights, v)


def expect_definition(
    found: Tensor, q: Tensor, pages: KVPages, batch: AttentionBatch, heads: list[int]
) -> None:
    """Of these key heads; 16-bit weights of values of about 3 leave 5e-3 (test_card_kernels.py)."""
    group = q.shape[1] // pages.k.shape[1]
    for request in range(batch.num_requests):
        for head in heads:
            rows, wanted = definition(q, pages, batch, request, head)
            own = found[rows, head * group : (head + 1) * group].double()
            torch.testing.assert_close(own, wanted, rtol=0, atol=5e-3)


def scattered(count: int, first: int = 0) -> Tensor:
    """This many pages from ``first`` on, in random order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return (order + first).int()


# Counters: the last program to arrive adds up what the others wrote


#: Of packed weights, and of bytes with activations that are rounded to bytes.
SHARED_SUMS: dict[str, Callable[[Any, int, int], Layout]] = {
    "int4": lambda c, n, k: c.affine(n, k, 4, 128, "zeros"),
    "int8-as-file": lambda c, n, k: replace(
        c.affine(n, k, 8, k, "zero", signed=True), inputs=ActivationScheme("int")
    ),
    "fp8-as-file": lambda c, n, k: replace(c.float8(n, k, (1, k)), inputs=ActivationScheme("e4m3")),
}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("int4", 1), ("int4", 8), ("int4", 64), ("int8-as-file", 16), ("fp8-as-file", 16)],
)
def test_shared_sums_have_the_same_bits_each_time(
    cases: Any, ops: Ops, device: str, size: Size, name: str, tokens: int
) -> None:
    """A program that reads parts too early, or a counter that is not reset, changes bits in some
    runs. 256 rows leave K shared among 16 programs, and runs follow each other without a gap."""
    times, k = size(300, 4), size(8192, 512 if name == "int4" else 1024)
    layout = SHARED_SUMS[name](cases, size(256, 32), k)
    bound = ops.linear(layout)
    assert bound.choice.name.startswith("gpu."), bound.choice
    x = cases.activations(size(tokens, min(tokens, 3)), k)
    given = x.to(device)
    found = torch.stack([bound.matmul(given) for _ in range(times)]).cpu()
    assert bool((found == found[0]).all())
    seen = x if layout.inputs is None else fake_quantize(x, layout.inputs)
    wanted = seen.double() @ decode(layout).double().t()
    assert (found[0].double() - wanted).norm() < 6e-3 * wanted.norm()


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_split_keys_have_the_same_bits_each_time(device: str, size: Size, kv_heads: int) -> None:
    """As above, for the parts of 32 and more splits of keys, of several requests at once. With one
    key head all parts of a request are loaded at once, with 4 one by one."""
    times = size(300, 3)
    lengths = [size(n, small) for n, small in ((8192, 300), (9000, 5), (12000, 520))]
    tables = [-(-n // PAGE) for n in lengths]
    order = scattered(sum(tables))
    batch = make_batch(device, [(n, 1) for n in lengths], list(order.split(tables)))
    pages = make_pages(device, len(order), kv_heads, order)
    q = queries(device, batch, 4 * kv_heads)
    out = torch.full((times, len(q), q[0].numel()), torch.nan, device=device)
    for number in range(times):
        attend(q, pages, batch, out[number])
    assert bool((out == out[0]).all())
    expect_definition(out[0].view(q.shape), q, pages, batch, [0, kv_heads - 1])


# Addresses and lengths


def test_pages_beyond_two_to_the_31_are_written_and_read(device: str, size: Size) -> None:
    """An index of 32 bits wraps around there, and finds other pages of the same pool. The kernel
    that writes keys and values has its own arithmetic of addresses."""
    kv_heads = 8
    count = size(FAR // (kv_heads * PAGE * HEAD_DIM) + 4096, 128)
    needed = 2 * 2 * count * kv_heads * PAGE * HEAD_DIM + (1 << 30)
    if device == "cuda" and torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"a pool of 2^31 keys needs {needed >> 20} MiB of free memory on the card")
    lengths = [size(600, 300), size(420, 330)]
    tables = [-(-n // PAGE) for n in lengths]
    used = scattered(sum(tables), count - sum(tables))
    ids = list(used.split(tables))
    pages = make_pages(device, count, kv_heads, used)
    for new in (1, 20):  # of decode and of prompts
        batch = make_batch(device, [(n, new) for n in lengths], ids)
        q, k, v = queries(device, batch, 16 + 2 * kv_heads).split([16, kv_heads, kv_heads], dim=1)
        still = torch.ones(len(q), HEAD_DIM // 2, device=device)
        RopeAndCache().run(q, k, v, still, still * 0, batch, pages)
        places = batch.slots // PAGE, batch.slots % PAGE
        for side, given in ((pages.k, k), (pages.v, v)):
            assert torch.equal(side[places[0], :, places[1]], given.half())
        q = q.contiguous()
        expect_definition(attend(q, pages, batch), q, pages, batch, [0, kv_heads - 1])


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_contexts_of_131072_keys(device: str, size: Size, kv_heads: int) -> None:
    """Sums over 64 tiles of keys for each of 32 splits, or 16 for each of 128, and a chunk of a
    prompt behind them: time and memory keep the interpreter from lengths at which a running maximum
    or sum wears out."""
    length = size(131072, 600)
    order = scattered(2 * -(-length // PAGE))
    tables = list(order.split(len(order) // 2))
    pages = make_pages(device, len(order), kv_heads, order)
    for requests in ([(length, 1), (length - 3, 1)], [(length, 33), (length - 5, 3)]):
        batch = make_batch(device, requests, tables)
        q = queries(device, batch, 4 * kv_heads)
        expect_definition(attend(q, pages, batch), q, pages, batch, [0, kv_heads - 1][:kv_heads])


def test_drafts_over_a_shared_prefix_have_the_same_bits_each_time(device: str, size: Size) -> None:
    """Eight queries of a request and a prefix that is read once for all: two kinds of parts share
    one counter for each row."""
    times, prefix = size(300, 2), size(4096, 528)
    requests = [(prefix + 40, 8), (prefix + 33, 1), (prefix + 70, 8), (prefix + 17, 3)]
    order, common = scattered(prefix // PAGE + 4 * 5), prefix // PAGE
    tables = [
        torch.cat([order[:common], order[common + 5 * i : common + 5 * (i + 1)]]) for i in range(4)
    ]
    batch = make_batch(device, requests, tables, prefix)
    pages = make_pages(device, len(order), 2, order)
    q = queries(device, batch, size(16, 4))
    out = torch.full((times, len(q), q[0].numel()), torch.nan, device=device)
    for number in range(times):
        attend(q, pages, batch, out[number])
    assert bool((out == out[0]).all())
    expect_definition(out[0].view(q.shape), q, pages, batch, [0, 1])


# Adapters and experts


@pytest.mark.parametrize("rank", [8, 64])
def test_rows_of_many_adapters_get_their_own_updates(
    cases: Any, ops: Ops, device: str, size: Size, rank: int
) -> None:
    """Factors are found through addresses in device memory, which the interpreter takes for those
    of the host, and matrix instructions sum tiles of 16 ranks."""
    k, n = size(2048, 100), size(3072, 83)
    shape = Shape(6, k, n, 3, 64)
    table = ops.adapter_table(shape)
    parts = [cases.low_rank_parts(shape, (rank, 8, rank), seed) for seed in range(5)]
    for slot, own in enumerate(parts):
        own = parts[slot] = [f._replace(a=f.a.to(table.dtype), b=f.b.to(table.dtype)) for f in own]
        memory = factor_memory(table.nbytes(own, bias=False), torch.device(device))
        table.write(slot, table.pack(own, None, memory))
    slots = torch.tensor([(7 * i) % 7 - 1 if i % 3 else i % 5 for i in range(size(200, 19))]).int()
    x = cases.activations(len(slots), k).to(ops.activations)
    y = cases.activations(len(slots), n, seed=3)
    wanted = y.double()
    for slot, own in enumerate(parts):
        wanted[slots == slot] += cases.low_rank(x[slots == slot], own, n)
    found = [y.to(device, copy=True) for _ in range(size(20, 2))]
    for each in found:
        table.add(x.to(device), each, slots.to(device))
    assert all(torch.equal(each, found[0]) for each in found)
    # sums of 16-bit factors in float32: see tests/gpu/test_gpu_low_rank.py
    assert cases.nmse(found[0].cpu(), wanted) < 1e-9
    same = (slots < 0) | (slots >= 5)
    assert torch.equal(found[0].cpu()[same], y[same])


def test_most_of_128_experts_have_no_rows_and_one_has_all(
    cases: Any, ops: Ops, device: str, size: Size
) -> None:
    """Grids are made for the most that might be: programs without rows must end, whatever the
    number of tokens, and rows are listed with atomic counters, whose order differs in each run."""
    experts = size(128, 12)
    layouts = [cases.affine(256, size(512, 256), 4, 128, "zeros", seed=i) for i in range(experts)]
    bound = ops.moe.group([ops.linear(layout) for layout in layouts])
    assert bound is not None
    for tokens in (1, 16, 300, 2048) if size(1, 0) else (1, 9):
        x = cases.activations(tokens, layouts[0].shape[1])
        logits = torch.full((tokens, experts), -9.0)
        logits[:, 5] = 2.0
        logits[
            torch.arange(tokens), torch.tensor([[0, experts - 1][i % 2] for i in range(tokens)])
        ] = 1
        given = x.to(device)
        found = []
        for _ in range(size(10, 2)):
            routes = ops.moe.route(logits.to(ops.activations).to(device), 2)
            found.append(ops.moe.combine(bound.matmul(given, routes, by_token=True), routes))
        assert all(torch.equal(one, found[0]) for one in found), tokens
        each = {e: x.double() @ decode(layouts[e]).double().t() for e in (0, 5, experts - 1)}
        first, second = torch.tensor([2.0, 1.0]).double().softmax(0)
        other = [each[[0, experts - 1][i % 2]][i] for i in range(tokens)]
        wanted = first * each[5] + second * torch.stack(other)
        assert (found[0].cpu().double() - wanted).norm() < 6e-3 * wanted.norm(), tokens


# The sampler


def many_shapes(width: int, rows: int) -> tuple[SampleBuffers, Tensor]:
    """Rows changed in every way, a third of them with a mask of their slot besides."""
    rng = np.random.default_rng(width)
    shapes = []
    while len(shapes) < rows:
        shapes += shapes_of(width, rng)
    buffers = SampleBuffers(rows)
    for row, shape in enumerate(shapes[:rows]):
        buffers.set_shape(row, shape)
    masks = buffers.use_masks(width, 5)
    masks[:4] = [some_mask(width, rng) for _ in range(4)]
    for row in range(0, rows, 3):
        buffers.set_mask(row, int(rng.integers(0, 5)))
    return buffers, logits_for(buffers, width, rng)


@pytest.mark.parametrize("width", [151_936, 262_144])
def test_logits_of_large_vocabularies_change_as_the_reference_changes_them(
    ops: Ops, device: str, size: Size, width: int
) -> None:
    """19 and 32 chunks of 64 rows: bounds of rows in counters and bins that programs share."""
    buffers, logits = many_shapes(size(width, width // 8), size(64, 34))
    wanted = expected(ReferenceSample(), logits, None, buffers)
    ops.sampling.sample_into(logits.to(device), buffers)
    found = buffers.read(len(logits))
    assert found.tokens == wanted.tokens
    assert found.probabilities == wanted.probabilities
    # a card may round a product and a difference once
    np.testing.assert_allclose(found.best, wanted.best, rtol=1e-6)


@pytest.mark.parametrize("width", [151_936, 262_144])
def test_draws_from_large_vocabularies_are_the_reference_s(
    ops: Ops, device: str, size: Size, width: int
) -> None:
    """Candidates are listed with atomic counters: their order differs in each run, the draw does
    not."""
    rng = np.random.default_rng(width)
    rows, width = size(64, 6), size(width, width // 8)
    logits = torch.from_numpy(rng.standard_normal((rows, width)).astype(np.float32) * 3)
    draws = np.zeros(rows, DRAW)
    draws["temperature"] = rng.choice([0.0, 0.7, 1.0], rows)
    draws["top_k"] = rng.choice([1, 40, 1000], rows)
    draws["top_p"] = rng.choice([1.0, 0.9], rows)
    draws["typical_p"], draws["xtc_threshold"], draws["mirostat_mu"] = 1.0, -1.0, np.nan
    draws["uniform"] = rng.random(rows)
    raw = torch.from_numpy(draws.view(np.float64).reshape(rows, 8).copy())
    given = logits.to(device), raw.to(device)
    found = [ops.sampling.sample_rows(*given)[:, 0].long().cpu() for _ in range(size(20, 2))]
    assert all(torch.equal(one, found[0]) for one in found)
    reference = Ops(num_threads=1, backends=("reference",))
    wanted = torch.tensor(reference.sampling.sample(logits, draws).tokens)
    reference.close()
    # Weights are float32 on a card: a draw that lies within 1e-6 of one of at most 1,000 boundaries
    # may fall to the other side, which 64 draws do with a probability of 0.1.
    assert int((found[0] != wanted).sum()) <= 1


# Codes of pages


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_codes_of_pages_are_the_reference_s_but_for_roundings(
    device: str, size: Size, dtype: str
) -> None:
    """A compiler fuses products and sums and divides approximately; the interpreter does not.

    So a turned key, and the quotient of a scale, may differ in the last bits of float32 (2e-7). A
    code then differs where its value lies that close to the middle between two: 127 * 2e-7 = 3e-5
    of them. A scale differs where it lies that close to the middle between two float16: 2e-7 / 5e-4
    = 4e-4 of them, and with it 127 * 5e-4 = 6 % of its codes, 3e-5 of all. Allowed: 2e-4, each by
    one step.
    """
    tokens, kv_heads = size(4096, 20), size(8, 2)
    random = torch.Generator().manual_seed(5)
    fused = torch.randn(tokens, 4 + 2 * kv_heads, HEAD_DIM, generator=random) * 3
    angle = torch.rand(tokens, HEAD_DIM // 2, generator=random) * 7
    count = -(-tokens // PAGE)
    found = []
    for run, where in ((RopeAndCache().run, device), (ReferenceRope().run, "cpu")):
        cache = KVCache(
            KVSpec(1, kv_heads, HEAD_DIM, PAGE, dtype),
            count,
            torch.device(where),
            keys_transposed=False,
        )
        batch = make_batch(where, [(tokens, tokens)], [scattered(count)])
        q, k, v = fused.to(where).split([4, kv_heads, kv_heads], dim=1)
        run(q, k, v, angle.cos().to(where), angle.sin().to(where), batch, cache.layers[0])
        found.append(cache.layers[0])
    for a, b in ((found[0].k, found[1].k), (found[0].v, found[1].v)):
        steps = (_steps(a.cpu()) - _steps(b)).abs()
        assert int(steps.max()) <= 1
        assert int((steps > 0).sum()) <= 2e-4 * steps.numel()
    for a, b in ((found[0].k_scale, found[1].k_scale), (found[0].v_scale, found[1].v_scale)):
        assert a is not None and b is not None
        differ = a.cpu().view(torch.int16) != b.view(torch.int16)
        assert int(differ.sum()) <= 2e-3 * b.numel()


def _steps(codes: Tensor) -> Tensor:
    """Codes as numbers of which neighbours differ by 1."""
    if codes.dtype == torch.int8:
        return codes.int()
    bits = codes.contiguous().view(torch.uint8).int()
    if codes.dtype == torch.uint8:  # two codes of 4 bits
        return torch.cat([bits & 15, bits >> 4], dim=-1)
    return torch.where(bits < 128, bits, 128 - bits)


# Engines: streams, graphs, threads

SMALL: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 6}


def opened(golden: Path, name: str, device: str, **options: Any) -> LLM:
    # a share of the card, because other processes test at the same time
    where = {"device": "cuda", "gpu_memory_utilization": 0.05} if device == "cuda" else {}
    file = golden / name / "model.gguf"
    path = file if file.is_file() else golden / name
    return LLM(path, skip_tokenizer_init=True, **{**SMALL, **where, **options})


@pytest.fixture
def answers(size: Size) -> Callable[[LLM], list[Any]]:
    """Tokens and log-probabilities, which differ where a bit of any hidden state does."""
    few = size(0, 1)
    lengths = (6, 3) if few else (21, 3, 70, 9, 40, 1, 13)
    prompts = [[(7 * n + 13 * i) % 300 + 4 for i in range(n)] for n in lengths]
    drawn = ({"temperature": 0.0}, {"temperature": 0.9, "top_k": 50, "seed": 4})
    options: dict[str, Any] = {"max_tokens": 3 if few else 30, "logprobs": 1, "ignore_eos": True}
    params = [SamplingParams(**options, **more) for more in drawn]

    def ask(llm: LLM) -> list[Any]:
        outputs = [x for each in params for x in llm.generate(prompts, each)]
        return [(tuple(x.outputs[0].token_ids), x.outputs[0].cumulative_logprob) for x in outputs]

    return ask


@pytest.mark.parametrize("name", ["gguf-Q4_K_M", "gptoss-mxfp4", "arch-gemma3/hf"])
def test_captured_steps_have_the_bits_of_single_operators(
    golden: Path, engine_device: str, answers: Any, name: str
) -> None:
    """A graph holds addresses: memory that it did not keep belongs to somebody else by then."""
    found = []
    for eager in (False, True):
        with opened(golden, name, engine_device, enforce_eager=eager, deterministic=True) as llm:
            found += [answers(llm) for _ in range(2)]  # the second time with cached prefixes
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eagerly"])
def test_weights_that_are_copied_in_every_step_are_those_of_their_layer(
    golden: Path, engine_device: str, answers: Any, size: Size, eager: bool
) -> None:
    """Layers take turns in two buffers, which another stream fills while kernels run. A product may
    be made ready before the kernel ahead of it ends, and reads weights then."""
    options: dict[str, Any] = {"enforce_eager": eager, "deterministic": True}
    with opened(golden, "arch-gemma3/hf", engine_device, **options) as llm:
        wanted = answers(llm)
    offload = {"cpu_offload": "1GiB"} if engine_device == "cuda" else {}
    with opened(golden, "arch-gemma3/hf", engine_device, **options, **offload) as llm:
        if offload:
            assert llm._runner().ops.context.offloaded > 0
        for _ in range(size(5, 1)):
            assert answers(llm) == wanted


def test_two_engines_at_once_give_their_own_answers(
    golden: Path, engine_device: str, answers: Any, size: Size
) -> None:
    """Streams, counters, scratch and graphs of one engine must not be the other's."""
    names = ("gguf-Q8_0", "gguf-Q4_K_M")
    engines = [opened(golden, name, engine_device, deterministic=True) for name in names]
    try:
        wanted = [answers(llm) for llm in engines]
        found: list[list[Any]] = [[], []]

        def run(number: int) -> None:
            found[number] = [answers(engines[number]) for _ in range(size(5, 1))]

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[one] * size(5, 1) for one in wanted]
    finally:
        for llm in engines:
            llm.close()
