"""Granite 3: Llama with four fixed multipliers: embeddings, attention scores, blocks and logits.

Only the one on the blocks' outputs shows here; the others are plain fields of the config that the
shared parts apply. transformers' modeling_granite.py.
"""

from __future__ import annotations

from torch import Tensor

from sdk.kernels.kv_pages import KVPages
from sdk.models.decoder import Decoder, Step
from sdk.models.layers import Source
from sdk.models.llama import LlamaLayer


class GraniteLayer(LlamaLayer):
    """``x += m * attention(norm(x)); x += m * mlp(norm(x))``."""

    def __init__(self, source: Source, path: str, index: int) -> None:
        super().__init__(source, path, index)
        self.multiplier = source.config.residual_scale

    def __call__(
        self, delta: Tensor, residual: Tensor, step: Step, pages: KVPages
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.ops.add_rms_norm(delta, residual, self.input_norm, self.eps)
        delta = self.ops.scale(self.attention(x, step, pages), self.multiplier)
        x, residual = self.ops.add_rms_norm(delta, residual, self.post_attention_norm, self.eps)
        return self.ops.scale(self.mlp(x), self.multiplier), residual


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = GraniteLayer
