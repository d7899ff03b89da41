"""A weight takes what its file takes and at most 3 % more: as read, and packed for its kernel."""

from __future__ import annotations

import pytest
import torch

from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import BLOCK_TYPES, Affine, Blocks, Float8, Layout
from sdk.quant.weight import weight_of

N, K = 512, 2048
E4M3 = torch.float8_e4m3fn


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def integers(bits: int, group: int, zeros: str) -> tuple[Layout, float]:
    """Codes with a float16 scale and a zero point of as many bits, or of 16, for each group."""
    groups = K // group
    points = {
        "codes": bytes_of(N, -(-groups * bits // 8)),
        "floats": torch.zeros(N, groups).half(),
    }[zeros]
    scale = torch.ones(N, groups).half()
    codes = bytes_of(N, K * bits // 8)
    stored = bits + (16 + (bits if zeros == "codes" else 16)) / group
    return Affine((N, K), bits, group, codes, scale, zeros=points), stored


def nested(group: int, share: int) -> tuple[Layout, float]:
    count = N * K // group
    layout = Affine(
        (N, K),
        4,
        group,
        bytes_of(N, K // 2),
        bytes_of(N, K // group),
        table=torch.zeros(16),
        super_scale=torch.ones(count // share),
        super_group=share * group,
        scale_table=torch.ones(256),
        scale_offset=torch.zeros(N),
        name="nf4",
    )
    return layout, 4 + 8 / group + 32 / (group * share) + 256 * 32 / (N * K)


def float8(block: tuple[int, int]) -> tuple[Layout, float]:
    grid = (-(-N // block[0]), -(-K // block[1]))
    values = bytes_of(N, K).view(E4M3)
    return Float8(values, torch.ones(grid), block), 8 + 32 * grid[0] * grid[1] / (N * K)


def blocks(name: str) -> tuple[Layout, float]:
    kind = BLOCK_TYPES[name]
    data = bytes_of(N, K // kind.elements * kind.nbytes)
    return Blocks((N, K), name, data), kind.bits_per_weight


FORMATS = {
    **{f"w{bits}g{group}-{zeros}": integers(bits, group, zeros)
       for bits in (2, 3, 4, 8) for group in (16, 32, 64, 128) for zeros in ("codes", "floats")},
    **{f"nested-{group}": nested(group, 256) for group in (64, 128)},
    **{f"fp8-{high}x{wide}": float8((high, wide))
       for high, wide in ((1, K), (N, K), (128, 128), (64, 64), (16, K))},
    **{name: blocks(name) for name in BLOCK_TYPES},
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_no_format_takes_more_than_3_percent_above_its_file(name: str) -> None:
    layout, stored = FORMATS[name]
    weight = weight_of(layout)
    ops = Ops(num_threads=1)
    for _ in range(2):
        assert weight.nbytes * 8 / (N * K) <= 1.03 * stored
        weight.bind(ops)
    ops.close()
