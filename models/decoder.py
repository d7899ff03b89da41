"""The MLP, a layer as its model's facts describe it, and the loop over the layers.

A layer takes ``(delta, residual)`` and returns the same: ``residual`` is the sum of everything
before, ``delta`` the last block's output, not yet added. The addition then happens inside the next
norm (``Ops.add_norm``), one pass over memory instead of two. What differs between models, such
as where norms are, is in :class:`sdk.models.architecture.LayerRules` and in the config.

torch is imported for type checkers only: see :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from sdk.kernels.norm import Norm
from sdk.models.architecture import EmbeddingRules, ExpertsBeside, LayerRules, architecture
from sdk.models.attention import Attention, Step
from sdk.models.distance_buckets import distance_biases
from sdk.models.layer_inputs import LayerInput, LayerInputs
from sdk.models.moe import ExpertMLP
from sdk.quant.errors import AlignmentError, CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.batch import AttentionBatch
    from sdk.kernels.kv_pages import KVPages
    from sdk.kernels.rounding import Rounding, Rows
    from sdk.models.config import ModelConfig
    from sdk.models.layers import Embedding, ExpertProjection, Head, Projection, Source
    from sdk.quant.weight import Weight


class CausalLM(Protocol):
    """A model as the engine sees it."""

    config: ModelConfig

    def __call__(self, inputs: Tensor, batch: AttentionBatch, kv: Sequence[KVPages]) -> Tensor:
        """Run one step; hidden states float32 ``[T, hidden]`` after the final norm.

        A stage that is not the last one returns its residual stream, which it has sent on.
        ``inputs``: token ids int64 ``[T]``, or embeddings float32 ``[T, hidden]`` that already have
        the model's scale; only the first stage reads them. Keys and values are written into ``kv``,
        one entry for each cache of this stage; of a model that is not causal, one for all of them.
        """

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 ``[T]`` -> embeddings float32 ``[T, hidden]`` with the model's scale."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, hidden]`` -> float32 ``[R, vocab]``, after the final scale and soft cap."""

    def linears(self) -> Iterator[tuple[str, Projection | ExpertProjection]]:
        """All projections with their paths."""


class MLP:
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` if it is not ``gated``.

    ``width``: its features, if they are not the model's. Without ``reduce`` a rank's result is its
    part of the sum over ranks.
    """

    def __init__(
        self,
        source: Source,
        path: str,
        width: int | None = None,
        *,
        gated: bool = True,
        reduce: bool = True,
    ) -> None:
        c = source.config
        self.ops = source.ops
        self.activation = c.activation
        self.gated = gated
        self.numbers = xielu_numbers(source, path) if c.activation == "xielu" else ()
        width = width or c.intermediate_size
        start, count = source.mesh.columns(width)
        names = ("gate_proj", "up_proj") if gated else ("up_proj",)
        self.up = source.columns(
            path,
            "gate_up_proj" if gated else "up_proj",
            [(name, width, start, count) for name in names],
            bias=c.mlp_bias,
        )
        down = f"{path}.down_proj"
        self.down = source.row(down, width, start, count, bias=c.down_bias, reduce=reduce)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`Projection`."""
        return self.up.rounding

    def __call__(self, x: Rows) -> Tensor:
        if self.gated:
            return self.down(self.up.gated(x, self.activation))
        return self.down(self.ops.activation(self.up(x), self.activation, numbers=self.numbers))


class MLPBesideExperts:
    """See :class:`sdk.models.architecture.ExpertsBeside`."""

    def __init__(
        self, source: Source, path: str, index: int, rules: LayerRules, norms: ExpertsBeside
    ) -> None:
        c = source.config
        self.ops = source.ops
        self.mlp = MLP(source, f"{path}.mlp", c.width_of(index), gated=rules.gated)
        self.experts = ExpertMLP(source, f"{path}.mlp", rules)
        self.before = source.norm(f"{path}.{norms.before}")
        self.after = source.norm(f"{path}.{norms.after}")
        self.after_mlp = source.norm(f"{path}.{norms.after_mlp}")
        scale = source.vector(f"{path}.mlp.{rules.router}.scale", c.hidden_size)
        self.routed = Norm(scale * c.hidden_size**-0.5, c.norm_eps)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`Projection`."""
        return self.mlp.rounding

    def __call__(self, x: Rows, total: Tensor) -> Tensor:
        """x: the norm of ``total``, the sum of everything before."""
        y = self.ops.norm(self.mlp(x), self.after_mlp)
        routed = self.ops.norm(total, self.routed)
        own = self.experts(self.ops.norm(total, self.before), routed)
        return self.ops.add(y, self.ops.norm(own, self.after))


def xielu_numbers(source: Source, path: str) -> tuple[float, float, float, float]:
    """What the activation of an MLP takes: see :meth:`sdk.kernels.ops.Ops.activation`."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    alpha_p, alpha_n, beta, eps = (
        float(source.vector(f"{path}.act_fn.{name}", 1)[0]) for name in names
    )
    if not (eps <= 0 and all(map(math.isfinite, (alpha_p, alpha_n, beta, eps)))):
        found = f"alpha_p {alpha_p:g}, alpha_n {alpha_n:g}, beta {beta:g}, eps {eps:g}"
        raise CheckpointError(f"{path}.act_fn: expected numbers, eps at most 0, found {found}")
    return _softplus(alpha_p), beta + _softplus(alpha_n), beta, eps


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


class Layer:
    """One decoder layer: attention and an MLP, each with the norms that the model has for it.

    They come one after the other or are parallel: see ``ConfigRules.parallel_blocks``.
    """

    def __init__(self, source: Source, path: str, index: int, rules: LayerRules) -> None:
        self.ops = source.ops
        c = source.config
        self.multiplier = c.residual_scale
        self.parallel, self.post_norm = c.parallel_blocks, rules.post_norm
        names = rules.norms_of(self.parallel)
        if self.parallel and c.one_norm:
            names = names._replace(before_mlp=None)
        if not index and not rules.first_norm:
            names = names._replace(before_attention=None)
        norms = [
            None if name is None else source.norm(f"{path}.{name}", eps=eps)
            for name, eps in zip(names, (None, c.post_norm_eps) * 2, strict=True)
        ]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        has_experts = c.experts is not None and c.experts.layers[index]
        # The results of parallel blocks are summed over ranks at once, if nothing else is done to
        # either before, and experts do not sum theirs.
        alone = self.after_attention is None and self.after_mlp is None and not has_experts
        self.group = source.mesh.group if self.parallel and alone else None
        each = self.group is None
        self.attention = Attention(source, f"{path}.self_attn", index, rules, reduce=each)
        self.mlp: MLP | ExpertMLP | MLPBesideExperts
        if has_experts and rules.experts_beside is not None:
            self.mlp = MLPBesideExperts(source, path, index, rules, rules.experts_beside)
        elif c.experts is not None and has_experts:
            shared, width = None, c.experts.shared_width
            if width:
                whole = source.mesh.redundant_experts is not None
                shared = MLP(source, f"{path}.mlp.shared_experts", width, reduce=whole)
            self.mlp = ExpertMLP(source, f"{path}.mlp", rules, shared)
        else:
            width = c.width_of(index)
            self.mlp = MLP(source, f"{path}.mlp", width, gated=rules.gated, reduce=each)
        #: The embedding of each token for this layer, and the number that multiplies its result.
        self.input = LayerInput(source, path, index) if c.layer_inputs else None
        self.factor = 1.0
        if rules.scaled:
            self.factor = float(source.vector(f"{path}.layer_scalar", 1)[0])

    def __call__(
        self, delta: Tensor, residual: Tensor | None, step: Step, pages: KVPages
    ) -> tuple[Tensor, Tensor | None]:
        """``(delta, residual) -> (delta, residual)``; may modify both in place. The first layer has
        no residual, and none has with ``LayerRules.post_norm``."""
        if self.post_norm:
            return self._run_post_norm(delta, step, pages), None
        if self.parallel:
            return self._run_parallel(delta, residual, step, pages)
        x, residual = self._input(self.attention.rounding, delta, residual, self.before_attention)
        delta = self._output(self.attention(x, step, pages), self.after_attention)
        x, residual = self._input(self.mlp.rounding, delta, residual, self.before_mlp)
        if isinstance(self.mlp, MLPBesideExperts):
            x = self.mlp(x, residual)
        else:
            x = self.mlp(x)
        delta = self._output(x, self.after_mlp)
        if self.input is not None:
            residual = self.ops.add(residual, delta)
            delta = self.input(residual, step)
        return self.ops.scale(delta, self.factor), self.ops.scale(residual, self.factor)

    def _run_parallel(
        self, delta: Tensor, residual: Tensor | None, step: Step, pages: KVPages
    ) -> tuple[Tensor, Tensor]:
        rounding = self.attention.rounding
        one_norm = self.before_mlp is None
        if one_norm and self.mlp.rounding != rounding:
            rounding = None  # each rounds the rows for itself
        x, residual = self._input(rounding, delta, residual, self.before_attention)
        y = x if one_norm else self._input(self.mlp.rounding, residual, None, self.before_mlp)[0]
        delta = self._output(self.attention(x, step, pages), self.after_attention)
        assert not isinstance(self.mlp, MLPBesideExperts)
        delta = self.ops.add(delta, self._output(self.mlp(y), self.after_mlp))
        return delta if self.group is None else self.ops.all_reduce(delta, self.group), residual

    def _run_post_norm(self, x: Tensor, step: Step, pages: KVPages) -> Tensor:
        assert self.after_attention is not None and self.after_mlp is not None
        again = None
        if self.before_mlp is not None:
            again = self.ops.add(self.ops.zeros(*x.shape), x)
        x, _ = self.ops.add_norm(self.attention(x, step, pages), x, self.after_attention, wide=True)
        if self.before_mlp is not None:
            x, _ = self.ops.add_norm(x, again, self.before_mlp, wide=True)
        assert not isinstance(self.mlp, MLPBesideExperts)
        x, _ = self.ops.add_norm(self.mlp(x), x, self.after_mlp, wide=True)
        return x

    def _input(
        self,
        rounding: Rounding | None,
        delta: Tensor,
        residual: Tensor | None,
        norm: Norm | None,
    ) -> tuple[Rows, Tensor]:
        """What a block reads, and the sum of all before it."""
        if norm is not None:
            return self.ops.add_norm_for(rounding, delta, residual, norm)
        residual = delta if residual is None else self.ops.add(residual, delta)
        return residual, residual

    def _output(self, x: Tensor, norm: Norm | None) -> Tensor:
        """What a block adds to the sum."""
        if norm is not None:
            x = self.ops.norm(x, norm)
        return self.ops.scale(x, self.multiplier)


def layer_rules(config: ModelConfig) -> LayerRules:
    """What the layers of a model compute."""
    own = architecture(config.model_type)
    return LayerRules() if own is None else own.layer


def embedding_rules(config: ModelConfig) -> EmbeddingRules:
    """What happens to the embeddings of a model before its first layer."""
    own = architecture(config.model_type)
    return EmbeddingRules() if own is None else own.embedding


def positions_and_norm(source: Source) -> tuple[Weight | None, Norm | None]:
    """The table of learned positions, whose rows are added to embeddings, and the norm of the sum;
    ``None`` for what a model does not have."""
    c, positions, norm = source.config, None, None
    if c.first_position is not None:
        positions = source.table("model.embed_positions", c.max_position, c.first_position)
    if embedding_rules(c).norm:
        norm = source.norm("model.embed_norm", c.embedding_width)
    return positions, norm


def _check_shared_keys(config: ModelConfig, layers: range) -> None:
    """:raises AlignmentError: a stage would read keys that another one has."""
    for layer in layers:
        if config.shares_keys(layer) and config.layer_caches[layer] not in layers:
            raise AlignmentError(
                f"pipeline_parallel_size: layer {layer} of {config.model_type} reads the keys of "
                f"layer {config.layer_caches[layer]}: expected both in one stage, found layers "
                f"{layers.start} to {layers.stop - 1}"
            )


class Decoder:
    """Embedding, layers, final norm and head: a :class:`CausalLM`.

    One stage of several has only some of the layers; the first one has the embedding, the last one
    norm and head.
    """

    def __init__(self, source: Source) -> None:
        c = source.config
        self._rules = layer_rules(c)
        self.config = c
        self.ops = source.ops
        self._mesh = mesh = source.mesh
        self.embedding: Embedding | None = source.embedding() if mesh.is_first else None
        #: The tables of learned positions and of token types, and the norm of their sum.
        self.positions: Weight | None = None
        self.types: Weight | None = None
        self.embedding_norm: Norm | None = None
        if mesh.is_first:
            self.positions, self.embedding_norm = positions_and_norm(source)
        if mesh.is_first and c.token_types:
            self.types = source.table("model.embed_types", c.token_types)
        #: What makes the embeddings of each layer.
        self.inputs = LayerInputs(source) if c.layer_inputs else None
        self.projection: Projection | None = None
        if mesh.is_first and c.embedding_size is not None:
            self.projection = source.matrix("model.embed_project", c.hidden_size, c.embedding_size)
        self.head: Head | None = None
        if mesh.is_last and c.causal:
            self.head = source.head(self.embedding)
        #: The numbers of the layers of this stage.
        self.numbers = source.layers
        self.layers: list[Layer] = []
        for i in self.numbers:
            with self.ops.layers.load(i):
                self.layers.append(Layer(source, f"model.layers.{i}", i, self._rules))
        _check_shared_keys(c, self.numbers)
        first = min((one for i in self.numbers for one in c.caches_of(i)), default=0)
        #: For each layer of this stage the places of its caches among those of the stage.
        self._caches = {i: tuple(one - first for one in c.caches_of(i)) for i in self.numbers}
        self.norm: Norm | None = None
        if mesh.is_last and not self._rules.post_norm:
            self.norm = source.norm("model.norm")
        self.ropes = [source.rope(spec) for spec in c.ropes]
        #: Of attention, by distance: see :meth:`sdk.kernels.ops.Ops.attention`.
        self.biases = None if c.buckets is None else distance_biases(source, c.buckets)
        self._linears = source.linears
        #: The tensors of one dimension that it has pulled, by path.
        self.vectors = source.vectors
        #: Layers of which ``streams`` has the input in each step, in ascending order.
        self.streamed: Sequence[int] = ()
        #: The residual streams that enter those layers in the last step, float32 ``[T, hidden]``.
        self.streams: list[Tensor] = []

    @property
    def shift_invariant(self) -> bool:
        """Whether a constant may be added to all scores of a query: no soft caps, no sinks."""
        return self.config.attention_softcap is None and not self._rules.sinks

    def linears(self) -> Iterator[tuple[str, Projection | ExpertProjection]]:
        """See :class:`CausalLM`."""
        return iter(self._linears)

    def __call__(
        self,
        inputs: Tensor,
        batch: AttentionBatch,
        kv: Sequence[KVPages],
        out: Tensor | None = None,
    ) -> Tensor:
        """See :class:`CausalLM`. ``out``: where the last stage writes hidden states."""
        delta = self._enter(inputs, batch)
        residual: Tensor | None = None
        angles = [rope.cos_sin(batch.positions, self.ops) for rope in self.ropes]
        own = None if self.inputs is None else self.inputs(inputs, delta)
        step = Step(batch, angles, self.biases, own)
        self.streams = []
        for i, layer in zip(self.numbers, self.layers, strict=True):
            pages = kv[0] if not self.config.causal else kv[self._caches[i][0]]
            if i in self.streamed:
                stream = self.ops.add(self.ops.zeros(*delta.shape), delta)
                self.streams.append(stream if residual is None else self.ops.add(stream, residual))
            with self.ops.layers.run(i):
                delta, residual = layer(delta, residual, step, pages)
        if self._rules.post_norm:
            assert out is None and self._mesh.is_last
            return delta
        if self.norm is None:
            assert residual is not None and self._mesh.downstream is not None
            stream = self.ops.add(residual, delta)
            self.ops.send(stream, self._mesh.downstream)
            return stream
        hidden, _ = self.ops.add_norm(delta, residual, self.norm, wide=True, out=out)
        return hidden

    def _enter(self, inputs: Tensor, batch: AttentionBatch) -> Tensor:
        """The input of the first layer here: embeddings, or the stream of the stage before."""
        if self._mesh.upstream is not None:
            return self.ops.receive(len(inputs), self.config.hidden_size, self._mesh.upstream)
        x = inputs if inputs.is_floating_point() else self.embed(inputs)
        if self.positions is not None:
            x = self.ops.add(self.positions.rows(batch.positions), x)
        if self.types is not None:
            assert batch.token_types is not None
            x = self.ops.add(self.types.rows(batch.token_types), x)
        if self.embedding_norm is not None:
            x = self.ops.norm(x, self.embedding_norm)
        return x if self.projection is None else self.projection(x)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See :class:`CausalLM`."""
        assert self.embedding is not None
        return self.embedding(token_ids)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See :class:`CausalLM`. ``out``: where to write them, if no other rank has a part of the
        vocabulary."""
        assert self.head is not None
        return self.head(hidden, out)
