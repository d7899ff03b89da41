"""Frozen numerics: what a weight or a KV cache is made of, printed and parsed as users write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

WeightKind = Literal["float", "int", "block"]

_FLOATS = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "fp8_e5m2": 8}
_LEGACY = {"q4_0": 4, "q4_1": 4, "q5_0": 5, "q5_1": 5, "q8_0": 8}
_BLOCKS = {**_LEGACY, "q2_k": 2, "q3_k": 3, "q4_k": 4, "q5_k": 5, "q6_k": 6}
_AFFINE = re.compile(r"w(?P<bits>[2-8])a(?P<act>8|16)(?:g(?P<group>\d+))?(?P<sym>s?)")


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Numerics of one weight.

    Written ``f32``, ``f16``, ``bf16``, ``fp8`` (e4m3), ``fp8_e5m2``; ``q4_0``, ``q4_k`` … for GGUF
    blocks;
    ``w4a16g128`` for 4-bit integers in groups of 128 with 16-bit activations, with a final ``s``
    when symmetric; no ``g`` means one group per output channel.
    """

    kind: WeightKind
    bits: int
    name: str = ""
    group: int | None = None
    symmetric: bool = False
    activation_bits: int = 16

    def __str__(self) -> str:
        if self.kind != "int":
            return self.name
        group = "" if self.group is None else f"g{self.group}"
        return f"w{self.bits}a{self.activation_bits}{group}{'s' if self.symmetric else ''}"

    @classmethod
    def parse(cls, text: str) -> QuantSpec:
        """The inverse of ``str()``. :raises ValueError: naming the text and the accepted forms."""
        if text in _FLOATS:
            return cls("float", _FLOATS[text], text)
        if text in _BLOCKS:
            return cls("block", _BLOCKS[text], text, group=32 if text in _LEGACY else 256)
        found = _AFFINE.fullmatch(text)
        if found is None:
            known = ", ".join([*_FLOATS, *_BLOCKS])
            raise ValueError(f"quant spec: expected {known} or w4a16g128-like, found {text!r}")
        group = found["group"]
        if group is not None and int(group) < 1:
            raise ValueError(f"quant spec: the group must be at least 1, found {text!r}")
        return cls(
            "int",
            int(found["bits"]),
            group=None if group is None else int(group),
            symmetric=bool(found["sym"]),
            activation_bits=int(found["act"]),
        )


_KV_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape and numerics of one model's KV cache on one rank.

    Per layer two tensors ``[num_pages, kv_heads, page_size, head_dim]`` of ``dtype``: ``float32``,
    ``float16``, ``bfloat16``, or ``int8`` with a float16 scale per token and head.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "float16"

    @property
    def layer_bytes(self) -> int:
        """Bytes of one page of one layer, keys and values with their scales."""
        scale = 2 if self.dtype == "int8" else 0
        width = self.head_dim * _KV_BYTES[self.dtype] + scale
        return 2 * self.kv_heads * self.page_size * width

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.num_layers * self.layer_bytes
