"""NeoBERT: norms before blocks, rotations of adjacent pairs, and SwiGLU.

Le Breton et al., "NeoBERT" (2025), arXiv 2502.19587. transformers has no class: the facts are those
of the code beside the weights of chandar-lab/NeoBERT, which is not run. Its rows of queries, keys
and values are those of one head after the other, and llama.cpp's converter leaves them so, though
llama.cpp reads all queries first: vectors of a GGUF file are here those of the folder.
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
    TensorRules,
)
from sdk.models.architectures.nomic_bert import check_only
from sdk.models.configs.derived import every_head_has_keys
from sdk.models.configs.head_rules import HeadRules

#: What older versions of the code could also do.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("SwiGLU", "swiglu", "silu"),
    "rms_norm": (True,),
    "rope": (True,),
    "ngpt": (False,),
}
#: The width that a config states, of which MLPs have two thirds. Ours: ``intermediate_size`` is
#: what MLPs have, and this may be called twice.
_STATED = "stated_intermediate_size"


def _derived(config: dict[str, Any]) -> None:
    check_only(config, _ONLY, "neobert")
    every_head_has_keys(config)
    config["tie_word_embeddings"] = True
    config["hidden_act"] = "silu"
    config.setdefault("eos_token_id", None)
    config.setdefault("rope_theta", 10000.0)
    if config.get("max_position_embeddings") is None:
        config["max_position_embeddings"] = config.get("max_length") or 1024
    width = config.get("intermediate_size")
    if _STATED not in config and type(width) is int:
        config[_STATED] = width
        config["intermediate_size"] = -(-(2 * width // 3) // 8) * 8


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config[_STATED] = None  # the file has the width of MLPs


ARCHITECTURE = Architecture(
    "neobert",
    layer=LayerRules(adjacent_pairs=True),
    config=ConfigRules(
        keys=(_STATED, *_ONLY),
        ignored=(
            *("embedding_init_range", "decoder_init_range", "classifier_init_range", "dim_head"),
            *("encoder_init_range", "kwargs", "dropout", "dropout_prob", "flash_attention"),
            *("base_scale", "type_vocab_size"),
        ),
        defaults={"norm_eps": 1e-6},
        stated=(),
        biases=lambda fields: Biases(),
        causal=False,
        norm_eps="norm_eps",
        derived=_derived,
    ),
    tensors=TensorRules(
        names={
            "model.layers": "model.transformer_encoder",
            "model.embed_tokens": "model.encoder",
            "model.norm": "model.layer_norm",
            "self_attn.qkv_proj": "qkv",
            "self_attn.o_proj": "wo",
            "mlp.gate_up_proj": "ffn.w12",
            "mlp.gate_proj": "ffn.w1",
            "mlp.up_proj": "ffn.w2",
            "mlp.down_proj": "ffn.w3",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        qkv_by_group=True,
    ),
    gguf=GgufRules(
        "neo-bert",
        tensors={"mlp.gate_up_proj": "ffn_up", "model.norm": "enc.output_norm"},
        read=_read_gguf,
        rows_as_stored=True,
    ),
    head=HeadRules(("dense",), on_tokens=True),
)
