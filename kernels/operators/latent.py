"""The operators of multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, 2.1).

A token keeps one vector for all heads: its latent, from which a head's key and value would be
multiplied, and the part of keys that turns by position. These products are *absorbed* here: a query
is multiplied by its head's key matrix before attention (:meth:`LatentOps.group`), then attends to
the vectors themselves, and what it sees of them is multiplied by its head's value matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdk.kernels.context import Context
from sdk.kernels.errors import KernelError
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.checks import expect, expect_floats
from sdk.kernels.operators.head_norms import QueryScale
from sdk.kernels.weights.bound import BoundHeads, BoundLinear


class LatentOps:
    """``Ops.latent``: what only models with latent pages need (:class:`KVPages`)."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def group(self, heads: Sequence[BoundLinear]) -> BoundHeads:
        """The weights of a layer's heads as one.

        :raises KernelError: their formats or shapes differ.
        """
        if len({head.problem for head in heads}) != 1:
            raise KernelError("heads: expected one format and shape of all of them")
        implementation, packed = heads[0].choice.implementation, None
        if hasattr(implementation, "matmul_heads"):
            packed = implementation.group([head.packed for head in heads])
        elif implementation.name.startswith("cpu."):  # copies of x would not be recorded
            raise KernelError(f"heads: {implementation.name} has no products of heads")
        return BoundHeads(tuple(heads), packed, self._context)

    def rope_and_cache(
        self,
        q: Tensor,
        turned: Tensor,
        latent: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        pages: KVPages,
        scale: QueryScale | None = None,
    ) -> Tensor:
        """Complete queries, and write keys into their page slots; returns q.

        q ``[T, heads, value_dim + r]`` has the absorbed part in its first ``value_dim`` numbers;
        its last r become those of ``turned [T, heads, r]``, rotated. A key is ``latent [T,
        kv_heads, value_dim]``, then ``k [T, kv_heads, r]``, rotated. cos and sin ``[T, rotary_dim /
        2]``: as in :meth:`sdk.kernels.operators.ops.Ops.rope_and_cache`. ``scale``: of queries by
        their positions.
        """
        batch.check(pages)
        tokens = batch.num_tokens
        heads, kv_heads = q.shape[1], latent.shape[1]
        value_dim, width = latent.shape[2], k.shape[2]
        short = self._context.activations
        expect_floats("latent rope q", q, short, tokens, heads, value_dim + width)
        expect_floats("latent rope turned", turned, short, tokens, heads, width)
        expect_floats("latent rope latent", latent, short, tokens, kv_heads, value_dim)
        expect_floats("latent rope k", k, short, tokens, kv_heads, width)
        for name, x in (("cos", cos), ("sin", sin)):
            expect(f"latent rope {name}", x, torch.float32, tokens, None)
        if not pages.latent or 2 * cos.shape[1] > width:
            raise KernelError(
                f"latent rope: expected latent pages and at most {width} rotated dimensions, found "
                f"pages with values of {pages.value_dim} and {2 * cos.shape[1]}"
            )
        if tokens:
            kernel = self._context.kernel(
                "latent_rope_and_cache",
                (q, latent, cos, pages, scale),
                **pages.problem(value_dim),
            )
            kernel.run(q, turned, latent, k, cos, sin, batch, pages, scale)
        return q
