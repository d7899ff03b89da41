"""A path that holds no causal language model is refused by the name of what it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sdk
from sdk import LLM
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError

ONES = np.ones((8, 32), np.float32)
XMOD = {"model_type": "xmod", "vocab_size": 96, "num_hidden_layers": 2, "hidden_size": 64}
BART = {"model_type": "bart", "vocab_size": 96, "encoder_layers": 2, "d_model": 64}

#: Files of a folder (JSON where it is a dict) -> words of the message.
FOLDERS: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({}, "the folder is empty; expected a causal language model"),
    "diffusers": ({"model_index.json": {}, "config.json": {}}, "a diffusers pipeline"),
    "sentence-transformers": ({"modules.json": "[]"}, "sentence-transformers model .an encoder"),
    "onnx": ({"onnx/model.onnx": ""}, "an ONNX model"),
    "openvino": ({"openvino_model.xml": "", "config.json": {}}, "an OpenVINO model"),
    "tensorflow": ({"config.json": {"model_type": "llama"}, "tf_model.h5": ""}, "a TensorFlow"),
    "pickles": ({"pytorch_model.bin": ""}, "only pickles .pytorch_model.bin.*save_pretrained"),
    "tokenizer": ({"tokenizer.json": {}, "merges.txt": ""}, "a tokenizer without weights"),
    "config": (
        {"config.json": {"model_type": "llama"}},
        "found a config but no .safetensors files; download",
    ),
    "something": (
        {"notes.txt": "", "x.csv": ""},
        "no model in the folder .found notes.txt, x.csv.",
    ),
}


def make(folder: Path, content: Mapping[str, Any]) -> Path:
    folder.mkdir()
    for name, value in content.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_another_kind_says_what_it_is(name: str, tmp_path: Path) -> None:
    content, words = FOLDERS[name]
    folder = make(tmp_path / "model", content)
    for attempt in (open_checkpoint, LLM, LLM.plan):
        with pytest.raises(CheckpointError, match=words):
            attempt(str(folder))  # type: ignore[operator]


def test_an_adapter_names_the_model_it_belongs_to(files: Any, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    folder = make(tmp_path / "model", {"adapter_config.json": config})
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"PEFT. adapter.*'org/base'.*merge_and_unload"):
            open_checkpoint(folder)
        files.folder(folder, {"x": ONES}, {}, name="adapter_model.safetensors")


def test_a_merged_model_may_keep_its_adapters_config(files: Any, tmp_path: Path) -> None:
    folder = files.folder(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    assert open_checkpoint(folder).has("model.embed_tokens")


def test_weights_without_their_config_say_where_it_belongs(files: Any, tmp_path: Path) -> None:
    folder = files.folder(tmp_path / "model")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected config.json next to the weights"):
        open_checkpoint(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("config", "words"),
    [(XMOD, "'xmod' .is_decoder is false.: an encoder"), (BART, "'bart': an encoder-decoder .seq")],
)
def test_encoders_are_named_by_plan_and_by_llm(
    config: dict[str, Any], words: str, files: Any, tmp_path: Path
) -> None:
    folder = files.folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config))
    for attempt in (LLM, LLM.plan):
        with pytest.raises(sdk.UnsupportedError, match=words):
            attempt(str(folder))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.type": "adapter"}, "a LoRA adapter for another model"),
        ({"general.type": "imatrix"}, "an importance matrix"),
        ({"general.type": "mmproj"}, "the encoder of images or sounds of a model"),
        ({"general.type": "vocab"}, "a vocabulary without weights"),
    ],
)
def test_gguf_files_of_other_kinds_say_what_they_are(
    metadata: dict[str, str], words: str, files: Any, tmp_path: Path
) -> None:
    file = files.llama()
    file.metadata.update({key: (8, value) for key, value in metadata.items()})
    path = tmp_path / "model.gguf"
    path.write_bytes(file.build())
    for attempt in (LLM, LLM.plan):
        with pytest.raises(sdk.UnsupportedError, match=f"{words}.*expected a causal"):
            attempt(str(path))  # type: ignore[operator]


def test_an_mlx_folder_is_refused_by_name(files: Any, tmp_path: Path) -> None:
    up = "model.layers.0.mlp.up_proj"
    folder = files.folder(
        tmp_path / "model", {f"{up}.{part}": ONES for part in ("weight", "scales", "biases")}
    )
    with pytest.raises(UnsupportedError, match="MLX"):
        open_checkpoint(folder)
