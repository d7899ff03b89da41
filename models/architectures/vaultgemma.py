"""VaultGemma: Gemma 2 without the norms after the blocks. transformers' modeling_vaultgemma.py."""

from __future__ import annotations

from sdk.models.architecture import Architecture, LayerRules, Norms
from sdk.models.architectures.gemma2 import ARCHITECTURE as GEMMA_2

ARCHITECTURE = Architecture(
    "vaultgemma",
    layer=LayerRules(norms=Norms(before_mlp="pre_feedforward_layernorm")),
    config=GEMMA_2.config,
    tensors=GEMMA_2.tensors,
    wide_range=True,
)
