"""Products with packed weights, relative to the card's limits, cuBLAS and torch's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sdk.bench.gpu.card import Card, expect_close
from sdk.bench.gpu.rows import Finding, ratio, share, without
from sdk.bench.gpu.weights import Weights, affine, blocks, float8, table
from sdk.kernels.reference.decode import unpack_codes
from sdk.kernels.weights.layouts import BLOCK_TYPES

GROUP = 128
#: Tokens -> floor and goal in % of the copy bandwidth, and relative to cuBLAS.
_W4 = {
    1: ((40, 60), (2.0, 2.9)),
    8: ((40, 60), (2.0, 2.9)),
    16: ((40, 60), (2.0, 2.9)),
    32: ((35, 55), (1.7, 2.6)),
    64: ((25, 42), (1.2, 2.0)),
}
#: The same relative to torch's 4-bit product.
_INT4PACK = {1: (0.85, 1.2), 8: (1.8, 2.5), 16: (3.0, 4.5), 64: (6.0, 10.0)}
_FP8 = {1: (0.9, 1.2), 16: (0.9, 1.2), 64: (0.9, 1.2), 1024: (0.8, 0.95), 4096: (0.8, 0.95)}


def product_shape(card: Card) -> tuple[int, int]:
    return card.size(8192, 48), card.size(16384, 512)


def _tokens(card: Card, number: int) -> int:
    return card.size(number, min(number, 3))


def measure_w4(card: Card) -> Iterator[Finding]:
    """4 bits in groups of 128, few tokens."""
    n, k = product_shape(card)
    weights = Weights(card, lambda: affine(card, n, k, 4, GROUP))
    for tokens, (of_copy, of_library) in _W4.items():
        seconds = weights.seconds(_tokens(card, tokens))
        us, what = seconds * 1e6, f"W4A16 g128 {n}x{k}, {tokens} tokens"
        speed = weights.nbytes / seconds / card.copy
        yield share(what, "copy bandwidth", speed, of_copy, us=us)
        library = _library_seconds(card, n, k, _tokens(card, tokens))
        yield ratio(
            what, "cuBLAS bf16", library / seconds, of_library, us=us, library_us=library * 1e6
        )
        if tokens in _INT4PACK:
            found = _against_int4pack(card, n, k, tokens, seconds, what)
            yield from without(found, what, "_weight_int4pack_mm")


def _library_seconds(card: Card, n: int, k: int, tokens: int) -> float:
    """Seconds of a plain bfloat16 product of this shape."""
    count = card.copies(2 * n * k)
    dense = [card.normal(n, k) for _ in range(count)]
    x, out = card.normal(tokens, k), card.normal(tokens, n)

    def call(w: Tensor) -> Any:
        return lambda: torch.mm(x, w.t(), out=out)

    return card.time([call(w) for w in dense])


def _against_int4pack(
    card: Card, n: int, k: int, tokens: int, seconds: float, what: str
) -> Iterator[Finding]:
    """torch's own 4-bit product (tinygemm) on weights of the same format."""
    if card.tiny:
        raise RuntimeError("runs only on a GPU")
    api = torch.ops.aten
    x, packed = card.normal(tokens, k), []
    for number in range(card.copies(n * k // 2)):
        w = affine(card, n, k, 4, GROUP)
        codes = unpack_codes(w.codes, 4, k)
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()  # even columns are the high bits
        scale = torch.stack([w.scale, torch.zeros_like(w.scale)], dim=2).transpose(0, 1)
        packed.append((api._convert_weight_to_int4pack(pairs, 8), scale.contiguous()))
        if number == 0:
            whole = (codes.float() - 8) * w.scale.float().repeat_interleave(GROUP, dim=1)
            out = api._weight_int4pack_mm(x, packed[0][0], GROUP, packed[0][1])
            expect_close("_weight_int4pack_mm", out, x.float() @ whole.t(), 2e-2)

    def call(w: Tensor, scale: Tensor) -> Any:
        return lambda: api._weight_int4pack_mm(x, w, GROUP, scale)

    theirs = card.time([call(w, scale) for w, scale in packed])
    numbers = {"us": seconds * 1e6, "peer_us": theirs * 1e6}
    yield ratio(what, "_weight_int4pack_mm", theirs / seconds, _INT4PACK[tokens], **numbers)


def measure_large(card: Card) -> Iterator[Finding]:
    """Prompts: 4 and 8 bits relative to a plain product."""
    n, k = product_shape(card)
    for bits in (4, 8):
        weights = Weights(card, lambda bits=bits: affine(card, n, k, bits, GROUP))  # type: ignore[misc]
        for tokens in (512, 2048):
            seconds = weights.seconds(_tokens(card, tokens))
            library = _library_seconds(card, n, k, _tokens(card, tokens))
            numbers = {"us": seconds * 1e6, "library_us": library * 1e6}
            what = f"W{bits}A16 g128 {n}x{k}, {tokens} tokens"
            yield ratio(what, "cuBLAS bf16", library / seconds, (0.8, 0.92), **numbers)


def measure_fp8(card: Card) -> Iterator[Finding]:
    """8-bit floats on both sides. Ours starts with bfloat16 activations and quantizes them;
    torch's product gets them quantized."""
    n, k = product_shape(card)
    weights = Weights(card, lambda: float8(card, n, k))
    for tokens, target in _FP8.items():
        what = f"FP8 W8A8 {n}x{k}, {tokens} tokens"
        seconds = weights.seconds(_tokens(card, tokens))
        speed = weights.nbytes / seconds / card.copy
        yield share(what, "copy bandwidth", speed, us=seconds * 1e6)
        found = _against_scaled_mm(card, n, k, _tokens(card, tokens), seconds, what, target)
        yield from without(found, what, "_scaled_mm")


def _against_scaled_mm(
    card: Card,
    n: int,
    k: int,
    tokens: int,
    seconds: float,
    what: str,
    target: tuple[float, float],
) -> Iterator[Finding]:
    x = card.normal(tokens, k).mul_(64).to(torch.float8_e4m3fn)
    of_x = torch.full((tokens, 1), 1 / 64, device=card.device)
    dense = [float8(card, n, k) for _ in range(card.copies(n * k))]
    of_rows = dense[0].scale.view(1, n)

    def call(w: Tensor) -> Any:
        return lambda: torch._scaled_mm(
            x, w.t(), scale_a=of_x, scale_b=of_rows, out_dtype=torch.bfloat16
        )

    theirs = card.time([call(w.values) for w in dense])
    numbers = {"us": seconds * 1e6, "peer_us": theirs * 1e6}
    yield ratio(what, "_scaled_mm", theirs / seconds, target, **numbers)


def measure_formats(card: Card) -> Iterator[Finding]:
    """Every format of GGUF files, one token: bytes per second relative to our 4-bit product."""
    n, k = (16, 256) if card.tiny else product_shape(card)
    own = Weights(card, lambda: affine(card, n, k, 4, GROUP))
    best = own.nbytes / own.seconds(1)
    kinds: dict[str, Any] = {
        name: lambda name=name: blocks(card, n, k, name) for name in BLOCK_TYPES
    }
    kinds |= {f"iq{bits}": lambda bits=bits: table(card, n, k, bits) for bits in (1, 3)}
    for name, make in kinds.items():
        yield from without(_one_format(card, name, make, best), f"{name}, 1 token", "own W4A16")


def _one_format(card: Card, name: str, make: Any, best: float) -> Iterator[Finding]:
    weights = Weights(card, make)
    seconds = weights.seconds(1)
    speed = weights.nbytes / seconds / best
    yield share(f"{name}, 1 token", "own W4A16 per byte", speed, (60, 85), us=seconds * 1e6)
