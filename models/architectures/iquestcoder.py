"""IQuest-Coder: Llama. Its first code had options that no published model uses."""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules

ARCHITECTURE = Architecture(
    "iquestcoder",
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias"),
        fixed={"clip_qkv": None, "use_sliding_window": False},
        defaults={"head_dim": 128},
    ),
)
