"""Qwen 3 with experts: some layers, or all, have a mixture in place of the MLP.

"Qwen3 Technical Report" (2025); transformers' modeling_qwen3_moe.py.
"""

from __future__ import annotations

from sdk.models.decoder import MLP, Decoder
from sdk.models.experts import ExpertMLP
from sdk.models.layers import Source
from sdk.models.qwen3 import Qwen3Layer


class Qwen3MoeLayer(Qwen3Layer):
    def feed_forward(self, source: Source, path: str, index: int) -> MLP | ExpertMLP:
        spec = source.config.experts
        has_experts = spec is not None and spec.layers[index]
        return ExpertMLP(source, path) if has_experts else MLP(source, path)


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = Qwen3MoeLayer
