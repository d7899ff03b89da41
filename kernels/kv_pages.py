"""The tensors that keys and values are written to and read from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's keys and values: ``k``, ``v`` ``[num_pages, kv_heads, page_size, head_dim]``.

    In memory a page's keys of one head lie transposed, ``[head_dim][page_size]``, so that
    neighbouring keys are the lanes of a vector; its values lie ``[page_size][head_dim]``. Each of
    the two has its own type: float32, float16, bfloat16, int8, float8_e4m3fn, float8_e5m2, or
    uint8 ``[..., head_dim / 2]``, which are int4: element d is the low half of byte d or the high
    half of byte d - head_dim / 2.

    Codes have scales, ``k_scale`` and ``v_scale`` ``[num_pages, kv_heads * groups, page_size]``
    (head by head, the groups of a head side by side): one for every ``group`` dimensions, a
    multiple of 32 that follows from the number of groups. int8 and float8: float16, value = scale
    * code. int4: int16, its low byte the upper 8 bits of a float16 without sign, its high byte the
    zero in sixteenths, value = scale * (code - zero). Keys and values of integers lie mixed
    (``reference/page_codes.py``): ``rope_and_cache`` mixes the queries too, and ``attention`` its
    result back.

    ``k_centre`` float32 ``[kv_heads, head_dim]`` is taken from every rotated key before it is
    written. All scores of a query change by the same, which softmax does not see, but a softcap or
    a sink would: ``attention`` refuses them.

    ``below`` is the next level of a ladder, at most two in all: the same memory seen as twice as
    many pages of an integer type of half the bits. A page id says which level it belongs to
    (``kernels/ladder.py``): ``rope_and_cache`` writes the first, ``attention`` reads all of them,
    ``page_recoder`` takes a page to another level. All lie mixed, floats too, and have one centre,
    so that a page is recoded value by value; their pages have 128 tokens, so that what attention
    multiplies at once is of one type.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    k_centre: Tensor | None = None
    below: KVPages | None = None

    @property
    def page_size(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * (2 if self.k.dtype == torch.uint8 else 1)

    @property
    def dtype(self) -> str:
        """Of keys and values: ``int8``, ``int8/int4`` where they differ, ``float16>int8``."""
        k, v = (_page_type(x.dtype) for x in (self.k, self.v))
        own = k if k == v else f"{k}/{v}"
        return own if self.below is None else f"{own}>{self.below.dtype}"

    @property
    def levels(self) -> tuple[KVPages, ...]:
        """These pages and those below them."""
        return (self,) if self.below is None else (self, *self.below.levels)

    @property
    def k_mixed(self) -> bool:
        """Whether keys lie mixed."""
        return self.below is not None or is_mixed(self.k.dtype)

    @property
    def v_mixed(self) -> bool:
        """Whether values lie mixed."""
        return self.below is not None or is_mixed(self.v.dtype)


def is_mixed(dtype: torch.dtype) -> bool:
    """Whether keys and values of this type lie mixed whatever their level."""
    return dtype in (torch.int8, torch.uint8)


def _page_type(dtype: torch.dtype) -> str:
    return "int4" if dtype == torch.uint8 else str(dtype).removeprefix("torch.")


def scale_group(head_dim: int, groups: int) -> int:
    """The dimensions that share a scale where a head of ``head_dim`` has ``groups`` of them."""
    return -(-head_dim // (32 * groups)) * 32
