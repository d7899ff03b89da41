"""gpt-oss: experts with biases and a gate of their own, and attention that may look at nothing.

Every head has a sink, one more logit that takes probability and gives no value. Every other layer
sees a window only. OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025); transformers'
modeling_gpt_oss.py.
"""

from __future__ import annotations

from sdk.models.decoder import Attention, Decoder
from sdk.models.experts import ExpertMLP
from sdk.models.layers import Source
from sdk.models.llama import LlamaLayer


class SinkAttention(Attention):
    def __init__(self, source: Source, path: str, index: int) -> None:
        super().__init__(source, path, index)
        heads = source.heads
        sinks = source.vector(f"{path}.sinks", source.config.num_heads)
        self.sinks = sinks[heads.start : heads.start + heads.count].contiguous()


class GptOssLayer(LlamaLayer):
    attention_type = SinkAttention

    def feed_forward(self, source: Source, path: str, index: int) -> ExpertMLP:
        return ExpertMLP(source, path, router="router")


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = GptOssLayer
    has_sinks = True
