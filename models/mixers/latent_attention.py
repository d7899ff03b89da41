"""Multi-head latent attention: a token keeps one latent for all heads, and attention reads that.

The matrices that make keys and values of a latent are *absorbed*: the first multiplies queries, the
second what attention returns. So nothing but the latent is kept or read, and a prompt's tokens get
the bits that they would get one by one. Per key this takes ``2 * rank + turning`` multiplications
for each head instead of ``query + value``: 3.4 times as many with DeepSeek's widths. In return no
key is ever expanded: that takes ``rank * (still + value)`` multiplications for each head of each
token, as much as attention to 171 keys does.

torch is imported for type checkers only: see :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.kernels.lazy_torch import torch
from sdk.models.configs.latent import LATENT_EPS
from sdk.models.configs.latent_spec import LatentSpec
from sdk.models.mixers.latent_heads import key_heads, value_heads

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.kv.pages import KVPages
    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.models.mixers.attention import Step
    from sdk.models.source import Source


class LatentAttention:
    """Latent attention of one layer; see :class:`sdk.models.mixers.attention.Attention`.

    Query heads are divided over the ranks; every rank keeps the latent.
    """

    def __init__(self, source: Source, path: str, index: int, *, reduce: bool = True) -> None:
        c, heads = source.config, source.heads_of(index)
        assert c.latent is not None
        self.ops = source.ops
        self.spec = spec = c.latent
        self.heads = heads.count
        self.scale, self.query_scale = c.attention_scale, c.query_scale
        self.window, self.rope = c.sliding_windows[index], c.rope_of_layer[index]
        self.group = c.window_group_of(index)
        queries = (
            "q_proj" if spec.query_rank is None else "q_b_proj",
            c.heads_of(index) * spec.query,
            heads.start * spec.query,
            heads.count * spec.query,
        )
        first, inputs = queries, spec.query_rank
        if inputs is not None:
            first = ("q_a_proj", inputs, 0, inputs)
            self.query_norm = source.norm(f"{path}.q_a_layernorm", inputs, LATENT_EPS)
        latent = ("kv_a_proj_with_mqa", spec.key, 0, spec.key)
        own = _order(spec, self.heads if inputs is None else 0, first[3], latent=True)
        bias = c.attention_bias and inputs is not None  # q_proj has none, whatever the config says
        self.first = source.columns(
            path, "qkv_a_proj", (first, latent), bias=bias, accurate=True, order=own
        )
        self.second = None
        if inputs is not None:
            turned = _order(spec, self.heads, 0, latent=False)
            self.second = source.columns(
                path, queries[0], (queries,), accurate=True, order=turned, inputs=inputs
            )
        self.latent_norm = source.norm(f"{path}.kv_a_layernorm", spec.rank, LATENT_EPS)
        self.keys = key_heads(source, path, index, spec)
        self.values = value_heads(source, path, index, spec)
        self.out = source.row(
            f"{path}.o_proj",
            c.heads_of(index) * spec.value,
            heads.start * spec.value,
            heads.count * spec.value,
            bias=c.output_bias,
            reduce=reduce,
        )

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`."""
        return self.first.rounding

    def __call__(self, x: Rows, step: Step, pages: KVPages) -> Tensor:
        spec, ops = self.spec, self.ops
        first = self.first(x)
        queries = first[:, : first.shape[1] - spec.key]
        latent, turning = first[:, -spec.key :].split_with_sizes((spec.rank, spec.turning), dim=1)
        if self.second is not None:
            queries = self.second(ops.norm(queries, self.query_norm))
        tokens = len(first)
        still, turned = queries.view(tokens, self.heads, spec.query).split_with_sizes(
            (spec.still, spec.turning), dim=2
        )
        q = ops.empty(tokens, self.heads, spec.key, dtype=first.dtype)
        self.keys(still, q[..., : spec.rank])
        cos, sin = step.angles[self.rope]
        batch = step.batch.of_group(self.group)
        latent = ops.norm(latent, self.latent_norm)
        kept = latent.view(tokens, 1, spec.rank), turning.view(tokens, 1, spec.turning)
        q = ops.latent.rope_and_cache(q, turned, *kept, cos, sin, batch, pages, self.query_scale)
        y = ops.attention(q, pages, batch, scale=self.scale, window=self.window, latent=spec.rank)
        out = ops.empty(tokens, self.heads, spec.value, dtype=first.dtype)
        self.values(y.view(tokens, self.heads, spec.rank), out)
        return self.out(out.view(tokens, -1))


def _order(spec: LatentSpec, heads: int, before: int, *, latent: bool) -> Tensor | None:
    """The order of features with which those that turn together are half of them apart: of the
    queries of ``heads`` heads, or of ``before`` other features, and then of the latent."""
    if not spec.adjacent_pairs:
        return None
    turned = torch.cat([torch.arange(0, spec.turning, 2), torch.arange(1, spec.turning, 2)])
    query = torch.cat([torch.arange(spec.still), spec.still + turned])
    parts = [query + head * spec.query for head in range(heads)] or [torch.arange(before)]
    if latent:
        start = heads * spec.query or before
        parts += [start + torch.arange(spec.rank), start + spec.rank + turned]
    return torch.cat(parts)
