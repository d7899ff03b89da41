"""4-bit floats (e2m1) with small scales: MXFP4 and NVFP4.

In MXFP4, 32 values share a power of two, ``2^(floor(log2(amax)) - 2)``, so that the largest lies
between 4 and 8 (the range ends at 6: larger values are clipped). Source: OCP Microscaling Formats
1.0, 6.3. In NVFP4, 16 values share an 8-bit float near ``amax / 6``, and the matrix has one float32
that brings those scales into range. Here it is a power of two: no loss, and its inverse, which is
what files store, is exact.
"""

from __future__ import annotations

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.reference.decode import pack_codes
from sdk.kernels.weights.layouts import E2M1, Affine

MX_GROUP, NV_GROUP = 32, 16
_LARGEST_CODE, _LARGEST_SCALE = 6.0, 448.0
#: Midpoints between neighbouring magnitudes; ties go to the even code.
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def mxfp4(weight: Tensor) -> Affine:
    """``weight``, float32 ``[N, K]``, in MXFP4. K must be a multiple of 32."""
    scale, codes = mxfp4_groups(weight.reshape(weight.shape[0], -1, MX_GROUP))
    shape = (weight.shape[0], weight.shape[1])
    packed = pack_codes(codes.reshape(shape), 4)
    return Affine(shape, 4, MX_GROUP, packed, scale, table=torch.tensor(E2M1), name="mxfp4")


def mxfp4_groups(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Scales e8m0 ``[N, G]`` and codes uint8 ``[N, G, 32]`` of groups, float32 ``[N, G, 32]``."""
    _, exponent = torch.frexp(groups.abs().amax(2))  # amax = m * 2^exponent with m in [0.5, 1)
    biased = (exponent - 3 + 127).clamp_(0, 254).to(torch.uint8)
    scale = biased.view(torch.float8_e8m0fnu)
    return scale, _codes(groups, scale.to(torch.float32))


def nvfp4(weight: Tensor) -> Affine:
    """``weight``, float32 ``[N, K]``, in NVFP4. K must be a multiple of 16."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, -1, NV_GROUP)
    largest = groups.abs().amax(2)
    factor = factor_of(float(largest.max()))
    scale = (largest / (_LARGEST_CODE * factor)).clamp_(max=_LARGEST_SCALE)
    scale = scale.to(torch.float8_e4m3fn)
    codes = _codes(groups, scale.to(torch.float32) * factor)
    return nested(pack_codes(codes.reshape(rows, columns), 4), scale, factor, columns)


def factor_of(largest: float) -> float:
    """What brings the scales of a matrix into the range of their type, by its largest magnitude."""
    if not largest > 0:
        return 1.0
    wanted = torch.tensor(largest / (_LARGEST_SCALE * _LARGEST_CODE))
    return float(2.0 ** wanted.log2().ceil().clamp(-126, 126))


def nested(packed: Tensor, scale: Tensor, factor: float, columns: int) -> Affine:
    """NVFP4 of packed codes and e4m3 scales ``[N, G]``."""
    rows = packed.shape[0]
    return Affine(
        (rows, columns),
        4,
        NV_GROUP,
        packed,
        scale,
        table=torch.tensor(E2M1),
        super_scale=torch.full((rows, 1), factor),
        super_group=columns,
        name="nvfp4",
    )


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    """The nearest codes of grouped values, ties to even, uint8 of the same shape."""
    inverse = torch.where(scale > 0, 1 / scale, 0.0).unsqueeze(2)
    scaled = groups * inverse
    size = scaled.abs()
    between = torch.tensor(_BETWEEN)
    low = torch.bucketize(size, between)  # a tie goes down
    tie = torch.bucketize(size, between, right=True) != low
    code = low + (tie & (low % 2 == 1))
    return (code + 8 * (scaled < 0)).to(torch.uint8)
