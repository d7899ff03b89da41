"""Qwen 3: Llama with an RMSNorm over every query and key head before the rotation."""

from __future__ import annotations

from sdk.models.decoder import Decoder, HeadNormAttention
from sdk.models.llama import LlamaLayer


class Qwen3Layer(LlamaLayer):
    attention_type = HeadNormAttention


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = Qwen3Layer
