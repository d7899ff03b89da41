"""EuroBERT: a Llama whose tokens see both ways.

Boizard et al., "EuroBERT" (2025), arXiv 2503.05500; transformers' modeling_eurobert.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules
from sdk.models.configs.head_rules import HeadRules

ARCHITECTURE = Architecture(
    "eurobert",
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias"),
        ignored=("classifier_pooling", "mask_token_id"),
        defaults={"rope_theta": 250_000.0},
        causal=False,
    ),
    gguf=GgufRules("eurobert"),
    head=HeadRules(
        ("dense",),
        activation="GELU",
        pooling="=classifier_pooling",
        poolings=("late", "bos", "mean"),
    ),
)
