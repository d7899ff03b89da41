"""PLM: DeepSeek's latent attention, and an MLP of squared ReLU without a gate.

Deng et al., "PLM: Efficient Peripheral Language Models" (2025), arXiv 2503.12167. transformers has
no class: the facts are those of the code beside the weights, which is not run, and of llama.cpp.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)
from sdk.models.configs.latent import (
    LATENT_GGUF_KEYS,
    LATENT_KEYS,
    latent_of,
    read_latent,
)


def _derived(config: dict[str, Any]) -> None:
    config["num_key_value_heads"] = config.get("num_attention_heads")


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_latent(config, keys)
    config["hidden_act"] = "relu2"
    config["tie_word_embeddings"] = True  # llama.cpp's code has no other head


ARCHITECTURE = Architecture(
    "plm",
    aliases=("PLM",),
    layer=LayerRules(gated=False),
    config=ConfigRules(
        keys=LATENT_KEYS,
        ignored=("qk_head_dim", "attention_dropout", "max_window_layers", "use_sliding_window"),
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        stated=(),
        fixed={"hidden_act": "relu2", "q_lora_rank": None, "rope_interleave": True},
        biases=lambda fields: Biases(),
        derived=_derived,
        latent=latent_of,
    ),
    more_gguf=(GgufRules("plm", read=_read_gguf, keys=LATENT_GGUF_KEYS),),
)
