"""Gemma 2: norms around each block, soft-capped scores and logits, every other layer slides.

Embeddings are scaled by ``sqrt(hidden_size)``; norm weights are stored minus 1. Riviere et al.,
"Gemma 2" (2024); transformers' modeling_gemma2.py.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sdk.kernels.kv_pages import KVPages
from sdk.models.decoder import MLP, Attention, Decoder, Step
from sdk.models.layers import Source


class Gemma2Layer:
    """``x += norm(attention(norm(x))); x += norm(mlp(norm(x)))``."""

    attention_type: ClassVar[type[Attention]] = Attention

    def __init__(self, source: Source, path: str, index: int) -> None:
        self.ops = source.ops
        self.eps = source.config.rms_norm_eps
        self.input_norm = source.norm(f"{path}.input_layernorm", plus_one=True)
        self.attention = self.attention_type(source, f"{path}.self_attn", index)
        self.post_attention_norm = source.norm(f"{path}.post_attention_layernorm", plus_one=True)
        self.pre_mlp_norm = source.norm(f"{path}.pre_feedforward_layernorm", plus_one=True)
        self.mlp = MLP(source, f"{path}.mlp")
        self.post_mlp_norm = source.norm(f"{path}.post_feedforward_layernorm", plus_one=True)

    def __call__(
        self, delta: Tensor, residual: Tensor, step: Step, pages: KVPages
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.ops.add_rms_norm(delta, residual, self.input_norm, self.eps)
        x = self.attention(x, step, pages)
        delta = self.ops.rms_norm(x, self.post_attention_norm, self.eps)
        x, residual = self.ops.add_rms_norm(delta, residual, self.pre_mlp_norm, self.eps)
        return self.ops.rms_norm(self.mlp(x), self.post_mlp_norm, self.eps), residual


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = Gemma2Layer
    norm_plus_one = True
