"""BitNet b1.58: Llama with ternary weights, an MLP of relu^2, and a norm before the last projection
of each block.

Microsoft, "BitNet b1.58 2B4T Technical Report" (2025), arXiv 2504.12285; transformers'
modeling_bitnet.py. GGUF files come from two converters, which do not write the activation:
``bitnet-b1.58`` is BitNet's own and has relu^2; ``bitnet`` is llama.cpp's, whose code computes
silu, as the reproductions of 1bitLLM do.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)
from sdk.quant.errors import UnsupportedError

_TENSORS = {
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
}


def _squared(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "relu2"


def _silu(config: dict[str, Any], keys: GgufKeys) -> None:
    heads, own = config["num_attention_heads"], config["num_key_value_heads"]
    if own != heads:  # BitNet b1.58 2B4T, whose relu^2 no file of this name says
        raise UnsupportedError(
            f"{keys.source}: bitnet.attention.head_count_kv: expected {heads}, as in the models "
            f"of 1bitLLM, which have silu; found {own}: the file does not say its activation. "
            "Open a GGUF file of the architecture 'bitnet-b1.58', or the folder of its "
            "safetensors files"
        )
    config["hidden_act"] = "silu"


ARCHITECTURE = Architecture(
    "bitnet",
    layer=LayerRules(sub_norms=True),
    config=ConfigRules(
        keys=("attention_bias",),
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    ),
    gguf=GgufRules("bitnet-b1.58", tensors=_TENSORS, read=_squared),
    more_gguf=(GgufRules("bitnet", tensors=_TENSORS, read=_silu),),
)
