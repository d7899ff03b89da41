"""Checks of the arguments of attention, for all backends, and how its problems are named."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from sdk.kernels.errors import KernelError
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.checks import expect

#: What ``Problem.format`` says of attention: which of these it has.
_HAS = ("window", "softcap", "sinks", "slopes", "both ways", "biases", "latent", "chunked", "ahead")
ATTENTION = {
    has: " ".join(word for word, one in zip(_HAS, has, strict=True) if one)
    for has in product((False, True), repeat=len(_HAS))
}


def expect_by_head(q: Tensor, by_head: Mapping[str, Tensor | None], biases: Tensor | None) -> None:
    """:raises KernelError: unless each head of q has one number of each, and its biases."""
    for name, x in by_head.items():
        if x is not None:
            expect(f"attention {name}", x, torch.float32, q.shape[1])
    if biases is not None:
        expect_biases(biases, q.shape[1])


def expect_heads(q: Tensor, pages: KVPages, latent: int) -> None:
    """:raises KernelError: unless the heads of q can read the pages."""
    heads, head_dim = q.shape[1:]
    kv_heads = pages.k.shape[1]
    if heads % kv_heads or pages.head_dim != head_dim or (latent > 0) != pages.latent:
        raise KernelError(
            f"attention: {heads} query heads of {head_dim} with {latent} latent values do not "
            f"fit pages {list(pages.k.shape)} with values {list(pages.v.shape)}"
        )


def expect_ahead(ahead: Tensor, tokens: int, *, plain: bool) -> None:
    """:raises KernelError: tokens cannot see others behind them. ``plain``: causal attention
    without biases of distances and without latent pages."""
    expect("attention ahead", ahead, torch.int32, tokens)
    if not plain:
        raise KernelError(
            "attention: tokens that see others behind them: expected causal attention without "
            "biases of distances and without latent pages"
        )


def expect_biases(biases: Tensor, heads: int) -> None:
    """:raises KernelError: unless each head has one number for each distance of a key."""
    expect("attention biases", biases, torch.float32, heads, None)
    if biases.shape[1] % 2 == 0:
        raise KernelError(
            "attention biases: expected one for each distance on both sides and for 0, found "
            f"{biases.shape[1]}"
        )
