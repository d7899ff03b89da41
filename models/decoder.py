"""A layer as its model's facts describe it, and the loop over the layers.

A layer takes ``(delta, residual)`` and returns the same: ``residual`` is the sum of everything
before, ``delta`` the last block's output, not yet added. The addition then happens inside the next
norm (``Ops.add_norm``), one pass over memory instead of two. What differs between models, such
as where norms are, is in :class:`sdk.models.architecture.LayerRules` and in the config.

torch is imported for type checkers only: see :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.states import LayerState
from sdk.models.architecture import EmbeddingRules, LayerRules, architecture
from sdk.models.experts.moe import ExpertMLP
from sdk.models.mixers.attention import Attention, Step, biases_by_distance
from sdk.models.mlp import MLP, MLPBesideExperts, ShiftedMLP, has_experts, mlp_of
from sdk.quant.errors import AlignmentError, CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.kv.pages import KVPages
    from sdk.kernels.operators.batch import AttentionBatch
    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.models.altup import StreamLayer, Streams
    from sdk.models.configs.config import ModelConfig
    from sdk.models.embedding import Embedding
    from sdk.models.layer_inputs import LayerInput, LayerInputs
    from sdk.models.mixers.mixer import Mixer
    from sdk.models.projections import Head, Linear, Projection
    from sdk.models.rope import Rope
    from sdk.models.source import Source
    from sdk.quant.weight import Weight

    #: What a rank has of a layer's cache.
    Memory = KVPages | LayerState


class CausalLM(Protocol):
    """A model as the engine sees it."""

    config: ModelConfig

    def __call__(self, inputs: Tensor, batch: AttentionBatch, kv: Sequence[Any]) -> Tensor:
        """Run one step; hidden states float32 ``[T, config.output_size]`` after the final norm.

        A stage that is not the last one returns its residual stream, which it has sent on.
        ``inputs``: token ids int64 ``[T]``, or embeddings float32 ``[T, hidden]`` that already have
        the model's scale; only the first stage reads them. Keys, values and states are written into
        ``kv``, one entry for each cache of this stage; of a model that is not causal, one for all.
        """

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 ``[T]`` -> embeddings float32 ``[T, hidden]`` with the model's scale."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, output_size]`` -> float32 ``[R, vocab]``, after the final scale and soft cap."""

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """All projections with their paths."""


class TokenLinear:
    """One matrix in the place of attention (DeciLM), which every rank has as a whole."""

    def __init__(self, source: Source, path: str) -> None:
        hidden = source.config.hidden_size
        self.out = source.matrix(path, hidden, hidden)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`."""
        return self.out.rounding

    def __call__(self, x: Rows, step: Step, cache: None) -> Tensor:
        """See :class:`sdk.models.mixers.mixer.Mixer`."""
        return self.out(x)


class Layer:
    """One decoder layer: what mixes tokens and an MLP, each with the norms that the model has.

    ``mixers``: attention, a recurrent mixer, both, whose results are added, one matrix in their
    place, which has no cache, or nothing. They and
    the MLP, which a layer may lack, come one after the other or are parallel: see
    ``ConfigRules.parallel_blocks``.
    """

    def __init__(self, source: Source, path: str, index: int, rules: LayerRules) -> None:
        self.ops = source.ops
        c = source.config
        self.multiplier = c.residual_scale
        self.parallel, self.post_norm = c.parallel_blocks, c.post_norm
        blocks = c.blocks_of(index)
        names = rules.norms_of(self.parallel, blocks, post=self.post_norm)
        if self.parallel and c.one_norm:
            names = names._replace(before_mlp=None)
        if not index and not rules.first_norm:
            names = names._replace(before_attention=None)
        if not blocks.mlp:
            names = names._replace(before_mlp=None, after_mlp=None)
        if not (blocks.attention or blocks.recurrent or blocks.linear):
            names = names._replace(before_attention=None, after_attention=None)
        norms = [
            None if name is None else source.norm(f"{path}.{name}", eps=eps)
            for name, eps in zip(names, (None, c.post_norm_eps) * 2, strict=True)
        ]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        # The results of parallel blocks are summed over ranks at once, if nothing else is done to
        # either before, and experts do not sum theirs.
        alone = (
            self.after_attention is None and self.after_mlp is None and not has_experts(c, index)
        )
        self.group = source.mesh.group if self.parallel and alone else None
        each = self.group is None
        self.mixers: list[Mixer] = []
        if blocks.attention and c.latent is not None:
            from sdk.models.mixers.latent_attention import LatentAttention

            self.mixers.append(LatentAttention(source, f"{path}.self_attn", index, reduce=each))
        elif blocks.attention:
            self.mixers.append(Attention(source, f"{path}.self_attn", index, rules, reduce=each))
        if blocks.recurrent:
            assert c.recurrent is not None
            where = f"{path}.{c.recurrent.name}"
            self.mixers.append(c.recurrent.mixer(source, where, reduce=each))
        if blocks.linear:
            self.mixers.append(TokenLinear(source, f"{path}.self_attn.linear_attn"))
        self.mlp: MLP | ExpertMLP | MLPBesideExperts | ShiftedMLP | None = None
        if blocks.mlp:
            self.mlp = mlp_of(source, path, index, rules, reduce=each)
        #: The experts whose router reads what enters the layer.
        self.early = self.mlp if rules.route_early and isinstance(self.mlp, ExpertMLP) else None
        #: The embedding of each token for this layer, and the number that multiplies its result.
        self.input: LayerInput | None = None
        if c.layer_inputs:
            from sdk.models.layer_inputs import LayerInput

            self.input = LayerInput(source, path, index)
        #: The next layer's norm and experts, if some of these may have to be read from a file.
        self.ahead: tuple[Norm, ExpertMLP] | None = None
        self._pull_scales(source, path, rules)

    def _pull_scales(self, source: Source, path: str, rules: LayerRules) -> None:
        """Factors of what the blocks add, and of the layer's result."""
        width = source.config.hidden_size
        self.attention_scale: Tensor | None = None
        self.mlp_scale: Tensor | None = None
        if rules.block_scales:
            self.attention_scale = source.vector(f"{path}.attention_scale", width)
            self.mlp_scale = source.vector(f"{path}.mlp_scale", width)
        self.factor = 1.0
        if rules.scaled:
            self.factor = float(source.vector(f"{path}.layer_scalar", 1)[0])

    def __call__(
        self,
        delta: Tensor,
        residual: Tensor | None,
        step: Step,
        caches: Sequence[Memory],
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``(delta, residual) -> (delta, residual)``; may modify both in place. The first layer has
        no residual, and none has in a post-norm model, which may write its result into ``out``.
        ``caches``: one for each mixer."""
        if self.post_norm:
            return self._run_post_norm(delta, step, caches, out), None
        if self.parallel:
            return self._run_parallel(delta, residual, step, caches)
        logits = None
        if self.mixers:
            x, residual = self._input(self._rounding, delta, residual, self.before_attention)
            if self.early is not None:  # what follows adds to the residual in place
                logits = self.early.router(residual)
            x = self._mix(x, step, caches)
            # No name is left for what went into the norm: the plan does not count it.
            delta = x = self._output(x, self.after_attention, self.attention_scale)
        delta, residual = self._feed_forward(delta, residual, step, caches, logits)
        if self.input is not None:
            residual = delta if residual is None else self.ops.add(residual, delta)
            delta = self.input(residual, step)
        if self.factor != 1.0:
            assert residual is not None
            return self.ops.scale(delta, self.factor), self.ops.scale(residual, self.factor)
        return delta, residual

    def queries(
        self, delta: Tensor, residual: Tensor | None, step: Step, pages: KVPages
    ) -> tuple[Tensor, Tensor]:
        """Of an encoder, for some rows: keys and values go into pages; queries and residual."""
        x, residual = self._input(self._rounding, delta, residual, self.before_attention)
        return self._attention.cached(self._attention.qkv(x), step, pages)[0], residual

    def rest(
        self, q: Tensor, residual: Tensor, step: Step, pages: KVPages
    ) -> tuple[Tensor, Tensor]:
        """The second part, for some rows, when the pages have the keys and values of all rows."""
        x = self._attention.attended(q, None, step, pages)
        delta = self._output(x, self.after_attention, self.attention_scale)
        delta, after = self._feed_forward(delta, residual, step, [pages])
        assert after is not None
        return delta, after

    @property
    def _attention(self) -> Attention:
        """Of a layer that has nothing else to mix tokens."""
        [found] = self.mixers
        assert isinstance(found, Attention)
        return found

    def _feed_forward(
        self,
        delta: Tensor,
        residual: Tensor | None,
        step: Step,
        caches: Sequence[Memory],
        logits: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if self.mlp is not None:
            x, residual = self._input(self.mlp.rounding, delta, residual, self.before_mlp)
            if self.ahead is not None:
                self.ahead[1].expect(self.ops.norm(residual, self.ahead[0]))
            if isinstance(self.mlp, MLPBesideExperts):
                x = self.mlp(x, residual)
            elif isinstance(self.mlp, ShiftedMLP):
                [state] = caches
                assert isinstance(state, LayerState)
                x = self.mlp(x, step, state)
            elif self.early is not None:
                x = self.early(x, logits=logits)
            else:
                x = self.mlp(x)
            delta = self._output(x, self.after_mlp, self.mlp_scale)
        return delta, residual

    @property
    def _rounding(self) -> Rounding | None:
        """How all mixers take rows as codes, if they do."""
        first, *others = [mixer.rounding for mixer in self.mixers]
        return first if all(one == first for one in others) else None

    def _mix(self, x: Rows, step: Step, caches: Sequence[Memory]) -> Tensor:
        """The sum of what the mixers make of x."""
        first, *others = [
            mixer(x, step, cache)
            for mixer, cache in zip(self.mixers, caches or (None,), strict=True)
        ]
        for other in others:
            first = self.ops.add(first, other)
        return first

    def _run_parallel(
        self, delta: Tensor, residual: Tensor | None, step: Step, caches: Sequence[Memory]
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(self.mlp, (MLP, ExpertMLP))
        rounding = self._rounding
        one_norm = self.before_mlp is None
        if one_norm and self.mlp.rounding != rounding:
            rounding = None  # each rounds the rows for itself
        x, residual = self._input(rounding, delta, residual, self.before_attention)
        y = x if one_norm else self._input(self.mlp.rounding, residual, None, self.before_mlp)[0]
        delta = self._output(self._mix(x, step, caches), self.after_attention)
        delta = self.ops.add(delta, self._output(self.mlp(y), self.after_mlp))
        return delta if self.group is None else self.ops.all_reduce(delta, self.group), residual

    def _run_post_norm(
        self, x: Tensor, step: Step, caches: Sequence[Memory], out: Tensor | None
    ) -> Tensor:
        assert self.after_attention is not None and self.after_mlp is not None
        assert isinstance(self.mlp, (MLP, ExpertMLP))
        again = None
        if self.before_mlp is not None:
            again = self.ops.add(self.ops.zeros(*x.shape), x)
        x, _ = self.ops.add_norm(self._mix(x, step, caches), x, self.after_attention, wide=True)
        if self.before_mlp is not None:
            x, _ = self.ops.add_norm(x, again, self.before_mlp, wide=True)
        x, _ = self.ops.add_norm(self.mlp(x), x, self.after_mlp, wide=True, out=out)
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

    def _output(self, x: Tensor, norm: Norm | None, scale: Tensor | None = None) -> Tensor:
        """What a block adds to the sum. ``scale``: multiplies its features."""
        if norm is not None:
            x = self.ops.norm(x, norm)
        if scale is not None:
            x = self.ops.gate(x, scale.expand(len(x), -1), "linear")
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
    if c.first_position is not None and embedding_rules(c).sines:
        from sdk.models.sines import sines_of

        positions = sines_of(source, c.first_position)
    elif c.first_position is not None:
        positions = source.table("model.embed_positions", c.max_position, c.first_position)
    if embedding_rules(c).norm:
        norm = source.norm("model.embed_norm", c.embedding_width)
    return positions, norm


def _load_layers(source: Source, rules: LayerRules) -> list[Layer]:
    layers: list[Layer] = []
    for i in source.layers:
        with source.ops.layers.load(i):
            layers.append(Layer(source, f"model.layers.{i}", i, rules))
    _look_ahead(layers)
    return layers


def _look_ahead(layers: Sequence[Layer]) -> None:
    """Let each layer guess which experts the next one needs, where they may have to be read.

    What a layer adds to the residual stream is small beside it, so the next router's choice for the
    stream before the experts of this layer is mostly the one it makes later.
    """
    for layer, after in pairwise(layers):
        plain = not (after.parallel or after.post_norm or layer.parallel or layer.post_norm)
        if not (plain and isinstance(after.mlp, ExpertMLP) and after.before_mlp is not None):
            continue
        if isinstance(layer.mlp, ExpertMLP) and after.mlp.reads_ahead:
            layer.ahead = after.before_mlp, after.mlp


def _places_of_caches(config: ModelConfig, layers: range) -> dict[int, tuple[int, ...]]:
    """For each layer of a stage the places of its caches among those of the stage."""
    _check_shared_keys(config, layers)
    first = min((one for i in layers for one in config.caches_of(i)), default=0)
    return {i: tuple(one - first for one in config.caches_of(i)) for i in layers}


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
        c, mesh = source.config, source.mesh
        self.config, self.ops, self._mesh = c, source.ops, mesh
        self._rules = layer_rules(c)
        self.embedding: Embedding | None = source.embedding() if mesh.is_first else None
        #: The tables of learned positions and of token types, and the norm of their sum.
        self.positions: Weight | None = None
        self.types: Weight | None = None
        self.embedding_norm: Norm | None = None
        if mesh.is_first:
            self.positions, self.embedding_norm = positions_and_norm(source)
        if mesh.is_first and c.token_types:
            task = ("model.embed_tasks", c.tasks) if c.tasks else None
            self.types = source.table("model.embed_types", c.token_types, plus=task)
        #: What makes the embeddings of each layer.
        self.inputs: LayerInputs | None = None
        if c.layer_inputs:
            from sdk.models.layer_inputs import LayerInputs

            self.inputs = LayerInputs(source)
        self._pull_projections(source)
        self.head: Head | None = None
        if mesh.is_last and c.causal:
            self.head = source.head(self.embedding)
        #: The numbers of the layers of this stage.
        self.numbers = source.layers
        #: What runs layers over several residual streams.
        self.several: Streams | None = None
        self.layers: Sequence[Layer | StreamLayer]
        if c.streams is None:
            self.layers = _load_layers(source, self._rules)
        else:
            from sdk.models.altup import Streams

            self.several = Streams(source, self._rules)
            self.layers = self.several.layers
        self._caches = _places_of_caches(c, self.numbers)
        self.norm: Norm | None = None
        if mesh.is_last and not c.post_norm:
            self.norm = source.norm("model.norm")
        self.ropes = [source.rope(spec) for spec in c.ropes]
        if source.has("model.embed_rotations.weight"):
            from sdk.models.sines import check_rotations

            check_rotations(source, self.ropes[0], c.max_position)
        self.axes = self._axes()
        #: What the embeddings of tokens of images are replaced by: the rows of the image cache,
        #: float32 ``[rows, features * hidden]``; ``None``: this rank sees no images.
        self.images: Tensor | None = None
        #: Of attention, by distance: see :meth:`sdk.kernels.operators.ops.Ops.attention`.
        self.biases = biases_by_distance(source)
        self._linears = source.linears
        #: The tensors of one dimension that it has pulled, by path.
        self.vectors = source.vectors
        #: Layers of which ``streams`` has the input in each step, in ascending order.
        self.streamed: Sequence[int] = ()
        #: The residual streams that enter those layers in the last step, float32 ``[T, hidden]``.
        self.streams: list[Tensor] = []

    def _pull_projections(self, source: Source) -> None:
        """From the width of embeddings to that of layers, and back after the last one."""
        c, mesh = self.config, source.mesh
        #: Whether embeddings of tokens alone are projected.
        self._tokens_projected = embedding_rules(c).projected == "tokens"
        self.projection: Projection | None = None
        self.projection_out: Projection | None = None
        if c.embedding_size is None:
            return
        if mesh.is_first:
            self.projection = source.matrix("model.embed_project", c.hidden_size, c.embedding_size)
        if mesh.is_last and self._tokens_projected:
            path = "model.project_out"
            self.projection_out = source.matrix(path, c.embedding_size, c.hidden_size)

    def _axes(self) -> Tensor | None:
        """By which axis of positions each rotary frequency turns, int32; ``None``: there is one.

        :raises CheckpointError: there are more frequencies than axes.
        """
        vision = self.config.vision
        if vision is None or vision.axes is None:
            return None
        most = max(len(rope.inv_freq) for rope in self.ropes)
        if len(vision.axes) < most:
            raise CheckpointError(
                f"mrope_section: expected the axes of {most} rotary frequencies, found "
                f"{len(vision.axes)}"
            )
        return torch.tensor(vision.axes, dtype=torch.int32, device=self.ops.device)

    @property
    def shift_invariant(self) -> bool:
        """Whether all keys may lack the same vector, which adds a constant to all scores of a
        query: no soft caps, no sinks, and no latents, which are values too."""
        plain = self.config.attention_softcap is None and not self._rules.sinks
        return plain and self.config.latent is None

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """See :class:`CausalLM`."""
        return iter(self._linears)

    def __call__(
        self,
        inputs: Tensor,
        batch: AttentionBatch,
        kv: Sequence[Memory],
        out: Tensor | None = None,
    ) -> Tensor:
        """See :class:`CausalLM`. ``out``: where the last stage writes hidden states."""
        delta = self._enter(inputs, batch)
        residual: Tensor | None = None
        angles = [self._angles(rope, batch) for rope in self.ropes]
        own = None if self.inputs is None else self.inputs(inputs, delta)
        firsts = self._received_values(len(inputs))
        step = Step(batch, angles, self.biases, own, firsts)
        self.streams = []
        if self.several is not None:
            assert self.norm is not None and not self.streamed
            x = self.several(delta, step, kv, self._caches)
            return self.ops.add_norm(x, None, self.norm, wide=True, out=out)[0]
        for i, layer in zip(self.numbers, self.layers, strict=True):
            places = self._caches[i] if self.config.causal else (0,)
            if i in self.streamed:
                stream = self.ops.add(self.ops.zeros(*delta.shape), delta)
                self.streams.append(stream if residual is None else self.ops.add(stream, residual))
            with self.ops.layers.run(i):
                assert isinstance(layer, Layer)
                to = out if i == self.numbers[-1] and self.projection_out is None else None
                delta, residual = layer(delta, residual, step, [kv[one] for one in places], to)
            if i + 1 < self._features and batch.image_rows is not None:
                assert residual is not None
                self._place(residual, batch.image_rows, i + 1, add=True)
        if self._mesh.downstream is not None:
            stream = delta if residual is None else self.ops.add(residual, delta)
            self.ops.send(stream, self._mesh.downstream)
            for values in firsts:
                wide = values.view(len(values), -1).to(torch.float32)  # the only kind that is sent
                self.ops.send(wide, self._mesh.downstream)
            return stream
        return self._leave(delta, residual, out)

    def _leave(self, delta: Tensor, residual: Tensor | None, out: Tensor | None) -> Tensor:
        """Hidden states of the last layer, as transformers has them: after the final norm and the
        projection to the width of embeddings."""
        last = out if self.projection_out is None else None
        if self.norm is not None:
            delta, _ = self.ops.add_norm(delta, residual, self.norm, wide=True, out=last)
        if self.projection_out is None:
            return delta
        if out is None:
            out = self.ops.empty(len(delta), self.config.output_size)
        return self.projection_out(delta, out)

    def _received_values(self, rows: int) -> list[Tensor]:
        """See ``Step.first_values``: those of the stage before, which come after its stream."""
        link = self._mesh.upstream
        if link is None or not self._rules.value_residual:
            return []
        width = self.config.hidden_size // self._mesh.size
        return [self.ops.receive(rows, width, link).to(self.ops.activations)]

    def _enter(self, inputs: Tensor, batch: AttentionBatch) -> Tensor:
        """The input of the first layer here: embeddings, or the stream of the stage before."""
        if self._mesh.upstream is not None:
            return self.ops.receive(len(inputs), self.config.hidden_size, self._mesh.upstream)
        x = inputs if inputs.is_floating_point() else self.embed(inputs)
        if batch.image_rows is not None:
            self._place(x, batch.image_rows, 0, add=False)
        if self.positions is not None:
            x = self.ops.add(self.positions.rows(batch.positions), x)
        if self.types is not None:
            assert batch.token_types is not None
            x = self.ops.add(self.types.rows(batch.token_types), x)
        if self.embedding_norm is not None:
            x = self.ops.norm(x, self.embedding_norm)
        if self.projection is None or self._tokens_projected:
            return x
        return self.projection(x)

    def _angles(self, rope: Rope, batch: AttentionBatch) -> tuple[Tensor, Tensor]:
        """Those of a rotary embedding."""
        if self.axes is None or batch.shifts is None:
            return rope.cos_sin(batch.positions, self.ops)
        # of a part of the head, or of nothing
        axes = self.axes[: len(rope.inv_freq)]
        return rope.cos_sin(batch.positions, self.ops, axes, batch.shifts)

    @property
    def _features(self) -> int:
        """Vectors of a token of an image: its embedding, then one for each of the first layers."""
        return 0 if self.images is None else self.images.shape[1] // self.config.hidden_size

    def _place(self, x: Tensor, index: Tensor, feature: int, *, add: bool) -> None:
        """Put a feature of the image cache in the place of rows of x, or add it to them."""
        if self.images is not None:
            width = self.config.hidden_size
            rows = self.images[:, feature * width : (feature + 1) * width]
            self.ops.place_rows(x, rows, index, add=add)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See :class:`CausalLM`."""
        assert self.embedding is not None
        x = self.embedding(token_ids)
        if self.projection is None or not self._tokens_projected:
            return x
        return self.projection(x)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See :class:`CausalLM`. ``out``: where to write them, if no other rank has a part of the
        vocabulary."""
        assert self.head is not None
        return self.head(hidden, out)
