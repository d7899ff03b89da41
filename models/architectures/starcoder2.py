"""StarCoder 2: Llama with LayerNorms, biases and an MLP of GELU without a gate; all layers slide.

Lozhkov et al., "StarCoder 2" (2024), arXiv 2402.19173; transformers' modeling_starcoder2.py. GGUF
files of CodeShell (Xie et al. 2024, arXiv 2403.15747) hold the same layers, none of which slides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.configs.sliding import all_but_every
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def _biases(fields: Fields) -> Biases:
    every = fields.flag("use_bias", default=True)
    return Biases(every, every, every)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """llama.cpp has no window for this model, whatever the file says."""
    config["hidden_act"] = "gelu_pytorch_tanh"
    config["use_bias"] = config["attention_bias"]
    config["sliding_window"] = None


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    window, longest = config.get("sliding_window"), config["max_position_embeddings"]
    if window is not None and window < longest:
        raise UnsupportedError(
            f"{source}: starcoder2 is written as a GGUF file only without a sliding window, or "
            f"with one of at least max_position_embeddings {longest}, found {window}: llama.cpp "
            "has none for it"
        )
    return {}


ARCHITECTURE = Architecture(
    "starcoder2",
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    config=ConfigRules(
        keys=("use_bias", "sliding_window"),
        ignored=("residual_dropout", "embedding_dropout"),
        defaults={
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        sliding=all_but_every(1),
        biases=_biases,
        norm_eps="norm_epsilon",
    ),
    tensors=TensorRules(names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
    gguf=GgufRules("starcoder2", read=_read_gguf, write=_write_gguf, only={"use_bias": True}),
    more_gguf=(GgufRules("codeshell", read=_read_gguf),),
)
