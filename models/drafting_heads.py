"""Heads that draft from the hidden states of a model: EAGLE, EAGLE-3, Medusa, and the model's own.

* EAGLE (Li et al. 2024, arXiv 2401.15077) is one decoder layer. At position i it reads the
  embedding of token i + 1 and the model's last hidden state of token i, and predicts the hidden
  state of token i + 1, which becomes the next input.
* EAGLE-3 (Li et al. 2025, arXiv 2503.01840) reads three residual streams out of the middle of the
  model instead, and has a head of its own, usually for the most frequent tokens only.
* Medusa (Cai et al. 2024, arXiv 2401.10774) has no attention: each of its heads predicts a token
  at a fixed distance from the last hidden state.
* A block of multi-token prediction (MTP; DeepSeek-V3, arXiv 2412.19437, section 2.2) is trained
  with the model and stored behind its layers. It reads what EAGLE reads, each with a norm, has a
  layer of the model's own kind and a norm, whose result becomes the next input.

Each class is a :class:`sdk.models.decoder.CausalLM` whose input, next to the tokens, is in a fixed
buffer: recorded steps read it there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sdk.kernels.dataclass import dataclass
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.models.configs.config import ModelConfig
from sdk.models.decoder import Layer, layer_rules
from sdk.models.mixers.attention import Attention, Step
from sdk.models.mlp import MLP
from sdk.models.parallel import Mesh
from sdk.models.projections import Head, Linear, Projection
from sdk.models.source import Source
from sdk.quant.checkpoint import Checkpoint

LAYER = "model.layers.0"
#: Logits of tokens that a head does not know: no draw finds them, and all arithmetic stays finite.
_NEVER = -1e30


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The sizes of a head.

    ``model``: of its layer, with the vocabulary of the model it drafts for. ``draft_vocab``: tokens
    of its own head. ``features``: values of the model's hidden states that it reads for each token.
    ``streams``: the layers of the model whose inputs they are; without any, they are the last
    hidden state. ``num_heads`` of ``num_blocks`` each: Medusa's. ``block``: the path of one that is
    in the model's own files; ``own_embedding``, ``own_head``: whether those are not the model's.
    """

    method: str
    model: ModelConfig
    draft_vocab: int
    features: int
    streams: tuple[int, ...] = ()
    norm_before_residual: bool = False
    num_heads: int = 1
    num_blocks: int = 0
    block: str = ""
    own_embedding: bool = False
    own_head: bool = False

    @property
    def has_layer(self) -> bool:
        """Whether it attends to earlier tokens, so that it has keys and values."""
        return self.method != "medusa"


class ModelEnds(NamedTuple):
    """The embedding and the head of the model, which a head uses if it has none of its own."""

    embed: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]


class DraftingHead(ABC):
    """A head that drafts: what EAGLE, EAGLE-3 and Medusa share.

    ``inputs`` float32 ``[tokens, hidden]``: the buffer of the inputs.
    """

    def __init__(self, source: Source, head: HeadConfig, inputs: Tensor) -> None:
        self.config = head.model
        self.ops: Ops = source.ops
        self.inputs = inputs
        self._linears = source.linears

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """See :class:`sdk.models.decoder.CausalLM`."""
        return iter(self._linears)

    @abstractmethod
    def __call__(self, inputs: Tensor, batch: AttentionBatch, kv: Sequence[Any]) -> Tensor:
        """See :class:`sdk.models.decoder.CausalLM`. The result can be the next ``inputs``."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """See :class:`sdk.models.decoder.CausalLM`: of all tokens of the model."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """See :class:`sdk.models.decoder.CausalLM`."""
        raise NotImplementedError(f"{type(self).__name__} has no embedding")

    def project(self, features: Tensor) -> Tensor:
        """Hidden states of the model, ``[T, features]`` -> rows of ``inputs``."""
        return features


class EagleLayer:
    """A Llama layer that has no norm at its beginning, or an optional one."""

    def __init__(self, source: Source, path: str) -> None:
        self.ops = source.ops
        self.input_norm: Norm | None = None
        if source.checkpoint.has(f"{path}.input_layernorm.weight"):
            self.input_norm = source.norm(f"{path}.input_layernorm")
        self.attention = Attention(source, f"{path}.self_attn", 0)
        self.post_attention_norm = source.norm(f"{path}.post_attention_layernorm")
        self.mlp = MLP(source, f"{path}.mlp")

    def __call__(self, x: Tensor, step: Step, pages: KVPages) -> Tensor:
        """``[T, hidden] -> [T, hidden]``, the sum of all."""
        residual = x
        if self.input_norm is not None:
            zeros = self.ops.zeros(*x.shape)
            x, residual = self.ops.add_norm(x, zeros, self.input_norm)
        return self.rest(self.attention(x, step, pages), residual)

    def rest(self, delta: Tensor, residual: Tensor) -> Tensor:
        """What follows attention."""
        x, residual = self.ops.add_norm(delta, residual, self.post_attention_norm)
        return self.ops.add(residual, self.mlp(x))


class _PairAttention(Attention):
    """Attention whose input is two joined vectors."""

    second: Projection

    def projection(
        self,
        source: Source,
        path: str,
        parts: Sequence[tuple[str, int, int, int]],
        order: Tensor | None,
    ) -> Projection:
        assert order is None, "a head is a Llama layer"
        bias = source.config.attention_bias
        first, self.second = source.column_halves(path, "qkv_proj", parts, bias=bias)
        return first


class Eagle3Layer(EagleLayer):
    """A Llama layer whose attention reads the embedding and the hidden state, each normalized."""

    def __init__(self, source: Source, path: str, norm_before_residual: bool) -> None:
        self.ops = source.ops
        self.input_norm = source.norm(f"{path}.input_layernorm")
        self.hidden_norm = source.norm(f"{path}.hidden_norm")
        self.norm_before_residual = norm_before_residual
        self.attention = self.pair_attention = _PairAttention(source, f"{path}.self_attn", 0)
        self.post_attention_norm = source.norm(f"{path}.post_attention_layernorm")
        self.mlp = MLP(source, f"{path}.mlp")

    def run(self, embedded: Tensor, hidden: Tensor, step: Step, pages: KVPages) -> Tensor:
        """Both ``[T, hidden]``, as the result; ``hidden`` is not changed."""
        ops, attention = self.ops, self.pair_attention
        assert self.input_norm is not None
        first = ops.norm(embedded, self.input_norm)
        zeros = ops.zeros(*hidden.shape)
        second, residual = ops.add_norm(hidden, zeros, self.hidden_norm)
        if self.norm_before_residual:
            residual = ops.add(ops.zeros(*hidden.shape), second)
        qkv = ops.add(attention.qkv(first), attention.second(second))
        return self.rest(attention.attend(qkv, step, pages), residual)


class _LayerHead(DraftingHead):
    """Embedding, head and angles of one that has a layer; ``ends``: those of the model."""

    def __init__(self, source: Source, head: HeadConfig, inputs: Tensor, ends: ModelEnds) -> None:
        super().__init__(source, head, inputs)
        self._embed, self._logits = ends
        self._ropes = [source.rope(spec) for spec in head.model.ropes]

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embed(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden)

    def _step(self, batch: AttentionBatch) -> Step:
        return Step(batch, [rope.cos_sin(batch.positions, self.ops) for rope in self._ropes])


class _EagleBase(_LayerHead):
    """EAGLE and EAGLE-3, whose folders may have an embedding and a head."""

    def __init__(self, source: Source, head: HeadConfig, inputs: Tensor, ends: ModelEnds) -> None:
        super().__init__(source, head, inputs, ends)
        c, checkpoint = head.model, source.checkpoint
        if checkpoint.has("model.embed_tokens"):
            self._embed = source.embedding()
        if checkpoint.has("lm_head"):
            self._logits = source.matrix("lm_head", head.draft_vocab, c.hidden_size)
            if checkpoint.has("d2t"):
                self._logits = _SomeTokens(self._logits, checkpoint.tensor("d2t"), c.vocab_size)


class EagleHead(_EagleBase):
    """EAGLE: ``layer(fc(embedding, hidden))``, whose result goes straight into the model's head."""

    def __init__(self, source: Source, head: HeadConfig, inputs: Tensor, ends: ModelEnds) -> None:
        super().__init__(source, head, inputs, ends)
        width = head.model.hidden_size
        self.first, self.second = source.column_halves(LAYER, "fc", [("fc", width, 0, width)])
        self.layer = EagleLayer(source, LAYER)

    def __call__(self, inputs: Tensor, batch: AttentionBatch, kv: Sequence[Any]) -> Tensor:
        """See :class:`sdk.models.decoder.CausalLM`; the row of token i + 1 is at position i."""
        hidden = self.inputs[: inputs.shape[0]]
        x = self.ops.add(self.first(self.embed(inputs)), self.second(hidden))
        return self.layer(x, self._step(batch), kv[0])


class Eagle3Head(_EagleBase):
    """EAGLE-3: ``layer(embedding, hidden)``, where the first hidden states are ``fc(streams)``."""

    def __init__(self, source: Source, head: HeadConfig, inputs: Tensor, ends: ModelEnds) -> None:
        super().__init__(source, head, inputs, ends)
        self.fc = source.matrix(f"{LAYER}.fc", head.model.hidden_size, head.features)
        self.layer = Eagle3Layer(source, LAYER, head.norm_before_residual)
        self.norm = source.norm("model.norm")

    def project(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def __call__(self, inputs: Tensor, batch: AttentionBatch, kv: Sequence[Any]) -> Tensor:
        """See :class:`EagleHead`; the result is not normalized."""
        hidden = self.inputs[: inputs.shape[0]]
        return self.layer.run(self.embed(inputs), hidden, self._step(batch), kv[0])

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.ops.norm(hidden, self.norm))


class NextTokenHead(_LayerHead):
    """Multi-token prediction: ``norm(layer(eh_proj(enorm(embedding), hnorm(hidden))))``.

    The hidden state is that after the model's final norm, and the next one that after the block's,
    from which the head predicts: so it is in vLLM's deepseek_mtp, qwen3_next_mtp, exaone_moe_mtp
    and nemotron_h_mtp, and in llama.cpp for every model. (vLLM's glm4_moe_mtp goes on with the
    state before that norm.) Of several blocks the first one drafts all tokens.
    """

    def __init__(self, source: Source, head: HeadConfig, inputs: Tensor, ends: ModelEnds) -> None:
        super().__init__(source, head, inputs, ends)
        c, path = head.model, head.block
        width = c.hidden_size
        self.first, self.second = source.column_halves(
            path, "eh_proj", [("eh_proj", width, 0, width)]
        )
        self.embedding_norm = source.norm(f"{path}.enorm")
        self.hidden_norm = source.norm(f"{path}.hnorm")
        self.layer = Layer(source, path, 0, layer_rules(c))
        norms = (f"{path}.shared_head.norm", f"{path}.final_layernorm", "model.norm")
        self.norm = source.norm(next(one for one in norms if source.has(f"{one}.weight")))
        if head.own_embedding:
            self._embed = source.embedding(f"{path}.embed_tokens")
        if head.own_head:
            own = source.matrix(f"{path}.shared_head.head", head.draft_vocab, width)
            self._logits = Head(own, c)

    def __call__(self, inputs: Tensor, batch: AttentionBatch, kv: Sequence[Any]) -> Tensor:
        """See :class:`EagleHead`."""
        ops = self.ops
        embedded = ops.norm(self.embed(inputs), self.embedding_norm)
        hidden = ops.norm(self.inputs[: inputs.shape[0]], self.hidden_norm)
        x = ops.add(self.first(embedded), self.second(hidden))
        delta, residual = self.layer(x, None, self._step(batch), kv[:1])
        return ops.add_norm(delta, residual, self.norm, wide=True)[0]


class MedusaHead(DraftingHead):
    """Medusa's head number ``index``: ``lm_head(x + silu(linear(x)))``, with one block or more.

    It predicts token i + 2 + ``index`` from the hidden state of token i.
    """

    def __init__(self, source: Source, head: HeadConfig, inputs: Tensor, index: int) -> None:
        super().__init__(source, head, inputs)
        width, path = head.model.hidden_size, f"heads.{index}"
        names = [f"{path}.blocks.{block}" for block in range(head.num_blocks)]
        self._blocks = [(source.matrix(name, width, width)) for name in names]
        ones = torch.ones(width, device=inputs.device)
        self._biases = []
        for block in self._blocks:
            bias = torch.zeros_like(ones) if block.bias is None else block.bias
            self._biases.append(torch.cat([bias, ones]))
        self._last = source.matrix(f"{path}.lm_head", head.draft_vocab, width)

    def __call__(self, inputs: Tensor, batch: AttentionBatch, kv: Sequence[Any]) -> Tensor:
        """The hidden states themselves."""
        return self.inputs[: inputs.shape[0]]

    def logits(self, hidden: Tensor) -> Tensor:
        """``[R, hidden] -> [R, vocab]``."""
        ops, width = self.ops, self.config.hidden_size
        for block, bias in zip(self._blocks, self._biases, strict=True):
            gate = ops.zeros(hidden.shape[0], 2 * width)  # silu(linear(x)) * 1
            block.weight.matmul(hidden, gate[:, :width])
            hidden = ops.add(ops.gated_activation(ops.add_bias(gate, bias), "silu"), hidden)
        return self._last(hidden)


class _SomeTokens:
    """Logits of a head that knows only some tokens: those of its token j are those of token
    ``j + offsets[j]`` of the model (d2t).
    """

    def __init__(self, linear: Projection, offsets: Tensor, vocab_size: int) -> None:
        self._linear = linear
        self._known = len(offsets)
        known = torch.arange(self._known) + offsets.cpu().to(torch.int64)
        others = torch.ones(vocab_size, dtype=torch.bool)
        others[known] = False
        device = linear.ops.device
        self._order = torch.cat([known, others.nonzero().flatten()]).to(torch.int32).to(device)
        never = torch.full((vocab_size,), _NEVER)
        never[: self._known] = 0.0
        self._never = never.to(device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[R, hidden] -> [R, vocab]``."""
        ops = self._linear.ops
        logits = ops.add_bias(ops.zeros(hidden.shape[0], len(self._order)), self._never)
        self._linear.weight.matmul(hidden, logits[:, : self._known])
        return ops.take_columns(logits, self._order, back=True)


def build_head(
    checkpoint: Checkpoint,
    head: HeadConfig,
    ops: Ops,
    inputs: Tensor,
    ends: ModelEnds,
    max_model_len: int,
) -> list[DraftingHead]:
    """The head, or each of Medusa's. Weights are pulled from ``checkpoint`` and packed."""
    source = Source(checkpoint, head.model, Mesh(), ops, max_model_len)
    if head.method == "medusa":
        return [MedusaHead(source, head, inputs, index) for index in range(head.num_heads)]
    kinds: dict[str, type[Any]] = {"eagle": EagleHead, "eagle3": Eagle3Head, "mtp": NextTokenHead}
    return [kinds[head.method](source, head, inputs, ends)]
