"""The parts that decoders share: attention over pages, the gated MLP, the loop over the layers.

A layer takes ``(delta, residual)`` and returns the same: ``residual`` is the sum of everything
before, ``delta`` the last block's output, not yet added. The addition then happens inside the next
norm (``Ops.add_rms_norm``), one pass over memory instead of two. What differs between models, such
as where norms are and what is scaled, is in each model's own file.

torch is imported for type checkers only: see :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from sdk.kernels.head_norms import HeadNorms

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.batch import AttentionBatch
    from sdk.kernels.kv_pages import KVPages
    from sdk.kernels.rounding import Rounding, Rows
    from sdk.models.config import ModelConfig
    from sdk.models.layers import Embedding, ExpertProjection, Head, Projection, Source


class CausalLM(Protocol):
    """A model as the engine sees it."""

    config: ModelConfig

    def __call__(self, inputs: Tensor, batch: AttentionBatch, kv: Sequence[KVPages]) -> Tensor:
        """Run one step; hidden states float32 ``[T, hidden]`` after the final norm.

        A stage that is not the last one returns its residual stream, which it has sent on.
        ``inputs``: token ids int64 ``[T]``, or embeddings float32 ``[T, hidden]`` that already have
        the model's scale; only the first stage reads them. Keys and values are written into ``kv``,
        one entry for each layer of this stage.
        """

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 ``[T]`` -> embeddings float32 ``[T, hidden]`` with the model's scale."""

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, hidden]`` -> float32 ``[R, vocab]``, after the final scale and soft cap."""

    def linears(self) -> Iterator[tuple[str, Projection | ExpertProjection]]:
        """All projections with their paths."""


class Step(NamedTuple):
    """What all layers of a step share; ``local_angles``: rotary angles of the sliding layers."""

    batch: AttentionBatch
    angles: tuple[Tensor, Tensor]
    local_angles: tuple[Tensor, Tensor]


class Attention:
    """Grouped-query attention of one layer; ``norms`` are those of each head.

    ``sinks`` float32 ``[heads]``: see :meth:`sdk.kernels.ops.Ops.attention`.
    """

    def __init__(self, source: Source, path: str, index: int) -> None:
        c, heads = source.config, source.heads
        self.ops = source.ops
        self.heads, self.kv_heads, self.head_dim = heads.count, heads.kv_count, c.head_dim
        self.scale, self.softcap = c.attention_scale, c.attention_softcap
        self.window = c.sliding_windows[index]
        self.sinks: Tensor | None = None
        self.norms: HeadNorms | None = None
        d = c.head_dim
        keys = (c.num_kv_heads * d, heads.kv_start * d, heads.kv_count * d)
        parts = [
            ("q_proj", c.num_heads * d, heads.start * d, heads.count * d),
            ("k_proj", *keys),
            ("v_proj", *keys),
        ]
        self.qkv = self.projection(source, path, parts)
        self.out = source.row(
            f"{path}.o_proj",
            c.num_heads * d,
            heads.start * d,
            heads.count * d,
            bias=c.output_bias,
        )

    def projection(
        self, source: Source, path: str, parts: Sequence[tuple[str, int, int, int]]
    ) -> Projection:
        """The projection to queries, keys and values."""
        bias = source.config.attention_bias
        return source.columns(path, "qkv_proj", parts, bias=bias, accurate=True)

    def normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Change q ``[T, heads, head_dim]`` and k ``[T, kv_heads, head_dim]`` before rotation."""
        return q, k

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`Projection`."""
        return self.qkv.rounding

    def __call__(self, x: Rows, step: Step, pages: KVPages) -> Tensor:
        return self.attend(self.qkv(x), step, pages)

    def attend(self, qkv: Tensor, step: Step, pages: KVPages) -> Tensor:
        """Attention of the projected ``[T, features of q, k and v]``."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = heads.split_with_sizes([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = self.normalize(q, k)
        cos, sin = step.angles if self.window is None else step.local_angles
        q = self.ops.rope_and_cache(q, k, v, cos, sin, step.batch, pages, self.norms)
        y = self.ops.attention(
            q,
            pages,
            step.batch,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
        )
        return self.out(y)


class HeadNormAttention(Attention):
    """Attention with an RMSNorm over each head's query and key (Qwen 3, Gemma 3)."""

    def __init__(self, source: Source, path: str, index: int) -> None:
        super().__init__(source, path, index)
        q_norm = source.norm(f"{path}.q_norm", self.head_dim)
        k_norm = source.norm(f"{path}.k_norm", self.head_dim)
        self.norms = HeadNorms(q_norm, k_norm, source.config.rms_norm_eps)


class MLP:
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, source: Source, path: str) -> None:
        c = source.config
        self.ops = source.ops
        self.activation = c.activation
        width = c.intermediate_size
        start, count = source.mesh.columns(width)
        self.gate_up = source.columns(
            path,
            "gate_up_proj",
            [("gate_proj", width, start, count), ("up_proj", width, start, count)],
            bias=c.mlp_bias,
        )
        self.down = source.row(f"{path}.down_proj", width, start, count, bias=c.mlp_bias)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`Projection`."""
        return self.gate_up.rounding

    def __call__(self, x: Rows) -> Tensor:
        return self.down(self.gate_up.gated(x, self.activation))


class Layer(Protocol):
    """One decoder layer: ``(delta, residual) -> (delta, residual)``; may modify both in place.

    The first layer has no residual.
    """

    def __init__(self, source: Source, path: str, index: int) -> None: ...

    def __call__(
        self, delta: Tensor, residual: Tensor | None, step: Step, pages: KVPages
    ) -> tuple[Tensor, Tensor]: ...


class Decoder:
    """Embedding, layers, final norm and head: a :class:`CausalLM` for one class of ``layer``.

    One stage of several has only some of the layers; the first one has the embedding, the last one
    norm and head.
    """

    layer: ClassVar[type[Layer]]
    #: Whether attention has attention sinks: see :class:`Attention`.
    has_sinks: ClassVar[bool] = False

    def __init__(self, source: Source) -> None:
        c = source.config
        self.config = c
        self.ops = source.ops
        self._mesh = mesh = source.mesh
        self.embedding: Embedding | None = source.embedding() if mesh.is_first else None
        self.head: Head | None = source.head(self.embedding) if mesh.is_last else None
        #: The numbers of the layers of this stage.
        self.numbers = source.layers
        self.layers: list[Layer] = []
        for i in self.numbers:
            with self.ops.layers.load(i):
                self.layers.append(self.layer(source, f"model.layers.{i}", i))
        self.norm: Tensor | None = source.norm("model.norm") if mesh.is_last else None
        self.rope = source.rope(c.rope)
        self.local_rope = None if c.local_rope is None else source.rope(c.local_rope)
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
        return self.config.attention_softcap is None and not self.has_sinks

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
        delta = self._enter(inputs)
        residual: Tensor | None = None
        angles = self.rope.cos_sin(batch.positions, self.ops)
        local = angles
        if self.local_rope is not None:
            local = self.local_rope.cos_sin(batch.positions, self.ops)
        step = Step(batch, angles, local)
        self.streams = []
        for i, layer, pages in zip(self.numbers, self.layers, kv, strict=True):
            if i in self.streamed:
                stream = self.ops.add(self.ops.zeros(*delta.shape), delta)
                self.streams.append(stream if residual is None else self.ops.add(stream, residual))
            with self.ops.layers.run(i):
                delta, residual = layer(delta, residual, step, pages)
        if self.norm is None:
            assert residual is not None and self._mesh.downstream is not None
            stream = self.ops.add(residual, delta)
            self.ops.send(stream, self._mesh.downstream)
            return stream
        hidden, _ = self.ops.add_rms_norm(
            delta, residual, self.norm, self.config.rms_norm_eps, wide=True, out=out
        )
        return hidden

    def _enter(self, inputs: Tensor) -> Tensor:
        """The input of the first layer here: embeddings, or the stream of the stage before."""
        if self._mesh.upstream is not None:
            return self.ops.receive(len(inputs), self.config.hidden_size, self._mesh.upstream)
        return inputs if inputs.is_floating_point() else self.embed(inputs)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See :class:`CausalLM`."""
        assert self.embedding is not None
        return self.embedding(token_ids)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See :class:`CausalLM`. ``out``: where to write them, if no other rank has a part of the
        vocabulary."""
        assert self.head is not None
        return self.head(hidden, out)
