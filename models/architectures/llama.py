"""Llama 2 and 3.x, SmolLM2 and everything else that calls itself ``llama``.

Pre-norm: each block reads the normalized sum of all before it and adds its output to that sum.
Touvron et al., "Llama 2" (2023); transformers' modeling_llama.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from sdk.models.architecture import Architecture, ConfigRules, GgufRules
from sdk.models.decoder import MLP, Attention, Decoder, Step

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.kv_pages import KVPages
    from sdk.models.layers import Source
    from sdk.models.moe import ExpertMLP


class LlamaLayer:
    """``x += attention(norm(x)); x += mlp(norm(x))``, the additions inside the norms."""

    attention_type: ClassVar[type[Attention]] = Attention

    def __init__(self, source: Source, path: str, index: int) -> None:
        self.ops = source.ops
        self.eps = source.config.rms_norm_eps
        self.input_norm = source.norm(f"{path}.input_layernorm")
        self.attention = self.attention_type(source, f"{path}.self_attn", index)
        self.post_attention_norm = source.norm(f"{path}.post_attention_layernorm")
        self.mlp = self.feed_forward(source, f"{path}.mlp", index)

    def feed_forward(self, source: Source, path: str, index: int) -> MLP | ExpertMLP:
        """The second block of the layer."""
        return MLP(source, path)

    def __call__(
        self, delta: Tensor, residual: Tensor | None, step: Step, pages: KVPages
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.ops.add_rms_norm_for(
            self.attention.rounding, delta, residual, self.input_norm, self.eps
        )
        delta = self.attention(x, step, pages)
        x, residual = self.ops.add_rms_norm_for(
            self.mlp.rounding, delta, residual, self.post_attention_norm, self.eps
        )
        return self.mlp(x), residual


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = LlamaLayer


ARCHITECTURE = Architecture(
    "llama",
    Model,
    config=ConfigRules(keys=("attention_bias", "mlp_bias"), stated=("hidden_act",)),
    gguf=GgufRules("llama", interleaved_qk=True),
)
