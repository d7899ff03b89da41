"""The config.json of MiniCPM-V 2.6 to 4.5, whose keys of the text stand beside those of images.

The code beside such weights builds the text model from the class that belongs to the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.loaders.folders.folder_file import folder_file
from sdk.loaders.json_file import read_json
from sdk.models.other_models import check_type
from sdk.models.vision.family import MINICPMV_TEXTS
from sdk.quant.errors import CheckpointError, UnsupportedError

MODEL_TYPE = "minicpmv"
#: Keys about images; all others are the text's, too.
_OF_IMAGES = (
    *("vision_config", "query_num", "slice_config", "slice_mode", "drop_vision_last_layer"),
    *("image_size", "patch_size", "use_image_id", "vision_batch_size", "batch_vision_input"),
    *("version", "batch_3d_resampler", "auto_map", "architectures"),
)
#: Stands for a token of an image in a prompt.
_TOKEN = "<unk>"
_MAX_TOKENIZER = 64 << 20


def composite(raw: dict[str, Any], folder: Path, source: str) -> dict[str, Any]:
    """The config with a ``text_config``, as other models have it; another model's as it is.

    :raises UnsupportedError: another version of MiniCPM-V.
    :raises CheckpointError: the vocabulary has no token for images.
    """
    if raw.get("model_type") != MODEL_TYPE or "text_config" in raw:
        return raw
    text_type = MINICPMV_TEXTS.get(str(raw.get("version")))
    if text_type is None:
        check_type(MODEL_TYPE)  # refuses a model whose code is beside its weights
    if raw.get("scale_emb") not in (None, 1):
        raise UnsupportedError(
            f"{source}: scale_emb: expected none, found {str(raw['scale_emb'])[:40]}: the text of "
            f"MiniCPM-V {raw['version']} is a {text_type}"
        )
    text = {key: value for key, value in raw.items() if key not in _OF_IMAGES}
    outside = (*_OF_IMAGES, "tie_word_embeddings", "eos_token_id")
    whole = {key: raw[key] for key in outside if key in raw}
    return {
        **whole,
        "model_type": MODEL_TYPE,
        "vision_config": {"hidden_act": "gelu_pytorch_tanh", **(raw.get("vision_config") or {})},
        "text_config": {**text, "model_type": text_type},
        "image_token_id": _token_id(folder, source),
    }


def _token_id(folder: Path, source: str) -> int:
    for name in ("tokenizer_config.json", "tokenizer.json"):
        path = folder_file(folder, name)
        values = {} if path is None else read_json(path, _MAX_TOKENIZER)
        for number, content in _added(values):
            if content == _TOKEN:
                return number
    raise CheckpointError(
        f"{source}: expected a token {_TOKEN}, which stands for images, among the added tokens of "
        "tokenizer_config.json or tokenizer.json, found none"
    )


def _added(values: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Numbers and spellings of the added tokens of both files."""
    decoder, listed = values.get("added_tokens_decoder"), values.get("added_tokens")
    found = []
    for number, token in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(token, Mapping) and str(number).isdecimal():
            found.append((int(number), token.get("content")))
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, Mapping) and type(token.get("id")) is int:
            found.append((token["id"], token.get("content")))
    return found
