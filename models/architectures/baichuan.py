"""Baichuan 1 and 2: Llama with queries, keys and values in one matrix; 13B has linear biases.

Yang et al., "Baichuan 2" (2023), arXiv 2309.10305. transformers has no class for the folders. As in
llama.cpp, 40 layers are those of 13B. Baichuan 2 scales the rows of its head to length 1 while it
runs: folders of it are refused, GGUF files taken as they are, as in llama.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    TensorRules,
)
from sdk.models.configs.derived import every_head_has_keys
from sdk.models.configs.score_biases import Alibi
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sdk.models.configs.fields import Fields

_LAYERS_OF_13B = 40
#: Rows of Baichuan 2's head.
_VOCABULARY_OF_2 = 125_696


def _large(fields: Fields) -> bool:
    return fields.values.get("num_hidden_layers") == _LAYERS_OF_13B


def _alibi(fields: Fields) -> Alibi | None:
    return Alibi() if _large(fields) else None


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    return [_large(fields)] * len(windows)


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    if config.get("max_position_embeddings") is None and "model_max_length" in config:
        config["max_position_embeddings"] = config["model_max_length"]
    if config.get("vocab_size") == _VOCABULARY_OF_2 and not config.get("scaled_head"):
        raise UnsupportedError(
            f"config: vocab_size: expected that of Baichuan 1, found {_VOCABULARY_OF_2}: folders "
            "of Baichuan 2, whose head is scaled while it runs, are not supported; its GGUF files "
            "are"
        )


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    layers = config["num_hidden_layers"]
    if layers not in (32, _LAYERS_OF_13B):
        raise UnsupportedError(
            f"{keys.source}: baichuan.block_count: expected 32 (7B) or {_LAYERS_OF_13B} (13B, with "
            f"linear biases), found {layers}: which of them the model is is not known"
        )
    config["scaled_head"] = True


ARCHITECTURE = Architecture(
    "baichuan",
    config=ConfigRules(
        ignored=("model_max_length", "z_loss_weight", "scaled_head", "gradient_checkpointing"),
        defaults={"rms_norm_eps": 1e-6},
        biases=lambda fields: Biases(),
        unrotated=_unrotated,
        alibi=_alibi,
        derived=_derived,
    ),
    tensors=TensorRules(names={"self_attn.qkv_proj": "self_attn.W_pack"}),
    more_gguf=(GgufRules("baichuan", read=_read_gguf, interleaved_qk=True),),
)
