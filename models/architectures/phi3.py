"""Phi-3 and Phi-3.5: Llama whose files hold q/k/v and gate/up joined; longrope, partial rotation.

Abdin et al., "Phi-3 Technical Report" (2024). :meth:`sdk.models.source.Source.columns` takes the
joined matrices as stored, and :mod:`sdk.models.rope` selects the long or the short factors.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules
from sdk.models.configs.sliding import all_but_every


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["original_max_position_embeddings"] = keys.integer(
        "rope.scaling.original_context_length", (1, 1 << 31), config["max_position_embeddings"]
    )


ARCHITECTURE = Architecture(
    "phi3",
    config=ConfigRules(
        keys=("sliding_window", "original_max_position_embeddings", "partial_rotary_factor"),
        sliding=all_but_every(1),
    ),
    # gate and up are one matrix, under the name of up
    gguf=GgufRules("phi3", tensors={"mlp.gate_up_proj": "ffn_up"}, read=_read_gguf),
)
