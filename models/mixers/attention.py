"""Attention over pages, and the step that all layers share.

torch is imported for type checkers only: see :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.head_norms import HeadNorms
from sdk.kernels.operators.norm import Norm
from sdk.models.alibi import alibi_slopes
from sdk.models.architecture import LayerRules, OutputGate
from sdk.models.rank_norms import SubNorm, WidthNorms

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.kv.pages import KVPages
    from sdk.kernels.operators.batch import AttentionBatch
    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.models.configs.config import ModelConfig
    from sdk.models.projections import Projection
    from sdk.models.source import Source


class Step(NamedTuple):
    """What all layers of a step share; ``angles``: cos and sin of each rotary embedding of
    ``ModelConfig.ropes``; ``biases``: see :meth:`sdk.kernels.operators.ops.Ops.attention`;
    ``inputs``: the embeddings of each layer, float32 ``[T, layers * features]``; ``first_values``:
    where the first layer of an RWKV-7 leaves its values for the others, those of this rank's
    heads, ``[T, heads * dim]`` or ``[T, heads, dim]``."""

    batch: AttentionBatch
    angles: Sequence[tuple[Tensor, Tensor]]
    biases: Tensor | None = None
    inputs: Tensor | None = None
    first_values: list[Tensor] | None = None


class Attention:
    """Grouped-query attention of one layer.

    Without ``reduce`` a rank's result is its part of the sum over ranks. A layer that reads the
    keys and values of an earlier one has queries alone.
    ``sinks``, ``slopes`` float32 ``[heads]``, ``biases`` of a layer with its own: see
    :meth:`sdk.kernels.operators.ops.Ops.attention`.
    """

    def __init__(
        self,
        source: Source,
        path: str,
        index: int,
        rules: LayerRules | None = None,
        *,
        reduce: bool = True,
    ) -> None:
        c, heads, rules = source.config, source.heads_of(index), rules or LayerRules()
        count, cache = c.heads_of(index), c.attention_of(index)
        self.ops = source.ops
        self.shares_keys = c.shares_keys(index)
        self.keys_as_values = bool(c.keys_as_values) and c.keys_as_values[index]
        self.heads, self.head_dim, self.value_dim = heads.count, cache.key_dim, cache.value_dim
        self.kv_heads = 0 if self.shares_keys else heads.kv_count
        self.scale, self.softcap = c.attention_scale, c.attention_softcap
        self.window, self.causal, self.clip = c.sliding_windows[index], c.causal, c.qkv_clip
        self.group = c.window_group_of(index)
        self.rope = c.rope_of_layer[index]
        d = cache.key_dim
        rotates = c.ropes[self.rope].rotates
        plain = rules.unrotated_plain and not rotates
        self.query_scale = c.query_scale if plain or not rules.unrotated_plain else None
        self.factor, self.chunked = c.attention_factor, c.chunked_windows
        both = None if c.vision is None else c.vision.both_ways
        #: Whether tokens of an image see those behind them: see ``AttentionBatch.ahead``.
        windowed = both == "windows" and self.window is not None
        self.looks_ahead = both in ("all", "prompt") or windowed
        self.gate = gate = _gate_of(c, rules)
        wide = cache.value_dim
        keys = (cache.kv_heads * d, heads.kv_start * d, heads.kv_count * d)
        values = (cache.kv_heads * wide, heads.kv_start * wide, heads.kv_count * wide)
        of_queries = 2 * d if gate is not None and gate.with_queries else d
        parts = [("q_proj", count * of_queries, heads.start * of_queries, heads.count * of_queries)]
        if not self.shares_keys:
            parts.append(("k_proj", *keys))
            parts += [] if self.keys_as_values else [("v_proj", *values)]
        if gate is not None and not gate.with_queries:  # of the same input: of the same product
            width = 1 if gate.per_head else wide
            sizes = (count * width, heads.start * width, heads.count * width)
            parts.append((gate.projection, *sizes))
        head = order = None
        features = sum(own for *_, own in parts)
        if of_queries > d:
            order = _queries_first(self.heads, d, features)
        if rules.adjacent_pairs and rotates:
            head = _halves_of_pairs(d, c.ropes[self.rope].rotary_dim)
        elif rules.halves_apart:
            head = torch.arange(d).view(2, 2, d // 4).transpose(0, 1).reshape(-1)
        if head is not None:
            order = _of_heads(head, self.heads + self.kv_heads, features)
        self.qkv = self.projection(source, path, parts, order)
        self.out = source.row(
            f"{path}.o_proj",
            count * wide,
            heads.start * wide,
            heads.count * wide,
            bias=c.output_bias,
            reduce=reduce,
        )
        self._pull_norms(source, path, rules, head, plain=plain)
        self.sub_norm: SubNorm | None = None
        if rules.sub_norms:
            own = (heads.start * wide, heads.count * wide)
            self.sub_norm = SubNorm(source, f"{path}.attn_sub_norm", count * wide, *own)
        self._pull_score_parts(source, path, rules, index)

    def _pull_score_parts(self, source: Source, path: str, rules: LayerRules, index: int) -> None:
        """What scores get besides: sinks and biases of this rank's heads."""
        c, heads = source.config, source.heads_of(index)
        count = c.heads_of(index)
        self.sinks: Tensor | None = None
        if rules.sinks is True or (rules.sinks and self.window is not None):
            sinks = source.vector(f"{path}.sinks", count)
            self.sinks = sinks[heads.start : heads.start + heads.count].contiguous()
        self.slopes: Tensor | None = None
        if c.alibi is not None:
            slopes = alibi_slopes(c.alibi, count, c.attention_scale)
            own = slopes[heads.start : heads.start + heads.count]
            self.slopes = torch.from_numpy(own).to(self.ops.device)
        self.biases = biases_by_distance(source, path)

    def _pull_norms(
        self, source: Source, path: str, rules: LayerRules, head: Tensor | None, *, plain: bool
    ) -> None:
        """``head``: the order of a head's features. ``plain``: the layer has no norms of heads."""
        self.norms: HeadNorms | None = None
        self.width_norms: WidthNorms | None = None
        kind = rules.qk_norm if source.config.qk_norm and not plain else None
        if kind == "width":
            self.width_norms = WidthNorms(source, path)
        elif kind == "each_head":
            self.norms = _norms_of_each_head(source, path, rules, head)
        elif kind is not None:
            self.norms = _head_norms(
                source, path, rules, head, self.head_dim, keys=not self.shares_keys
            )

    def projection(
        self,
        source: Source,
        path: str,
        parts: Sequence[tuple[str, int, int, int]],
        order: Tensor | None,
    ) -> Projection:
        """The projection to queries, keys and values, in this order of features."""
        bias = source.config.attention_bias
        return source.columns(path, "qkv_proj", parts, bias=bias, accurate=True, order=order)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`."""
        return self.qkv.rounding

    def __call__(self, x: Rows, step: Step, pages: KVPages) -> Tensor:
        return self.attend(self.qkv(x), step, pages)

    def attend(self, qkv: Tensor, step: Step, pages: KVPages) -> Tensor:
        """Attention of the projected ``[T, features of q, k, v and the gate]``."""
        q, gate = self.cached(qkv, step, pages)
        return self.attended(q, gate, step, pages)

    def cached(self, qkv: Tensor, step: Step, pages: KVPages) -> tuple[Tensor, Tensor]:
        """Write keys and values into the pages; the queries ``[T, heads, head_dim]`` and the gate's
        part."""
        if self.clip is not None:
            qkv = self.ops.clamp(qkv, self.clip)
        q, k, v, gate = self._split(qkv)
        if self.width_norms is not None:
            q, k = self.width_norms(q, k)
        cos, sin = step.angles[self.rope]
        batch = step.batch.of_group(self.group)
        q = self.ops.rope_and_cache(q, k, v, cos, sin, batch, pages, self.norms, self.query_scale)
        return q, gate

    def attended(self, q: Tensor, gate: Tensor | None, step: Step, pages: KVPages) -> Tensor:
        """What queries find in the pages. ``gate``: its part of the projection, if there is one."""
        batch = step.batch.of_group(self.group)
        y = self.ops.attention(
            q,
            pages,
            batch,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            slopes=self.slopes,
            causal=self.causal,
            biases=step.biases if self.biases is None else self.biases,
            chunked=self.chunked and self.window is not None,
            ahead=batch.ahead if self.looks_ahead else None,
        )
        if self.gate is not None:
            assert gate is not None
            y = self.ops.gate(y, gate, self.gate.kind)
        if self.sub_norm is not None:
            y = self.sub_norm(y)
        return self.ops.scale(self.out(y), self.factor)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys ``[T, heads, head_dim]``, values ``[T, heads, value_dim]``, and the
        gate's part, maybe empty."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        values = 0 if self.keys_as_values else self.kv_heads * self.value_dim
        if self.gate is not None and self.gate.with_queries:
            parts = qkv.split_with_sizes([queries, queries, keys, values], dim=1)
            q, gate, k, v = parts
        else:
            rest = qkv.shape[1] - queries - keys - values
            q, k, v, gate = qkv.split_with_sizes([queries, keys, values, rest], dim=1)
            v = k if self.keys_as_values else v
        tokens, d = len(qkv), self.head_dim
        v = v.view(tokens, -1, self.value_dim)
        return q.view(tokens, -1, d), k.view(tokens, -1, d), v, gate


def biases_by_distance(source: Source, path: str | None = None) -> Tensor | None:
    """The biases of scores by buckets of distances that all layers have, or the layer ``path``;
    ``None``: there are none."""
    rule = source.config.buckets
    if rule is None or (rule.table is None) != (path is not None):
        return None
    from sdk.models.distance_buckets import distance_biases  # few models have any

    return distance_biases(source, rule, rule.table or f"{path}.distance_biases")


def _gate_of(config: ModelConfig, rules: LayerRules) -> OutputGate | None:
    gate = rules.output_gate
    if gate is None or config.gate_per_head is None:
        return gate
    return gate._replace(per_head=config.gate_per_head)


def _head_norms(
    source: Source,
    path: str,
    rules: LayerRules,
    order: Tensor | None,
    width: int,
    *,
    keys: bool,
) -> HeadNorms:
    """The norms of each head of ``width`` features. ``order``: of those of queries and keys.
    ``keys``: the layer has keys of its own.

    What has no weight gets one of ones, with which the rotation's kernel takes it. A GGUF file may
    have weights where the model has none: its converter writes factors there.
    """
    eps = source.config.norm_eps
    plain = Norm(torch.ones(width, device=source.ops.device), eps)
    q = k = plain
    if rules.qk_norm == "head" or source.has(f"{path}.q_norm.weight"):
        q = source.norm(f"{path}.q_norm", width)
        k = source.norm(f"{path}.k_norm", width) if keys else q
    if order is not None and q.weight is not None and k.weight is not None:
        q, k = replace(q, weight=q.weight[order]), replace(k, weight=k.weight[order])
    return HeadNorms(q, k, plain if rules.v_norm else None, rules.norm_after_rotation)


def _norms_of_each_head(
    source: Source, path: str, rules: LayerRules, order: Tensor | None
) -> HeadNorms:
    """Norms with a weight for each head, in one tensor or in one for each (StableLM's folders).
    ``order``: of the features of queries and keys."""
    c, heads = source.config, source.heads
    counts = (
        (c.num_heads, heads.start, heads.count),
        (c.num_kv_heads, heads.kv_start, heads.kv_count),
    )
    norms: list[Norm] = []
    for name, (total, start, count) in zip("qk", counts, strict=True):
        single = [f"{path}.{name}_layernorm.norms.{i}.weight" for i in range(total)]
        if source.has(single[0]):
            weight = torch.stack([source.vector(one, c.head_dim) for one in single])
        else:
            weight = source.vector(f"{path}.{name}_norm.weight", total, c.head_dim)
        weight = weight[start : start + count]
        weight = weight.contiguous() if order is None else weight[:, order]
        norms.append(Norm(weight, c.norm_eps, None, rules.norm.centred))
    return HeadNorms(norms[0], norms[1])


def _halves_of_pairs(head_dim: int, rotary: int) -> Tensor:
    """Features of a head, int64: the first dimension of every pair of the rotated ones, then the
    second. The scores of a query and a key do not depend on the order."""
    rest = torch.arange(rotary, head_dim)
    return torch.cat([torch.arange(0, rotary, 2), torch.arange(1, rotary, 2), rest])


def _queries_first(heads: int, head_dim: int, features: int) -> Tensor:
    """The order of ``features``, int64, of which the first are a query and its gate of each of
    ``heads``: all queries, then all gates."""
    pairs = torch.arange(2 * heads * head_dim).view(heads, 2, head_dim)
    first = torch.cat([pairs[:, 0].flatten(), pairs[:, 1].flatten()])
    return torch.cat([first, torch.arange(2 * heads * head_dim, features)])


def _of_heads(head: Tensor, count: int, features: int) -> Tensor:
    """The order of ``features``, int64: of the first ``count`` heads that of ``head``."""
    width = len(head)
    first = (torch.arange(count)[:, None] * width + head).flatten()
    return torch.cat([first, torch.arange(count * width, features)])
