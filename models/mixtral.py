"""Mixtral: Mistral with experts. Jiang et al., "Mixtral of Experts" (2024)."""

from __future__ import annotations

from sdk.models.decoder import Decoder
from sdk.models.experts import ExpertMLP
from sdk.models.layers import Source
from sdk.models.llama import LlamaLayer


class MixtralLayer(LlamaLayer):
    def feed_forward(self, source: Source, path: str, index: int) -> ExpertMLP:
        return ExpertMLP(source, path)


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = MixtralLayer
