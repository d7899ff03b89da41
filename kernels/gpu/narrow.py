"""Float32 numbers rounded to the type they are stored in, inside Triton kernels.

Kernels compute in float32 and round once, where they write.
"""

import triton
import triton.language as tl

from sdk.kernels.gpu.launch import INTERPRETED

#: Conversions to bfloat16 round on every target (seen in the code for sm_80, sm_90, gfx90a and
#: gfx942); the interpreter's cuts off.
_CUT_OFF = tl.constexpr(INTERPRETED)


@triton.jit
def round_bfloat16(x):
    """Float32 values to the nearest that bfloat16 has, the even one of two."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))


@triton.jit
def narrowed(x, place):
    """Float32 ``x`` in the type that ``place`` points to: the nearest, the even one of two.

    What is beyond float16 becomes infinite there, and so shows in the logits.
    """
    if _CUT_OFF and place.dtype.element_ty == tl.bfloat16:
        x = round_bfloat16(x)
    return x.to(place.dtype.element_ty)
