"""Pages of 8-bit floats: what their codes keep of keys and values, and who runs them on a CPU."""

from __future__ import annotations

import pytest
import torch

from sdk.engine.kv_cache import KVCache
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.ops import Ops
from sdk.kernels.reference.rope import round_codes
from sdk.quant.spec import KVSpec

#: Half a step of the last bit of the mantissa, beside a value.
STEPS = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3, torch.int8: 0.0}


@pytest.mark.parametrize("dtype", STEPS)
@pytest.mark.parametrize("size", [1e-4, 1.0, 3e4])
def test_codes_times_their_scale_are_the_values(dtype: torch.dtype, size: float) -> None:
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * size
    codes, scale = round_codes(x, dtype)
    assert codes.dtype == dtype and scale.dtype == torch.float16
    back = codes.double() * scale.double()[:, None]
    step = scale.double()[:, None] / 2  # of integers, and of what is below the normal floats
    peak = x.abs().amax(dim=1, keepdim=True).double()
    allowed = x.double().abs() * STEPS[dtype] + (step if dtype == torch.int8 else peak * 2e-5)
    # a scale below float16's normal numbers is up to a hundredth off: the largest saturate
    assert ((back - x.double()).abs() <= allowed + peak * 0.01 * (size < 1e-3)).all()


@pytest.mark.parametrize("dtype", STEPS)
def test_what_is_no_number_stays_visible(dtype: torch.dtype) -> None:
    x = torch.ones(2, 8)
    x[0, 3] = float("nan")
    codes, scale = round_codes(x, dtype)
    assert scale[0].isnan() and scale[1].isfinite()
    assert (codes[0].float() == 0).all()


def test_the_cpu_leaves_8_bit_floats_to_the_reference() -> None:
    ops = Ops("cpu", num_threads=1)
    pages = KVCache(KVSpec(1, 1, 16, 16, "float8_e4m3fn"), 2).layers[0]
    one = torch.ones(1, dtype=torch.int32)
    batch = AttentionBatch(
        positions=torch.zeros(1, dtype=torch.int64),
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_len=one,
        page_table=one.view(1, 1),
        slots=torch.tensor([16]),
        page_size=16,
        max_query_len=1,
        max_context_len=1,
    )
    q, k, v = (torch.randn(1, 1, 16) for _ in range(3))
    angles = torch.zeros(1, 8)
    ops.rope_and_cache(q, k, v, angles + 1, angles, batch, pages)
    found = ops.attention(q, pages, batch, scale=1.0)
    torch.testing.assert_close(found.view(-1), v.view(-1), rtol=0.07, atol=0.02)
    for problem, choice in ops.chosen():
        assert choice.name == f"reference.{problem.op}"
        assert "KV pages of float8_e4m3fn: expected float32" in choice.declined[-1][1]
    ops.close()
