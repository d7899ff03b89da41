"""Random weights in many formats, made on the card, with scales that keep sums near 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sdk.bench.gpu.card import Card, expect_close
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.reference.linear import slice_rows
from sdk.kernels.registry import linear_problem
from sdk.kernels.weights.layouts import (
    BLOCK_TYPES,
    ActivationScheme,
    Affine,
    Blocks,
    Float8,
    Layout,
    inputs_of,
)

#: Offsets of the float16 scales in a block; its other bytes may be anything.
_SCALES_AT = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "q4_0": (0,), "q8_0": (0,)}
_SCALES_AT |= {"q5_0": (0,), "iq4_nl": (0,), "iq4_xs": (0,)}
#: Rows that are compared with their dequantized values before anything is timed.
_COMPARED = 64


def affine(card: Card, n: int, k: int, bits: int, group: int) -> Affine:
    """Symmetric integers with bfloat16 scales, as GPTQ files have them."""
    codes = card.integers(0, 256, n, k * bits // 8)
    shape = (n, -(-k // group))
    scale = card.normal(*shape, dtype=torch.float32).abs() + 0.5
    scale = (scale / (2**bits * 0.3 * k**0.5)).bfloat16()
    return Affine((n, k), bits, group, codes, scale, zero=1 << (bits - 1))


def blocks(card: Card, n: int, k: int, type: str) -> Blocks:
    """Blocks of a GGUF type: random bytes with ordinary scales."""
    kind = BLOCK_TYPES[type]
    count = k // kind.elements
    data = card.integers(0, 256, n, count, kind.nbytes)
    if type == "mxfp4":
        data[:, :, 0] = 118
    else:
        for at in _SCALES_AT.get(type, (0, 2)):
            scale = card.normal(n, count, 1, dtype=torch.float32).abs().mul(1e-3).half()
            data[:, :, at : at + 2] = scale.view(torch.uint8)
    return Blocks((n, k), type, data.view(n, -1))


def float8(card: Card, n: int, k: int) -> Float8:
    """8-bit floats with a scale per row, as in files that also want 8-bit float activations."""
    values = card.normal(n, k).mul_(64).to(torch.float8_e4m3fn)
    scale = torch.full((n, 1), 1 / (64 * k**0.5), device=card.device)
    return Float8(values, scale, (1, k), inputs=ActivationScheme("e4m3"))


def int8(card: Card, n: int, k: int) -> Affine:
    """Integers with a scale per row, as in files that also want integer activations (W8A8)."""
    return replace(affine(card, n, k, 8, k), inputs=ActivationScheme("int"))


def table(card: Card, n: int, k: int, bits: int) -> Affine:
    """Two levels of scales, as IQ1 to IQ3 files have once they are loaded."""
    whole = affine(card, n, k, bits, 32)
    values = torch.linspace(-1, 1, 1 << bits, device=card.device) ** 3
    return Affine(
        (n, k),
        bits,
        32,
        whole.codes,
        card.integers(1, 64, n, k // 32),
        table=values,
        super_scale=torch.full((n, k // 256), 1e-3, dtype=torch.float16, device=card.device),
        super_group=256,
    )


class Weights:
    """Weights of one shape and format, packed by the kernel that an engine selects for them.

    There are enough copies that none is still in the cache when its turn comes.
    """

    def __init__(self, card: Card, make: Callable[[], Layout]) -> None:
        first = make()
        problem = linear_problem(first, "auto", 8)
        self._card = card
        self._first = first
        self.kernel = card.choose(problem)
        self.packed = [self.kernel.pack(first)]
        self.nbytes: int = self.kernel.nbytes(self.packed[0])
        for _ in range(card.copies(self.nbytes) - 1):
            self.packed.append(self.kernel.pack(make()))

    def seconds(self, tokens: int) -> float:
        """Seconds of one product with this many tokens, after its result was checked."""
        n, k = self._first.shape
        x = self._card.normal(tokens, k)
        out = torch.full((tokens, n), torch.nan, device=self._card.device)
        self.kernel.matmul(self.packed[0], x, out)
        self._check(x, out)

        def call(packed: object) -> Callable[[], None]:
            return lambda: self.kernel.matmul(packed, x, out)

        return self._card.time([call(packed) for packed in self.packed])

    def _check(self, x: Tensor, out: Tensor) -> None:
        n = self._first.shape[0]
        scheme = inputs_of(self._first)
        seen = x.float() if scheme is None else fake_quantize(x.float(), scheme)
        for start in (0, max(0, n - _COMPARED)):
            rows = slice_rows(self._first, start, min(start + _COMPARED, n))
            expected = seen.double() @ decode(rows).double().t()
            what = f"{self.kernel.name} with {x.shape[0]} tokens"
            expect_close(what, out[:, start : start + _COMPARED], expected, 1e-2)
