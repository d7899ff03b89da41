"""Latent pages under the Triton interpreter, against the reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.attention import Attention
from sdk.kernels.gpu.latent import LatentAttention, LatentRopeAndCache
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.head_norms import QueryScale
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.attention import Attention as Reference
from sdk.kernels.reference.page_codes import page_floats
from sdk.kernels.reference.rope import LatentRopeAndCache as ReferenceWrite
from sdk.kernels.weights.layouts import Dense
from sdk.quant.caches import AttentionCache
from sdk.quant.spec import KVSpec

PAGE = 16
PAGES = 40


def make_pages(values: int, width: int, dtype: str) -> KVPages:
    cache = AttentionCache(1, values + width, values, latent=True)
    spec = KVSpec(1, 1, values + width, PAGE, dtype, (cache,))
    return KVCache(spec, PAGES, keys_transposed=False).layers[0]


def make_batch(requests: Sequence[tuple[int, int]]) -> AttentionBatch:
    """Requests of (context, new tokens), each with pages of its own in descending order."""
    tables: list[list[int]] = []
    starts, positions, slots, free = [0], [], [], list(range(1, PAGES))
    for context, new in requests:
        own = [free.pop() for _ in range(-(-context // PAGE))]
        tables.append(own)
        at = range(context - new, context)
        positions += at
        slots += [own[p // PAGE] * PAGE + p % PAGE for p in at]
        starts.append(starts[-1] + new)
    longest = max(map(len, tables))
    return AttentionBatch(
        positions=torch.tensor(positions),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor([context for context, _ in requests], dtype=torch.int32),
        page_table=torch.tensor(
            [own + [0] * (longest - len(own)) for own in tables], dtype=torch.int32
        ),
        slots=torch.tensor(slots),
        page_size=PAGE,
        max_query_len=max(new for _, new in requests),
        max_context_len=max(context for context, _ in requests),
    )


def inputs(tokens: int, heads: int, values: int, width: int, half: int) -> list[Tensor]:
    """q, what turns of it, latents, what turns of keys, cos, sin."""
    random = torch.Generator().manual_seed(3)
    q = torch.randn(tokens, heads, values + width, generator=random)
    turned = torch.randn(tokens, heads, width + 4, generator=random)[..., 2 : width + 2]
    latent = torch.randn(tokens, 1, values, generator=random)
    k = torch.randn(tokens, 1, width, generator=random)
    angle = torch.rand(tokens, half, generator=random) * 6
    return [q, turned, latent, k, angle.cos(), angle.sin()]


@pytest.mark.parametrize(
    ("heads", "values", "width", "half", "dtype", "scale"),
    [
        (3, 48, 16, 8, "float32", None),
        (5, 64, 32, 12, "float16", QueryScale(0.3, 20)),
        (4, 64, 64, 32, "int8", None),
        (2, 96, 32, 16, "fp8", None),
    ],
)
def test_what_is_written_is_the_references(
    heads: int, values: int, width: int, half: int, dtype: str, scale: QueryScale | None
) -> None:
    batch = make_batch([(37, 5), (3, 3)])
    q, *others = inputs(8, heads, values, width, half)
    both = []
    for kernel in (LatentRopeAndCache(), ReferenceWrite()):
        pages, own = make_pages(values, width, dtype), q.clone()
        kernel.run(own, *others, batch, pages, scale)
        both.append((own, pages))
    (own, pages), (wanted, expected) = both
    assert torch.allclose(own, wanted, rtol=2e-6, atol=2e-6)
    found, right = (page_floats(one, torch.arange(PAGES), values)[0] for one in (pages, expected))
    assert (found - right).abs().max() <= 4e-6 * right.abs().max()
    assert found.abs().sum() > 0


@pytest.mark.parametrize(
    ("heads", "values", "width", "dtype", "window", "programs", "requests"),
    [
        (3, 48, 16, "float32", None, 8, [(37, 1), (5, 5), (70, 33), (1, 1)]),
        (20, 64, 32, "float16", 40, 8, [(65, 1), (90, 3)]),
        (4, 64, 64, "int8", None, 8, [(50, 1), (33, 20)]),
        (2, 96, 32, "fp8", None, 8, [(40, 2)]),
        (6, 64, 32, "bfloat16", None, 64, [(300, 1), (260, 2)]),
        (2, 64, 32, "float32", 270, 64, [(560, 1)]),  # splits, the first without keys
    ],
)
def test_attention_over_latent_pages(
    heads: int,
    values: int,
    width: int,
    dtype: str,
    window: int | None,
    programs: int,
    requests: list[tuple[int, int]],
) -> None:
    batch, pages = make_batch(requests), make_pages(values, width, dtype)
    whole = make_batch([(context, context) for context, _ in requests])
    tokens = whole.num_tokens
    q, *others = inputs(tokens, heads, values, width, width // 2)
    ReferenceWrite().run(q.clone(), *others, whole, pages)
    q = q[: batch.num_tokens].contiguous()
    wanted = torch.empty(batch.num_tokens, heads * values)
    arguments = (q, pages, batch, 0.15, window, None, None, None)
    Reference().run(*arguments, wanted)
    for exact in (False, True):
        for fixed in (False, True):
            found = torch.full_like(wanted, float("nan"))
            LatentAttention(exact, programs=programs, fixed=fixed).run(*arguments, found)
            limit = 4e-6 if exact or dtype == "float32" else 2e-2 if dtype == "bfloat16" else 4e-3
            assert (found - wanted).abs().max() <= limit * wanted.abs().max()


def test_what_these_kernels_cannot_run_is_declined() -> None:
    problem = Problem("attention", head_dim=576, value_dim=512, kv_dtype="int8", format="latent")
    own = LatentAttention(False)
    assert own.reject(problem) is None
    plain = own.reject(Problem("attention", head_dim=64, kv_dtype="int8"))
    assert plain == "its pages are latent"
    for field, wanted in (
        ({"kv_dtype": "int4"}, "latent pages of int4: expected float32"),
        ({"format": "softcap latent"}, "latent pages with softcap latent: expected a window"),
        ({"value_dim": 20}, "latents of 20 in keys of 576: expected multiples of 8"),
        ({"compute": "exact"}, "its products round to 16 bits"),
    ):
        fields = {name: getattr(problem, name) for name in problem.__dataclass_fields__}
        reason = own.reject(Problem(**{**fields, **field}))
        assert reason is not None and reason.startswith(wanted)
    other = Attention(False).reject(problem)
    assert other is not None and "parts of keys (latent attention)" in other
    apart = Attention(False).reject(
        Problem("attention", head_dim=64, value_dim=32, kv_dtype="int8")
    )
    assert apart == "values of 32 dimensions: expected 64, as keys"
    pages, batch = make_pages(32, 16, "float32"), make_batch([(3, 3)])
    q, out = torch.zeros(3, 2, 48), torch.zeros(3, 64)
    with pytest.raises(KernelError, match="a scale above 0 and a window of at least 1"):
        own.run(q, pages, batch, 0.0, None, None, None, None, out)
    plain_pages = KVCache(KVSpec(1, 1, 48, PAGE, "float32"), 3, keys_transposed=False).layers[0]
    with pytest.raises(KernelError, match="expected latent pages of one key head"):
        own.run(q, plain_pages, batch, 1.0, None, None, None, None, out)
    parts = inputs(3, 2, 32, 16, 8)
    parts[3] = torch.zeros(3, 1, 32)[..., ::2]
    with pytest.raises(KernelError, match="latent rope: expected contiguous heads"):
        LatentRopeAndCache().run(*parts, batch, pages)


def test_cards_of_amd_decline_latent_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7")
    problem = Problem("attention", head_dim=576, value_dim=512, kv_dtype="int8", format="latent")
    for kernels in (LatentAttention(False), LatentAttention(True), LatentRopeAndCache()):
        reason = kernels.reject(problem)
        assert reason is not None and reason.startswith("latent pages on AMD's cards")


def test_heads_are_multiplied_one_at_a_time() -> None:
    """Kernels of cards have no product of heads."""
    heads, n, k = 3, 24, 32
    random = torch.Generator().manual_seed(2)
    weights = [torch.randn(n, k, generator=random) for _ in range(heads)]
    x = torch.randn(5, heads, k + 8, generator=random)[..., :k]
    ops = Ops("cpu", num_threads=1, backends=("gpu", "reference"))
    try:
        group = ops.latent.group([ops.linear(Dense(weight)) for weight in weights])
        wide = torch.full((5, heads, n + 8), float("nan"))
        found = group.matmul(x, wide[..., :n])
        wanted = torch.stack([x[:, i] @ weight.T for i, weight in enumerate(weights)], dim=1)
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert wide[..., n:].isnan().all()
    finally:
        ops.close()
