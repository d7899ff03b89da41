"""Mixtral: Mistral with experts. Jiang et al., "Mixtral of Experts" (2024).

GGUF files of it call themselves ``llama``; the experts tell them apart.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules, TensorRules
from sdk.models.configs.sliding import all_but_every

ARCHITECTURE = Architecture(
    "mixtral",
    config=ConfigRules(
        keys=("sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"),
        sliding=all_but_every(1),
        expert_width="intermediate_size",
    ),
    tensors=TensorRules(block_sparse_moe=True),
    gguf=GgufRules("llama", matches=lambda keys: keys.expert_count > 0, interleaved_qk=True),
)
