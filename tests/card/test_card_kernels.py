"""Every kernel family on a card, against float64 and the definition of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdk.kernels.gpu.attention import Attention
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import DRAW
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.reference.sampling import Sample as Reference
from sdk.kernels.weights.layouts import BLOCK_TYPES, E2M1, ActivationScheme, Layout, on_device
from tests.shaping import buffers_of, expected, logits_for

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
BYTES = {"inputs": ActivationScheme("e4m3")}
LAYOUTS: dict[str, Callable[[Any], Layout]] = {
    "int4-g32-minus": lambda c: c.affine(35, 96, 4, 32, "minus"),
    "int4-g128-zero": lambda c: c.affine(1024, 2048, 4, 128, "zero", torch.bfloat16),
    "int4-g128-zeros": lambda c: c.affine(33, 256, 4, 128, "zeros"),
    "int4-channel-zeros": lambda c: c.affine(19, 224, 4, 224, "zeros"),
    "int2-g32-floats": lambda c: c.affine(21, 96, 2, 32, "floats"),
    "int3-g64-zero": lambda c: c.affine(35, 256, 3, 64, "zero"),
    "int5-g32-zeros": lambda c: c.affine(20, 160, 5, 32, "zeros"),
    "int6-g48-minus": lambda c: c.affine(20, 192, 6, 48, "minus"),
    "int8-channel": lambda c: c.affine(37, 200, 8, 200, "zero", signed=True),
    "nf4-like": lambda c: c.table(18, 192, 4, 64),
    "nested-like": lambda c: c.nested(18, 192, 64, 4),
    "mxfp4": lambda c: c.table(18, 128, 4, 32, torch.float8_e8m0fnu, values=E2M1),
    "nvfp4": lambda c: c.table(18, 128, 4, 16, torch.float8_e4m3fn, 128, values=E2M1),
    "iq3-like": lambda c: c.table(18, 512, 3, 32, torch.uint8, 256),
    "iq1-like": lambda c: c.table(18, 512, 1, 32, torch.uint8, 256),
    "fp8-channel": lambda c: c.float8(20, 96, (1, 96)),
    "fp8-blocks": lambda c: c.float8(150, 160, (128, 128)),
    "fp8-e5m2": lambda c: c.float8(20, 96, (1, 96), torch.float8_e5m2),
    "fp8-as-file": lambda c: replace(c.float8(256, 512, (1, 512)), **BYTES),
    "int8-as-file": lambda c: replace(
        c.affine(256, 512, 8, 512, "zero", signed=True), inputs=ActivationScheme("int")
    ),
    "bfloat16": lambda c: c.dense(64, 128, torch.bfloat16),
    **{name: lambda c, name=name: c.blocks(19, 512, name) for name in BLOCK_TYPES},  # type: ignore[misc]
}


def on(device: str, x: Any) -> Any:
    """A dataclass with its tensors on the device."""
    parts = {f.name: getattr(x, f.name) for f in fields(x)}
    moved = {name: p.to(device) for name, p in parts.items() if isinstance(p, Tensor)}
    return replace(x, **moved)


@pytest.mark.parametrize("compute", ["auto", "exact"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_products_equal_float64(cases: Any, device: str, name: str, compute: Any) -> None:
    layout = LAYOUTS[name](cases)
    ops = Ops(device, compute=compute, backends=("gpu", "reference"))
    bound = ops.linear(layout)
    assert not any("self-check" in why for _, why in bound.choice.declined), bound.choice
    as_file = name.endswith("as-file") and compute == "auto"
    for tokens in (1, 7, 33, 300):
        x = cases.activations(tokens, layout.shape[1])
        seen = fake_quantize(x, layout.inputs) if as_file else x  # type: ignore[union-attr]
        expected = seen.double() @ decode(layout).double().t()
        found = bound.matmul(x.to(device)).cpu().double()
        limit = 1e-5 if compute == "exact" else 6e-3
        assert (found - expected).norm() < limit * expected.norm(), tokens
    ops.close()


EXPERTS: dict[str, Callable[[Any, int], Layout]] = {
    "int4-g128-zeros": lambda c, s: c.affine(256, 512, 4, 128, "zeros", seed=s),
    "q4_k": lambda c, s: c.blocks(256, 512, "q4_k", seed=s),
    "fp8-channel": lambda c, s: c.float8(256, 512, (1, 512), seed=s),
    "fp8-as-file": lambda c, s: replace(c.float8(256, 512, (1, 512), seed=s), **BYTES),
    "bfloat16": lambda c, s: c.dense(256, 512, torch.bfloat16, seed=s),
}


@pytest.mark.parametrize("tokens", [1, 5, 200, 1100])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_multiply_the_rows_routed_to_them(
    cases: Any, device: str, name: str, tokens: int
) -> None:
    layouts = [EXPERTS[name](cases, seed) for seed in range(8)]
    ops = Ops(device, backends=("gpu", "reference"))
    bound = ops.moe.group([ops.linear(layout) for layout in layouts])
    assert bound is not None
    x = cases.activations(tokens, 512)
    routes = ops.moe.route(x[:, :8].contiguous().to(device), 2)
    found = ops.moe.combine(bound.matmul(x.to(device), routes, by_token=True), routes)
    seen = fake_quantize(x, BYTES["inputs"]) if name == "fp8-as-file" else x
    each = torch.stack([seen.double() @ decode(layout).double().t() for layout in layouts])
    best, chosen = x[:, :8].double().topk(2, dim=1)
    rows = torch.arange(tokens)
    expected = sum(best.softmax(dim=1)[:, i : i + 1] * each[chosen[:, i], rows] for i in range(2))
    assert (found.cpu().double() - expected).norm() < 6e-3 * expected.norm()
    ops.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_packing_keeps_every_bit(cases: Any, device: str, name: str) -> None:
    layout = LAYOUTS[name](cases)
    ops = Ops(device, backends=("gpu", "reference"))
    bound = ops.linear(layout)
    assert cases.same(on_device(bound.layout(), CPU), layout)
    ids = torch.tensor([layout.shape[0] - 1, 0, 3, 3])
    assert torch.equal(bound.rows(ids.to(device)).cpu(), decode(layout)[ids])
    ops.close()


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "page_size", "dtype", "groups"),
    [
        (64, 4, 1, 16, "float32", 1),
        (80, 2, 2, 32, "float16", 1),
        (96, 8, 1, 64, "bfloat16", 1),
        (128, 4, 1, 16, "bfloat16", 1),
        (128, 8, 1, 16, "int8", 2),
        (256, 4, 1, 64, "int8", 4),
        (128, 8, 1, 32, "float8_e4m3fn", 1),
        (64, 8, 2, 16, "float8_e5m2", 1),
        (128, 4, 1, 16, "int4", 4),
        (64, 2, 1, 16, "int8/int4", 2),
    ],
)
@pytest.mark.parametrize(
    "options", [{}, {"window": 33, "softcap": 3.0}, {"window": 70}], ids=["all", "cap", "window"]
)
def test_attention_is_the_softmax_of_the_definition(
    steps: Any,
    device: str,
    head_dim: int,
    heads: int,
    kv_heads: int,
    page_size: int,
    dtype: str,
    groups: int,
    options: dict[str, Any],
) -> None:
    requests = [(1, 1), (page_size, 1), (page_size + 21, 5), (18, 18), (300, 1)]
    step = steps.make_step(requests, heads, kv_heads, head_dim, page_size, dtype, groups=groups)
    out = torch.full((step.q.shape[0], step.q[0].numel()), torch.nan, device=device)
    settings: dict[str, Any] = {"scale": 0.2, "window": None, "softcap": None} | options
    batch, pages = on(device, step.batch), on(device, step.pages)
    Attention(False).run(
        step.q.to(device), pages, batch, **settings, sinks=None, slopes=None, out=out
    )
    wanted = steps.expected(step, **options)
    found = out.cpu().view(step.q.shape).double()
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2 if "bf" in dtype else 5e-3)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "window", "biased"),
    [
        (32, "float16", None, False),
        (64, "bfloat16", 33, False),
        (64, "float16", None, True),
        (128, "bfloat16", None, False),
    ],
)
def test_tokens_of_encoders_see_both_ways(
    steps: Any, device: str, head_dim: int, dtype: str, window: int | None, biased: bool
) -> None:
    step = steps.make_step([(140, 140), (1, 1), (37, 37)], 4, 4, head_dim, 16, dtype)
    slopes = torch.linspace(0.01, 0.2, 4) if biased else None
    given = None if slopes is None else slopes.to(device)
    out = torch.full((step.q.shape[0], step.q[0].numel()), torch.nan, device=device)
    batch, pages = on(device, step.batch), on(device, step.pages)
    Attention(False).run(
        step.q.to(device), pages, batch, 0.2, window, None, None, given, out, causal=False
    )
    wanted = steps.expected(step, window=window, slopes=slopes, causal=False)
    found = out.cpu().view(step.q.shape).double()
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-2 if "bf" in dtype else 5e-3)


def test_biases_by_distance_are_added_to_scores(steps: Any, device: str) -> None:
    """Tokens one by one, whose keys several programs share, and a prompt."""
    step = steps.make_step([(600, 1), (70, 1), (90, 37)], 4, 2, 128, 16, "float16")
    slopes = torch.linspace(0.01, 0.2, 4)
    out = torch.full((step.q.shape[0], step.q[0].numel()), torch.nan, device=device)
    batch, pages, given = on(device, step.batch), on(device, step.pages), slopes.to(device)
    Attention(False).run(step.q.to(device), pages, batch, 0.2, None, None, None, given, out)
    found = out.cpu().view(step.q.shape).double()
    torch.testing.assert_close(found, steps.expected(step, slopes=slopes), rtol=0, atol=5e-3)


@pytest.mark.parametrize(("kind", "gates"), [("sigmoid", 384), ("softplus", 3)])
def test_gates_multiply_runs_of_numbers(device: str, kind: Any, gates: int) -> None:
    random = torch.Generator().manual_seed(3)
    x, gate = (torch.randn(5, n, generator=random) for n in (384, gates))
    gate[0, 0], gate[1, 0] = 90.0, -90.0
    ops = Ops(device, num_threads=1, backends=("gpu", "reference"))
    found = ops.gate(x.clone().to(device), gate.to(device), kind)
    ops.close()
    factor = {"sigmoid": torch.sigmoid, "softplus": torch.nn.functional.softplus}[kind]
    wanted = x.double() * factor(gate.double()).repeat_interleave(384 // gates, dim=1)
    # exp and log of a card are right to about 2^-21
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-5, atol=1e-30)


def test_a_shared_prefix_changes_nothing(steps: Any, device: str) -> None:
    step = steps.make_step([(600, 1), (541, 1), (529, 1)], 2, 1, 64, 16, "float16", 528)
    out = torch.full((3, step.q[0].numel()), torch.nan, device=device)
    batch, pages = on(device, step.batch), on(device, step.pages)
    Attention(False).run(step.q.to(device), pages, batch, 0.2, None, None, None, None, out)
    found = out.cpu().view(step.q.shape).double()
    torch.testing.assert_close(found, steps.expected(step), rtol=0, atol=5e-3)


def test_the_sampler_chooses_what_the_reference_does(device: str) -> None:
    rng = np.random.default_rng(1)
    rows = 32
    logits = torch.from_numpy(rng.standard_normal((rows, 5000)).astype(np.float32) * 3)
    draws = np.zeros(rows, DRAW)
    draws["temperature"] = rng.choice([0.0, 0.7, 1.0], rows)
    draws["top_k"] = rng.choice([0, 1, 40], rows)
    draws["top_p"] = rng.choice([1.0, 0.9], rows)
    draws["typical_p"], draws["xtc_threshold"], draws["mirostat_mu"] = 1.0, -1.0, np.nan
    draws["uniform"] = rng.random(rows)
    raw = torch.from_numpy(draws.view(np.float64).reshape(rows, 8).copy())
    ops = Ops(device, num_threads=1, backends=("gpu", "reference"))
    found = ops.sampling.sample_rows(logits.to(device), raw.to(device))[:, 0].long().tolist()
    ops.close()
    ops = Ops(num_threads=1, backends=("reference",))
    wanted = ops.sampling.sample(logits, draws).tokens
    ops.close()
    # weights are float32 on a card: a draw that lies on a boundary may fall to either side
    assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= rows - 1


def test_logits_change_in_the_draw_as_the_reference_changes_them(device: str) -> None:
    """Three chunks of 8192 logits; changes of the same logits one after the other."""
    width, rng = 20000, np.random.default_rng(2)
    buffers = buffers_of(width, rng)
    logits = logits_for(buffers, width, rng)
    wanted = expected(Reference(), logits, None, buffers)
    ops = Ops(device, num_threads=1, backends=("gpu", "reference"))
    ops.sampling.sample_into(logits.to(device), buffers)
    ops.close()
    found = buffers.read(len(logits))
    assert found.tokens == wanted.tokens
    assert found.probabilities == wanted.probabilities
    # a card may round a product and a difference once
    np.testing.assert_allclose(found.best, wanted.best, rtol=1e-6)
