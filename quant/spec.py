"""Frozen numerics: what a weight or a KV cache is made of, printed and parsed as users write it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from sdk.quant.safe_repr import safe_repr

if TYPE_CHECKING:
    from sdk.kernels.layouts import ActivationScheme

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
_AFFINE = re.compile(
    r"w(?P<bits>[2-8])a(?P<float>fp(?=[48]))?(?P<act>16|[2-8])(?:g(?P<group>\d+))?(?P<sym>s?)"
)
_ROUNDED = re.compile(r"(?P<name>[a-z0-9_]+?)a(?P<float>fp(?=[48]))?(?P<act>[2-8])")


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Numerics of one weight.

    Written ``f32``, ``f16``, ``bf16``, ``fp8`` (e4m3), ``fp8_e5m2``; ``q4_0``, ``q4_k`` … for GGUF
    blocks; ``nf4``, ``fp4``, ``nvfp4`` … for codes that index a table, with ``g128`` behind the
    name where the group is not the format's own; ``bits`` counts those in memory, where iq1 to iq3
    and tq1_0, whose files share bits between values, take more than their names say;
    ``w4a16g128`` for 4-bit integers in groups of 128 with 16-bit activations, with a final ``s``
    when symmetric; no ``g`` means one group per output channel. Where the file rounds what the
    weight is multiplied with, integers say ``w8a8`` or, to 8-bit floats, ``w4afp8``; other names
    end so: ``fp8afp8``.
    """

    kind: WeightKind
    bits: int
    name: str = ""
    group: int | None = None
    symmetric: bool = False
    activation_bits: int = 16
    float_activations: bool = False

    def __str__(self) -> str:
        inputs = f"a{'fp' if self.float_activations else ''}{self.activation_bits}"
        if self.kind == "int":
            group = "" if self.group is None else f"g{self.group}"
            return f"w{self.bits}{inputs}{group}{'s' if self.symmetric else ''}"
        name = self.name
        if self.kind == "table" and self.group != _TABLES[self.name][1]:
            name = f"{name}g{self.group}"
        return name if self.activation_bits == 16 else name + inputs

    def rounding(self, inputs: ActivationScheme | None) -> QuantSpec:
        """The same, multiplied with ``inputs`` that are rounded so."""
        if inputs is None:
            return self
        return replace(self, activation_bits=inputs.bits, float_activations=inputs.floats)

    @classmethod
    def parse(cls, text: str) -> QuantSpec:
        """The inverse of ``str()``. :raises ValueError: naming the text and the accepted forms."""
        plain = cls._named(text)
        if plain is not None:
            return plain
        rounded = _ROUNDED.fullmatch(text)
        plain = None if rounded is None else cls._named(rounded["name"])
        if plain is not None and rounded is not None:
            bits, is_float = int(rounded["act"]), rounded["float"] is not None
            return replace(plain, activation_bits=bits, float_activations=is_float)
        found = _AFFINE.fullmatch(text)
        if found is None:
            known = ", ".join([*_FLOATS, *_BLOCKS, *_TABLES])
            raise ValueError(
                f"quant spec: expected {known} or w4a16g128-like, found {safe_repr(text)}"
            )
        group = found["group"]
        if group is not None and int(group) < 1:
            raise ValueError(f"quant spec: the group must be at least 1, found {text!r}")
        return cls(
            "int",
            int(found["bits"]),
            group=None if group is None else int(group),
            symmetric=bool(found["sym"]),
            activation_bits=int(found["act"]),
            float_activations=found["float"] is not None,
        )

    @classmethod
    def _named(cls, text: str) -> QuantSpec | None:
        """Floats, blocks and tables."""
        if text in _FLOATS:
            return cls("float", _FLOATS[text], text)
        if text in _BLOCKS:
            bits, size = _BLOCKS[text]
            return cls("block", bits, text, group=size)
        table = _TABLE.fullmatch(text)
        if table is None or table["name"] not in _TABLES:
            return None
        bits, size = _TABLES[table["name"]]
        return cls("table", bits, table["name"], group=int(table["group"] or size))


_LINE = 64  # bytes of a cache line, at which pages of a ladder begin

#: Types of keys and values: bits of an element.
_KV_BITS = {
    "float32": 32, "float16": 16, "bfloat16": 16,
    "int8": 8, "fp8": 8, "fp8_e5m2": 8, "int4": 4,
}  # fmt: skip
_KV_ALIASES = {
    "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8_e5m2",
    "fp32": "float32", "fp16": "float16", "bf16": "bfloat16",
}  # fmt: skip
_KV_SHORT = {"16": "float16", "8": "int8", "4": "int4"}
_KV_PAIR = re.compile(r"k(16|8|4)v(16|8|4)")
_KV_SKIP = re.compile(r"(?P<types>[^:]+)(?::skip=(?P<skip>\d+(?:\+\d+)*))?")
#: Dimensions that share a scale, of keys and of values; the others have one for a whole head. Each
#: takes 2 bytes. In int4 a head of less than one and a half groups has one: values of 80 dimensions
#: (64 and 16 would make it 3.56 times the tokens of float16, not 3.64).
_KV_GROUPS = {"int8": (64, 64), "int4": (32, 64)}


@dataclass(frozen=True, slots=True)
class KVTypes:
    """The types of keys and of values, and the layers that keep both in float16.

    Written ``float32``, ``float16``, ``bfloat16``, ``int8``, ``fp8`` (e4m3), ``fp8_e5m2``,
    ``int4``; ``k8v4`` for int8 keys and int4 values (16: float16), ``int8/fp8`` for any two;
    ``int4:skip=0+29`` where layers 0 and 29 stay in float16.
    """

    k: str
    v: str
    skip_layers: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = self.k if self.k == self.v else f"{self.k}/{self.v}"
        short = {name: bits for bits, name in _KV_SHORT.items()}
        if self.k != self.v and self.k in short and self.v in short:
            text = f"k{short[self.k]}v{short[self.v]}"
        return text + (f":skip={'+'.join(map(str, self.skip_layers))}" if self.skip_layers else "")

    @classmethod
    def parse(cls, text: str) -> KVTypes:
        """The inverse of ``str()``. :raises ValueError: naming the text and the accepted forms."""
        found = _KV_SKIP.fullmatch(text)
        if found is not None:
            pair = _KV_PAIR.fullmatch(found["types"])
            names = found["types"].split("/")
            if pair is not None:
                names = [_KV_SHORT[bits] for bits in pair.groups()]
            names = [_KV_ALIASES.get(name, name) for name in names]
            skip = sorted({int(layer) for layer in (found["skip"] or "").split("+") if layer})
            if len(names) <= 2 and all(name in _KV_BITS for name in names):
                return cls(names[0], names[-1], tuple(skip))
        raise ValueError(
            f"expected {', '.join(_KV_BITS)}, k8v4-like or two of them as int8/fp8, "
            f"with :skip=0+1 for layers in float16, found {safe_repr(text)}"
        )

    @property
    def bytes_per_value(self) -> float:
        """Of a key or value on average, without its share of a scale."""
        return (_KV_BITS[self.k] + _KV_BITS[self.v]) / 16

    def of_layer(self, layer: int) -> tuple[str, str]:
        """The types of its keys and its values."""
        return ("float16", "float16") if layer in self.skip_layers else (self.k, self.v)


#: What a ladder may go down: each type takes half the bits of the one before.
_LADDER = ("float16", "int8", "int4")


def parse_ladder(text: str) -> str:
    """``fp16>int8>int4`` as ``float16>int8>int4``. :raises ValueError: with the accepted forms."""
    names = tuple(_KV_ALIASES.get(name, name) for name in text.replace(" ", "").split(">"))
    if any(len(names) > 1 and names == _LADDER[i : i + len(names)] for i in range(2)):
        return ">".join(names)
    raise ValueError(f"expected fp16>int8>int4, fp16>int8 or int8>int4, found {safe_repr(text)}")


def kv_bits(dtype: str) -> tuple[int, ...]:
    """Bits of the keys or values, whichever are fewer; of a ladder those of each type."""
    types = [KVTypes.parse(name) for name in dtype.split(">")]
    return tuple(min(_KV_BITS[one.k], _KV_BITS[one.v]) for one in types)


@dataclass(frozen=True, slots=True)
class KVPart:
    """Keys or values of one layer in one page: ``code_bytes`` and the bytes of their scales.

    Each is rounded up to 4 bytes, so that what follows is aligned.
    """

    dtype: str
    groups: int
    code_bytes: int
    scale_bytes: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape and numerics of one model's KV cache on one rank.

    Per layer keys and values ``[num_pages, kv_heads, page_size, head_dim]`` in what ``dtype``
    says (see :class:`KVTypes`): floats, or codes with 2 bytes of scale per token, head and group.
    Of a ladder, ``float16>int8>int4``, pages are counted as those of its first type.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "float16"

    def parts(self, layer: int) -> tuple[KVPart, KVPart]:
        """The keys and the values of one layer in one page."""
        k, v = KVTypes.parse(self.dtype).of_layer(layer)
        return self._part(k, 0), self._part(v, 1)

    def _part(self, dtype: str, side: int) -> KVPart:
        groups = 0
        if _KV_BITS[dtype] <= 8:
            group = _KV_GROUPS.get(dtype, (self.head_dim, self.head_dim))[side]
            whole = dtype == "int4" and 2 * self.head_dim < 3 * group
            groups = 1 if whole else -(-self.head_dim // group)
        slots = self.kv_heads * self.page_size
        code_bytes = slots * self.head_dim * _KV_BITS[dtype] // 8
        return KVPart(dtype, groups, -(-code_bytes // 4) * 4, -(-slots * groups * 2 // 4) * 4)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one page of one layer, keys and values with their scales."""
        return sum(part.code_bytes + part.scale_bytes for part in self.parts(layer))

    @property
    def levels(self) -> tuple[KVSpec, ...]:
        """One for each type of a ladder; of anything else itself."""
        return tuple(replace(self, dtype=dtype) for dtype in self.dtype.split(">"))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers.

        Two pages of a ladder's next level take the place of one: int8 makes float16 pages 3 %
        larger by its scales, int4 9 % (64 dimensions).
        """
        levels = self.levels
        most = 0
        for index, level in enumerate(levels):
            size = sum(level.layer_bytes(layer) for layer in range(self.num_layers))
            most = max(most, size << index)
        line = _LINE << len(levels) - 1 if len(levels) > 1 else 1
        return -(-most // line) * line
