"""Mixtral: Mistral with experts. Jiang et al., "Mixtral of Experts" (2024).

GGUF files of it call themselves ``llama``; the experts tell them apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.architecture import Architecture, ConfigRules, GgufRules, TensorRules
from sdk.models.architectures.llama import LlamaLayer
from sdk.models.decoder import Decoder
from sdk.models.moe import ExpertMLP
from sdk.models.sliding import all_but_every

if TYPE_CHECKING:
    from sdk.models.layers import Source


class MixtralLayer(LlamaLayer):
    def feed_forward(self, source: Source, path: str, index: int) -> ExpertMLP:
        return ExpertMLP(source, path)


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = MixtralLayer


ARCHITECTURE = Architecture(
    "mixtral",
    Model,
    config=ConfigRules(
        keys=("sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"),
        sliding=all_but_every(1),
        expert_width="intermediate_size",
    ),
    tensors=TensorRules(block_sparse_moe=True),
    gguf=GgufRules("llama", matches=lambda keys: keys.expert_count > 0, interleaved_qk=True),
)
