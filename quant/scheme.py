"""Quantization schemes: the names users write, and what they mean."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from sdk.kernels.dataclass import dataclass
from sdk.quant.errors import QuantizationError
from sdk.quant.methods.gguf_mixtures import FILE_TYPES
from sdk.quant.spec import QuantSpec

Method = Literal["rtn", "hqq", "gptq", "awq", "smoothquant", "fp8", "float4", "gguf"]
Container = Literal["gptq", "awq", "hqq", "compressed-tensors", "gguf"]

#: Columns per scale of embedding and head, below 8 bits.
_HEAD_GROUP = 64
#: Columns per scale if the name does not say.
_GROUPS = {"rtn": None, "hqq": 64, "gptq": 128, "awq": 128, "smoothquant": None}
_CONTAINERS: dict[str, Container] = {"gptq": "gptq", "awq": "awq", "hqq": "hqq", "gguf": "gguf"}
_WITH_DATA = ("gptq", "awq", "smoothquant")
_SHORT = {
    "int8": "rtn-w8s-h8", "int4": "hqq-w4g64-h8", "w8a8": "smoothquant-w8",
    "hqq": "hqq-w4g64", "gptq": "gptq-w4g128", "awq": "awq-w4g128", "rtn": "rtn-w8s",
    "smoothquant": "smoothquant-w8", "fp8": "fp8-channel",
}  # fmt: skip
_INTEGERS = re.compile(
    r"(?P<method>rtn|hqq|gptq|awq|smoothquant)-w(?P<bits>[2-8])(?:a(?P<act>8|16))?"
    r"(?:g(?P<group>[1-9]\d{0,5}))?(?P<sym>s?)(?P<order>-act)?(?P<mixed>-mix)?"
    r"(?:-h(?P<head>[4-8]))?"
)
#: Value and MLP output projections get more bits with ``-mix``, as in llama.cpp's mixtures.
MATTERING = ("v_proj", "down_proj")
#: GGUF types that gain nothing from GPTQ.
_EASY = ("f16", "q8_0", "mxfp4")
_FLOAT4 = ("mxfp4", "nvfp4")
_FLOAT8 = re.compile(r"fp8-(tensor|channel|block)")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How to quantize a model, and the file format for the result.

    Schemes are written like ``gptq-w4g128``: method, bits, columns per scale. Without ``g``,
    ``rtn`` and ``smoothquant`` have one scale per output channel, the others 128 or 64 columns per
    scale. Suffixes:

    * ``s``: symmetric grids.
    * ``-act``: GPTQ groups in the order of importance.
    * ``-mix``: GPTQ with one bit more for value and MLP output projections.
    * ``-h6``: embedding and head in 6 bits (4 to 8); otherwise they stay as they are. Only this
      package reads such files: transformers would leave the embedding randomly initialized.

    Other schemes are ``fp8-tensor``, ``fp8-channel``, ``fp8-block``; ``mxfp4``, ``nvfp4``; a GGUF
    type or mixture (``q4_0``, ``q4_k_m``), quantized by GPTQ if prefixed with ``gptq-``; and the
    short names ``int4`` (``hqq-w4g64-h8``), ``int8`` (``rtn-w8s-h8``), ``w8a8``, ``gptq``, ``awq``,
    ``hqq``, ``fp8``.
    """

    text: str
    method: Method
    container: Container
    #: The type of the matrices of blocks: integers, GGUF blocks or floats.
    spec: QuantSpec
    #: 8-bit floats: which values share a scale.
    share: str = ""
    #: GPTQ: groups are formed in the order of importance.
    sorted_columns: bool = False
    #: Type of the embedding and head; None leaves them as they are.
    head: QuantSpec | None = None
    #: Type of the ``MATTERING`` matrices, if they get more bits than ``spec``.
    more: QuantSpec | None = None
    #: GGUF: the key of ``FILE_TYPES``.
    mixture: str = ""

    @property
    def needs_data(self) -> bool:
        """Whether the method needs calibration text."""
        return self.method in _WITH_DATA

    def head_bytes(self, rows: int, columns: int) -> int:
        """Bytes in memory of an embedding or head ``[rows, columns]``."""
        assert self.head is not None
        groups = rows * -(-columns // (self.head.group or columns))
        return rows * -(-columns * self.head.bits // 8) + groups * (2 if self.head.symmetric else 3)

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Bytes in memory of a layer's matrix ``[rows, columns]``, for methods without data."""
        if self.method == "fp8":
            tiles = {"tensor": 1, "channel": rows, "block": -(-rows // 128) * -(-columns // 128)}
            return rows * columns + 4 * tiles[self.share]
        if self.method == "float4":
            each = rows * columns // (self.spec.group or columns)
            return rows * columns // 2 + each + (4 * rows if self.text == "nvfp4" else 0)
        groups = rows * -(-columns // (self.spec.group or columns))
        per_group = 4 if self.method == "hqq" else 2 if self.spec.symmetric else 3
        return rows * -(-columns * self.spec.bits // 8) + groups * per_group

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """:raises QuantizationError: the name is unknown; the message suggests the nearest one."""
        name = _SHORT.get(text.lower(), text.lower())
        mixture = name.removeprefix("gptq-")
        by: Method = "gguf" if mixture == name else "gptq"
        if mixture in FILE_TYPES and (by == "gguf" or FILE_TYPES[mixture].base not in _EASY):
            kind = QuantSpec.parse(FILE_TYPES[mixture].base)
            return cls(name, by, "gguf", kind, mixture=mixture)
        if name in _FLOAT4:
            return cls(name, "float4", "compressed-tensors", QuantSpec.parse(name))
        floats = _FLOAT8.fullmatch(name)
        if floats is not None:
            spec = QuantSpec.parse("fp8")
            return cls(name, "fp8", "compressed-tensors", spec, share=floats[1])
        found = _INTEGERS.fullmatch(name)
        if found is None:
            known = [*_SHORT, *FILE_TYPES, *_FLOAT4, "fp8-tensor", "fp8-channel", "fp8-block"]
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise QuantizationError(
                f"scheme: expected one of {', '.join(known)} or a name like gptq-w4g128, "
                f"found {text[:80]!r}{hint}"
            )
        return cls._of_integers(name, found)

    @classmethod
    def _of_integers(cls, name: str, found: re.Match[str]) -> Scheme:
        method = found["method"]
        bits = int(found["bits"])
        group = int(found["group"]) if found["group"] else _GROUPS[method]
        smooth = method == "smoothquant"
        spec = QuantSpec("int", bits, group=group, symmetric=bool(found["sym"]) or smooth)
        if smooth or found["act"] == "8":
            spec = replace(spec, activation_bits=8)
        head = None
        if found["head"]:
            few = int(found["head"]) < 8
            head = QuantSpec("int", int(found["head"]), group=_HEAD_GROUP if few else None)
            head = replace(head, symmetric=not few)
        container = _CONTAINERS.get(method, "compressed-tensors")
        more = replace(spec, bits=bits + 1) if found["mixed"] else None
        if method == "gptq" and (head is not None or more is not None):
            container = "compressed-tensors"
        wrong = None
        if method == "awq" and (bits != 4 or spec.symmetric):
            wrong = "awq files hold only 4 bits with zero points"
        elif found["order"] and method != "gptq":
            wrong = "-act needs gptq"
        elif spec.activation_bits == 8 and (bits != 8 or group is not None):
            wrong = "8-bit activations need 8-bit weights with one scale per output channel"
        elif head is not None and container == "awq":
            wrong = "awq files cannot hold a quantized embedding (-h)"
        elif more is not None and (method != "gptq" or bits == 8):
            wrong = "-mix adds one bit and needs gptq with 2 to 7 bits"
        elif found["order"] and container == "compressed-tensors":
            wrong = "-act needs a gptq file, but -h and -mix need a compressed-tensors file"
        elif method == "hqq" and (bits in (5, 6, 7) or spec.symmetric):
            wrong = "hqq needs 2, 3, 4 or 8 bits with zero points"
        elif container == "gptq" and bits in (5, 6, 7):
            wrong = "gptq files hold only 2, 3, 4 or 8 bits"
        if wrong is not None:
            raise QuantizationError(f"scheme: {name}: {wrong}")
        return cls(
            name,
            method,  # type: ignore[arg-type]  # the pattern admits only methods
            container,
            spec,
            sorted_columns=bool(found["order"]),
            head=head,
            more=more,
        )

    def spec_of(self, name: str) -> QuantSpec:
        """The type of a layer's matrix ``name``."""
        return self.more if self.more is not None and name.endswith(MATTERING) else self.spec

    def check(self, name: str, columns: int, widths: Collection[int] = ()) -> None:
        """Check that rows of ``columns`` divide into groups.

        ``widths``: columns of the model's other matrices, which the suggested group fits as well.

        :raises QuantizationError: they do not divide; the message suggests a scheme that fits.
        """
        group = self.spec.group
        if self.container != "gguf" and group is not None and columns % group:
            sizes = (128, 64, 32, 16)
            fits = next((g for g in sizes if not any(w % g for w in (columns, *widths))), None)
            instead = "a scheme without groups, such as fp8"
            if fits is not None and f"g{group}" in self.text:
                instead = f"groups of {fits}, {self.text.replace(f'g{group}', f'g{fits}')}"
            raise QuantizationError(
                f"{name}: {columns} columns do not divide into groups of {group} ({self.text}); "
                f"use {instead}"
            )
