"""Granite 3: Llama with four fixed multipliers: embeddings, attention scores, blocks and logits.

Only the one for the outputs of blocks is applied here; the shared parts apply the others, which are
fields of the config. transformers' modeling_granite.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules
from sdk.models.architectures.llama import LlamaLayer
from sdk.models.decoder import Decoder, Step
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.kv_pages import KVPages
    from sdk.models.layers import Source

#: The multipliers in a config and in the metadata of a GGUF file.
_MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


class GraniteLayer(LlamaLayer):
    """``x += m * attention(norm(x)); x += m * mlp(norm(x))``."""

    def __init__(self, source: Source, path: str, index: int) -> None:
        super().__init__(source, path, index)
        self.multiplier = source.config.residual_scale

    def __call__(
        self, delta: Tensor, residual: Tensor | None, step: Step, pages: KVPages
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.ops.add_rms_norm_for(
            self.attention.rounding, delta, residual, self.input_norm, self.eps
        )
        delta = self.ops.scale(self.attention(x, step, pages), self.multiplier)
        x, residual = self.ops.add_rms_norm_for(
            self.mlp.rounding, delta, residual, self.post_attention_norm, self.eps
        )
        return self.ops.scale(self.mlp(x), self.multiplier), residual


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = GraniteLayer


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    if not keys.flag("rope.scaling.finetuned", True):
        raise UnsupportedError(
            f"{keys.source}: granite.rope.scaling.finetuned: expected true, found false: a Granite "
            "model without rotary embeddings is not supported"
        )
    for ours, theirs in _MULTIPLIERS.items():
        default = config["head_dim"] ** -0.5 if ours == "attention_multiplier" else 1.0
        config[ours] = keys.number(theirs) or default


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    return {theirs: float(config[ours]) for ours, theirs in _MULTIPLIERS.items()}


ARCHITECTURE = Architecture(
    "granite",
    Model,
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias", *_MULTIPLIERS), defaults={"attention_multiplier": 1.0}
    ),
    gguf=GgufRules(
        "granite",
        read=_read_gguf,
        write=_write_gguf,
        keys=(*_MULTIPLIERS.values(), "rope.scaling.finetuned"),
        interleaved_qk=True,
    ),
)
