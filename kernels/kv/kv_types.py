"""The types of keys and values in KV pages: one descriptor each, in :data:`KV_TYPES`.

A new type is one more entry there. Everything that depends on the type reads the descriptor: names,
page bytes, tensors, snapshots and the reference kernels. A fast backend rejects a type that it has
no number for, and the reference kernels run it.

This module imports without torch, because options are parsed without it: dtypes are names here, and
methods that work on tensors ask for torch when they are called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from sdk.kernels.dataclass import dataclass

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: The largest float16. Keys, values and scales beyond it saturate instead of becoming inf.
HALF_MAX = 65504.0
#: Bits of the largest finite scale and of the NaN scale of a :class:`ZeroPointType`.
_LARGEST, _NAN = 0xF7, 0xFF
_NO_FRACTIONS = 1.5 * 2**23
#: What a :class:`WordType` stores as 0.
_NO_SIZE = 1e-30


@dataclass(frozen=True, kw_only=True)
class KVType:
    """How keys or values are stored. This class: floats without scales."""

    #: The name that is printed; ``aliases`` and, in texts like ``k8v4``, ``short`` are read too.
    name: str
    aliases: tuple[str, ...] = ()
    short: str = ""
    #: Bits of a code or float.
    bits: int
    #: The torch dtype of a page's elements; :attr:`packing` values share an element.
    storage: str
    #: The torch dtype of scales; empty: there are none.
    scale: str = ""
    #: Dimensions that share a scale, of keys and of values: 32 or a multiple that
    #: :func:`scale_group` finds from the number of groups; ``None``: the whole head.
    groups: tuple[int, int] | None = None
    #: A head of fewer groups than this has one scale.
    one_group_below: float = 1.0
    #: Whether a head is multiplied by the Hadamard matrix first (*mixed*). Integers of a group
    #: share one step, which a few large channels would otherwise set for all.
    hadamard: bool = False
    #: Whether the mean key is subtracted from all keys (``KVPages.k_centre``).
    centred: bool = False
    #: The largest code, which the largest value of a group becomes.
    largest: float = 0.0
    #: The type's number in the native kernels (``ElementType`` in cpu/native/abi.hpp) and in the
    #: Triton kernels (gpu/pages.py); ``None``: that backend rejects the type.
    cpu_element: int | None = None
    gpu_kind: int | None = None

    @cached_property
    def packing(self) -> int:
        """Values in an element. If a head has n elements, element i holds its values i, i + n,
        i + 2n, ... from the low bits up.
        """
        return 8 * _item_bytes(self.storage) // self.bits

    def code_bytes(self, count: int) -> int:
        """Bytes of ``count`` values without their scales."""
        return count * _item_bytes(self.storage) // self.packing

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale."""
        return _item_bytes(self.scale) if self.scale else 0

    @property
    def storage_dtype(self) -> torch.dtype:
        return _dtype(self.storage)

    @property
    def scale_dtype(self) -> torch.dtype:
        """Only of a type with scales."""
        return _dtype(self.scale)

    def scales_per_head(self, head_dim: int, side: int) -> int:
        """Scales of a key (``side`` 0) or value (1) of one head."""
        if not self.scale:
            return 0
        group = head_dim if self.groups is None else self.groups[side]
        return 1 if head_dim < self.one_group_below * group else -(-head_dim // group)

    def encode(self, x: Tensor, groups: int) -> tuple[Tensor, Tensor | None]:
        """Float32 ``x [..., d]``, already mixed, as elements ``[..., d / packing]`` and scales
        ``[..., groups]``. A type with scales expects values within ±``HALF_MAX``, or NaN.
        """
        if self.storage == "float16":
            x = x.clamp(-HALF_MAX, HALF_MAX)
        return x.to(self.storage_dtype), None

    def decode(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        """What :meth:`encode` returned as float32 ``[..., d]``, still mixed."""
        from sdk.kernels.lazy_torch import torch

        return codes.to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class ScaledType(KVType):
    """Codes with one scale for each group of dimensions: value = scale * code.

    A NaN makes the scale of its group NaN and the codes 0, so that it stays visible as in a float
    page. Codes that share an element must not be negative.
    """

    scale: str = "float16"

    def encode(self, x: Tensor, groups: int) -> tuple[Tensor, Tensor | None]:
        from sdk.kernels.lazy_torch import torch

        parts = torch.split(x, scale_group(x.shape[-1], groups), dim=-1)
        quantized = [self.quantize(part) for part in parts]
        codes = torch.cat([codes for codes, _ in quantized], dim=-1)
        scales = torch.stack([scale for _, scale in quantized], dim=-1)
        if self.packing == 1:
            return codes, scales
        packed, *others = codes.chunk(self.packing, dim=-1)
        for index, part in enumerate(others, 1):
            packed = packed | part << index * self.bits
        return packed, scales

    def decode(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        from sdk.kernels.lazy_torch import torch

        assert scales is not None
        if self.packing > 1:
            mask = (1 << self.bits) - 1
            shifts = [index * self.bits for index in range(self.packing)]
            codes = torch.cat([codes >> shift & mask for shift in shifts], dim=-1)
        group = scale_group(codes.shape[-1], scales.shape[-1])
        wide = scales.repeat_interleave(group, dim=-1)[..., : codes.shape[-1]]
        return self.dequantize(codes.to(torch.float32), wide)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """One group ``x [..., n]`` as codes and scales ``[...]``.

        The scale is rounded before the codes are chosen, so that its rounding is not an error of
        the values.
        """
        from sdk.kernels.lazy_torch import torch

        scale = self.round_scale(x.abs().amax(dim=-1))
        wide = scale.to(torch.float32).unsqueeze(-1)
        inverse = torch.where(wide > 0, 1.0 / wide, 0.0)
        codes = (x * inverse).clamp(-self.largest, self.largest)
        if not self.storage_dtype.is_floating_point:
            codes = _rounded(codes)
        return codes.masked_fill(wide.isnan(), 0.0).to(self.storage_dtype), scale

    def round_scale(self, peak: Tensor) -> Tensor:
        """The scale with which ``peak``, the largest magnitude of a group, has the largest code."""
        from sdk.kernels.lazy_torch import torch

        return (peak / self.largest).clamp(max=HALF_MAX).to(torch.float16)

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The values of float32 ``codes``, each with its scale."""
        from sdk.kernels.lazy_torch import torch

        return codes * scales.to(torch.float32)


@dataclass(frozen=True, kw_only=True)
class WordType(ScaledType):
    """Codes of 13 bits and a sign in int16, whose scale is a bfloat16.

    A scale of float16 would lose bits where the largest value of a group is below 0.5. It is
    rounded up, so that no code is above :attr:`largest`: sums of products then fit 32 bits
    (cpu/native/attention_integers.hpp). Groups whose largest value is at most 1e-30 become zeros.
    """

    scale: str = "bfloat16"

    def round_scale(self, peak: Tensor) -> Tensor:
        from sdk.kernels.lazy_torch import torch

        step = peak / self.largest
        above = (step.view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32)
        above = torch.where(peak > _NO_SIZE, above, 0.0)
        return torch.where(peak.isnan(), peak, above).to(torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class ZeroPointType(ScaledType):
    """Codes from 0 to :attr:`largest` with a scale and a zero point for each group.

    value = scale * (code - zero). Both share an int16: its low byte has the upper 8 bits of a
    float16 without its sign, its high byte the zero point in sixteenths. Two bytes for the two of
    them instead of one float16 scale lower the KL divergence of SmolLM2 with int4 keys from 0.050
    to 0.039.
    """

    scale: str = "int16"

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The middle of the group's range becomes the middle code, so that both ends have the same
        error.
        """
        from sdk.kernels.lazy_torch import torch

        low, high = x.amin(dim=-1).clamp(max=0.0), x.amax(dim=-1).clamp(min=0.0)
        half = ((high - low) / self.largest).clamp(max=HALF_MAX).to(torch.float16)
        exact = half.view(torch.int16).to(torch.int32)
        bits = ((exact + 63 + (exact >> 7 & 1)) >> 7).clamp(max=_LARGEST)
        scale = _short_scale(bits)
        inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
        middle = (high + low) * 0.5 * inverse
        zero = _rounded((self.largest / 2 - middle) * 16.0).clamp(0.0, 255.0)
        codes = _rounded(x * inverse.unsqueeze(-1) + (zero * 0.0625).unsqueeze(-1))
        codes = codes.clamp(0.0, self.largest)
        unknown = x.isnan().any(dim=-1)
        codes = codes.masked_fill(unknown.unsqueeze(-1), 0.0).to(self.storage_dtype)
        word = (zero.nan_to_num().to(torch.int32) << 8 | bits).masked_fill(unknown, _NAN)
        return codes, word.to(torch.int16)

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        from sdk.kernels.lazy_torch import torch

        bits = scales.to(torch.int32)
        return _short_scale(bits & 255) * (codes - (bits >> 8 & 255) / 16.0)


_ALL = (
    KVType(
        name="float32", aliases=("fp32",), bits=32, storage="float32", cpu_element=2, gpu_kind=0
    ),
    KVType(
        name="float16", aliases=("fp16",), short="16", bits=16, storage="float16",
        cpu_element=0, gpu_kind=0,
    ),
    KVType(
        name="bfloat16", aliases=("bf16",), bits=16, storage="bfloat16", cpu_element=1, gpu_kind=0
    ),
    # The error of a normally distributed value is about half that of a float16.
    WordType(
        name="int16", bits=16, storage="int16", groups=(64, 64), hadamard=True, largest=8191.0,
        cpu_element=14,
    ),
    ScaledType(
        name="int8", short="8", bits=8, storage="int8", groups=(64, 64), hadamard=True,
        largest=127.0, cpu_element=4, gpu_kind=1,
    ),
    ScaledType(
        name="fp8", aliases=("fp8_e4m3", "float8_e4m3fn"), bits=8, storage="float8_e4m3fn",
        largest=448.0, cpu_element=5, gpu_kind=2,
    ),
    # The range goes to 57344, but then the scales of ordinary heads would be too small for a
    # float16.
    ScaledType(
        name="fp8_e5m2", aliases=("float8_e5m2",), bits=8, storage="float8_e5m2", largest=448.0,
        cpu_element=6, gpu_kind=3,
    ),
    # Values of 80 dimensions have one scale. With groups of 64 and 16 the cache would hold 3.56
    # times the tokens of float16, not 3.64.
    ZeroPointType(
        name="int4", short="4", bits=4, storage="uint8", groups=(32, 64), one_group_below=1.5,
        hadamard=True, centred=True, largest=15.0, cpu_element=10, gpu_kind=4,
    ),
)  # fmt: skip
#: All types by name, in the order in which messages list them.
KV_TYPES: Mapping[str, KVType] = MappingProxyType({kind.name: kind for kind in _ALL})
#: Other names of the same types.
KV_ALIASES: Mapping[str, str] = MappingProxyType(
    {alias: kind.name for kind in _ALL for alias in kind.aliases}
)


def scale_group(head_dim: int, groups: int) -> int:
    """The dimensions that share a scale in a head of ``head_dim`` with ``groups`` scales."""
    return -(-head_dim // (32 * groups)) * 32


def _item_bytes(dtype: str) -> int:
    """Bytes of an element of a torch dtype, whose name contains its bits: float8_e5m2, uint8."""
    found = re.search(r"\d+", dtype)
    assert found is not None, dtype
    return int(found[0]) // 8


def _dtype(name: str) -> torch.dtype:
    from sdk.kernels.lazy_torch import torch

    found: torch.dtype = getattr(torch, name)
    return found


def _rounded(x: Tensor) -> Tensor:
    """``torch.round`` below 2**22. Larger values come out at least as large: float32 has no
    fractions from 2**23 on. ``torch.round`` itself wakes torch's threads on a CPU from 2,048 values
    on, other operations from 32,768: ``sdk/engine/rank/kv_transfer.py`` says what that costs.
    """
    return (x + _NO_FRACTIONS) - _NO_FRACTIONS


def _short_scale(bits: Tensor) -> Tensor:
    """The upper 8 bits of a float16 without its sign, int32 0..255, as float32."""
    from sdk.kernels.lazy_torch import torch

    return (bits << 7).to(torch.int16).view(torch.float16).to(torch.float32)
