"""MiniCPM 3: MiniCPM with DeepSeek's latent attention, whose halves turn against each other.

transformers' modeling_minicpm3.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules
from sdk.models.architectures.minicpm import FACTORS, derived
from sdk.models.configs.latent import LATENT_GGUF_KEYS, LATENT_KEYS, latent_of, read_latent

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields
    from sdk.models.configs.latent_spec import LatentSpec

#: The factors of the only model, which files do not state and llama.cpp has in its code.
_FACTORS = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}


def _latent(fields: Fields) -> LatentSpec:
    return latent_of(fields)._replace(adjacent_pairs=False)


def _derived(config: dict[str, Any]) -> None:
    """Only the names of MiniCPM count: transformers' class reads no others."""
    if "scale_emb" in config:
        for key in FACTORS:
            config.pop(key, None)
    derived(config)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_latent(config, keys)
    config.update(_FACTORS)


ARCHITECTURE = Architecture(
    "minicpm3",
    config=ConfigRules(
        keys=(*LATENT_KEYS, *FACTORS, "original_max_position_embeddings", "mlp_bias"),
        ignored=("scale_emb", "scale_depth", "dim_model_base", "qk_head_dim", "mup_denominator"),
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        derived=_derived,
        latent=_latent,
    ),
    more_gguf=(GgufRules("minicpm3", read=_read_gguf, keys=LATENT_GGUF_KEYS),),
)
