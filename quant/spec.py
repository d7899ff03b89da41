"""Frozen numerics: what a weight or a KV cache is made of, printed and parsed as users write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

WeightKind = Literal["float", "int", "block", "table"]

_FLOATS = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "fp8_e5m2": 8}
#: GGUF blocks of integers: bits of a code and values of a block.
_BLOCKS = {
    "q4_0": (4, 32), "q4_1": (4, 32), "q5_0": (5, 32), "q5_1": (5, 32), "q8_0": (8, 32),
    "q2_k": (2, 256), "q3_k": (3, 256), "q4_k": (4, 256), "q5_k": (5, 256), "q6_k": (6, 256),
    "q2_0": (2, 64), "tq1_0": (2, 256), "tq2_0": (2, 256),
}  # fmt: skip
#: Codes that index a table: bits of a code in memory and values that share a scale.
_TABLES = {
    "nf4": (4, 64), "fp4": (4, 64), "mxfp4": (4, 32), "nvfp4": (4, 16),
    "iq1_s": (3, 32), "iq1_m": (3, 16), "iq2_xxs": (3, 32), "iq2_xs": (3, 16), "iq2_s": (3, 16),
    "iq3_xxs": (4, 32), "iq3_s": (4, 32), "iq4_nl": (4, 32), "iq4_xs": (4, 32), "q1_0": (1, 128),
}  # fmt: skip
_TABLE = re.compile(r"(?P<name>[a-z0-9_]+?)(?:g(?P<group>[1-9]\d*))?")
_AFFINE = re.compile(r"w(?P<bits>[2-8])a(?P<act>8|16)(?:g(?P<group>\d+))?(?P<sym>s?)")


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Numerics of one weight.

    Written ``f32``, ``f16``, ``bf16``, ``fp8`` (e4m3), ``fp8_e5m2``; ``q4_0``, ``q4_k`` … for GGUF
    blocks; ``nf4``, ``fp4``, ``nvfp4`` … for codes that index a table, with ``g128`` behind the
    name where the group is not the format's own; ``bits`` counts those in memory, where iq1 to iq3
    and tq1_0, whose files share bits between values, take more than their names say;
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
        if self.kind == "table" and self.group != _TABLES[self.name][1]:
            return f"{self.name}g{self.group}"
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
            bits, size = _BLOCKS[text]
            return cls("block", bits, text, group=size)
        table = _TABLE.fullmatch(text)
        if table is not None and table["name"] in _TABLES:
            bits, size = _TABLES[table["name"]]
            return cls("table", bits, table["name"], group=int(table["group"] or size))
        found = _AFFINE.fullmatch(text)
        if found is None:
            known = ", ".join([*_FLOATS, *_BLOCKS, *_TABLES])
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
