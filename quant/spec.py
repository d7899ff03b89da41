"""The numerics of weights and of KV caches, printed and parsed as users write them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from sdk.kernels.dataclass import dataclass
from sdk.kernels.kv.kv_types import KV_ALIASES, KV_TYPES, KVType
from sdk.quant.caches import AttentionCache, Cache, StateCache, rounded
from sdk.quant.safe_repr import safe_repr

if TYPE_CHECKING:
    from sdk.kernels.weights.layouts import ActivationScheme

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
    blocks; ``nf4``, ``fp4``, ``nvfp4`` … for codes that index a table, followed by ``g128`` if the
    group is not the format's default. ``bits`` counts bits in memory: iq1 to iq3 and tq1_0, whose
    files share bits between values, take more than their names say.
    ``w4a16g128`` means 4-bit integers in groups of 128 with 16-bit activations, with a final ``s``
    if symmetric; no ``g`` means one group per output channel. If the file asks for quantized
    activations, integers are written ``w8a8`` or, with 8-bit floats, ``w4afp8``; other names get
    the same ending: ``fp8afp8``.
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
        """The same weight with activations quantized as ``inputs`` says."""
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


_LINE = 64  # bytes of a cache line, at which tiered pages begin

#: The digits in ``k8v4`` and their types.
_KV_SHORT = {kind.short: kind.name for kind in KV_TYPES.values() if kind.short}
_KV_PAIR = re.compile("k({0})v({0})".format("|".join(_KV_SHORT)))
_KV_SKIP = re.compile(r"(?P<types>[^:]+)(?::skip=(?P<skip>\d+(?:\+\d+)*))?")


@dataclass(frozen=True, slots=True)
class KVTypes:
    """The types of keys and of values, and the layers that keep both in float16.

    Written as a name of ``KV_TYPES`` (kernels/kv/kv_types.py): ``float16``, ``int8``, ``fp8``;
    ``k8v4`` for int8 keys and int4 values (16: float16), ``int8/fp8`` for any two;
    ``int4:skip=0+29`` if layers 0 and 29 stay in float16.
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
            names = [KV_ALIASES.get(name, name) for name in names]
            skip = sorted({int(layer) for layer in (found["skip"] or "").split("+") if layer})
            if len(names) <= 2 and all(name in KV_TYPES for name in names):
                return cls(names[0], names[-1], tuple(skip))
        raise ValueError(
            f"expected {', '.join(KV_TYPES)}, k8v4-like or two of them as int8/fp8, "
            f"with :skip=0+1 for layers in float16, found {safe_repr(text)}"
        )

    @property
    def bytes_per_value(self) -> float:
        """Bytes of a key or value in a page on average, without scales."""
        pair = KV_TYPES[self.k].code_bytes(64), KV_TYPES[self.v].code_bytes(64)
        return sum(pair) / 128

    @property
    def on_gpu(self) -> bool:
        """Whether Triton kernels read both."""
        return all(KV_TYPES[name].gpu_kind is not None for name in (self.k, self.v))

    def of_layer(self, layer: int) -> tuple[KVType, KVType]:
        """The types of a layer's keys and values."""
        k, v = ("float16", "float16") if layer in self.skip_layers else (self.k, self.v)
        return KV_TYPES[k], KV_TYPES[v]


#: The types of a tiered cache: each has half the bits of the one before.
_TIERS = ("float16", "int8", "int4")


def parse_tiers(text: str) -> str:
    """``fp16>int8>int4`` as ``float16>int8>int4``. :raises ValueError: with the accepted forms."""
    names = tuple(KV_ALIASES.get(name, name) for name in text.replace(" ", "").split(">"))
    if any(len(names) > 1 and names == _TIERS[i : i + len(names)] for i in range(2)):
        return ">".join(names)
    raise ValueError(f"expected fp16>int8>int4, fp16>int8 or int8>int4, found {safe_repr(text)}")


def kv_bits(dtype: str) -> tuple[int, ...]:
    """Bits of a key or of a value, whichever has fewer; with tiers one number for each."""
    types = [KVTypes.parse(name) for name in dtype.split(">")]
    return tuple(min(KV_TYPES[one.k].bits, KV_TYPES[one.v].bits) for one in types)


@dataclass(frozen=True, slots=True)
class KVPart:
    """Keys or values of one layer in one page: their type, scales per head and token, and bytes.

    ``code_bytes`` and ``scale_bytes`` are each rounded up to 4, so that what follows is aligned.
    """

    type: KVType
    groups: int
    code_bytes: int
    scale_bytes: int


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape and numerics of one model's KV cache on one rank.

    Per layer keys and values ``[num_pages, kv_heads, page_size, head_dim]`` of the types in
    ``dtype`` (see :class:`KVTypes`): floats, or codes with a scale per token, head and group.
    Tiered pages, ``float16>int8>int4``, count as pages of the first type.
    ``caches``: what each layer keeps, where layers differ; empty: keys and values of all tokens.
    ``windows``: of the window groups, which have memory of their own; empty: all layers keep all
    tokens.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "float16"
    caches: tuple[Cache, ...] = ()
    windows: tuple[int, ...] = ()

    def cache(self, layer: int) -> AttentionCache:
        """The shape of one layer's keys and values."""
        if not self.caches:
            return AttentionCache(self.kv_heads, self.head_dim, self.head_dim)
        found = self.caches[layer]
        assert isinstance(found, AttentionCache)  # not one of a state's: see region
        return found

    def region(self, layer: int) -> int:
        """In which memory a layer's cache is: 0 is that of pages, which has all layers that keep
        all tokens, ``1 + group`` that of a window group's frames, and the last that of states."""
        if not self.caches:
            return 0
        found = self.caches[layer]
        if isinstance(found, StateCache):
            return self.num_regions - 1
        return 1 + self.windows.index(found.window) if found.window in self.windows else 0

    @property
    def num_regions(self) -> int:
        """How many memories there are; some may be empty."""
        return 2 + len(self.windows)

    @property
    def with_rounded_states(self) -> KVSpec:
        """The spec with states as snapshots keep them in 16 bits."""
        caches = (rounded(one) if isinstance(one, StateCache) else one for one in self.caches)
        return replace(self, caches=tuple(caches))

    def layers_in(self, region: int) -> list[int]:
        """The layers whose caches are in one memory."""
        return [layer for layer in range(self.num_layers) if self.region(layer) == region]

    def region_bytes(self, region: int) -> int:
        """Bytes of one page, of one frame, or of one sequence's states, over all layers there."""
        layers = self.layers_in(region)
        if region == self.num_regions - 1:
            return sum(one.nbytes for one in self.caches if isinstance(one, StateCache))
        return self.page_bytes if region == 0 else sum(map(self.layer_bytes, layers))

    def parts(self, layer: int) -> tuple[KVPart, KVPart]:
        """The keys and the values of one layer in one page."""
        k, v = KVTypes.parse(self.dtype).of_layer(layer)
        cache = self.cache(layer)
        values = 0 if cache.latent else cache.value_dim
        return self._part(k, 0, cache.kv_heads, cache.key_dim), self._part(
            v, 1, cache.kv_heads, values
        )

    @property
    def key_type(self) -> KVType:
        """Of the keys, except in layers that are kept in another type."""
        return KV_TYPES[KVTypes.parse(self.dtype).k]

    def _part(self, kind: KVType, side: int, heads: int, width: int) -> KVPart:
        groups = kind.scales_per_head(width, side) if width else 0
        slots = heads * self.page_size
        codes = kind.code_bytes(slots * width)
        scales = slots * groups * kind.scale_bytes
        return KVPart(kind, groups, -(-codes // 4) * 4, -(-scales // 4) * 4)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one page of one layer, keys and values with their scales."""
        return sum(part.code_bytes + part.scale_bytes for part in self.parts(layer))

    def of_layers(self, layers: range) -> KVSpec:
        """The cache of these layers only; the first of them is layer 0 of it."""
        dtype = self.dtype
        if ">" not in dtype:
            types = KVTypes.parse(dtype)
            skipped = tuple(i - layers.start for i in types.skip_layers if i in layers)
            dtype = str(replace(types, skip_layers=skipped))
        caches = self.caches[layers.start : layers.stop]
        return replace(self, num_layers=len(layers), dtype=dtype, caches=caches)

    @property
    def tiers(self) -> tuple[KVSpec, ...]:
        """One for each type of a tiered cache; without a tiered cache the spec itself."""
        return tuple(replace(self, dtype=dtype) for dtype in self.dtype.split(">"))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers that keep all tokens.

        Two tiered pages's next tier fit into one page. With 64 dimensions the scales of int8
        make float16 pages 3 % larger, those of int4 9 %.
        """
        tiers = self.tiers
        most = 0
        for index, tier in enumerate(tiers):
            size = sum(tier.layer_bytes(layer) for layer in self.layers_in(0))
            most = max(most, size << index)
        line = _LINE << len(tiers) - 1 if len(tiers) > 1 else 1
        return -(-most // line) * line
