"""Files of a model folder that are links, or JSON that nobody should parse."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sdk.loaders.folders.folder_file import folder_file, weight_file
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError

SECRET = '{"chat_template": "a private word", "eos_token_id": 2}'
REQUIRED = ["config.json", "tokenizer.json"]
OPTIONAL = [
    *("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.jinja", "additional_chat_templates/rag.jinja", "quantize_config.json"),
]


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    shutil.copytree(golden / "arch-llama3" / "hf", tmp_path / "model")
    return tmp_path / "model"


def read(folder: Path) -> Any:
    checkpoint = open_checkpoint(folder)
    try:
        return checkpoint.tokenizer
    finally:
        checkpoint.close()


@pytest.mark.parametrize("name", [*REQUIRED, *OPTIONAL])
def test_a_text_file_that_is_a_link_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    original = folder.parent / "secret"
    if file.exists():
        file.rename(original)
    else:
        original.write_text(SECRET)
    for target in (original, Path("../secret") if file.parent == folder else original):
        file.unlink(missing_ok=True)
        file.symlink_to(target)
        with pytest.raises(CheckpointError, match=rf"{name}: a link to .*secret, outside"):
            read(folder)


def test_vocabularies_that_transformers_would_convert_are_no_links_either(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder.parent / "secret").write_text("{}")
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").symlink_to("../secret")
    with pytest.raises(CheckpointError, match=r"merges.txt: a link to .*secret"):
        read(folder)


def test_links_inside_of_a_folder_and_of_the_hub_cache_are_read(folder: Path) -> None:
    (folder / "chat_template.jinja").rename(folder / "mine")
    (folder / "chat_template.jinja").symlink_to("mine")
    expected = read(folder).chat_template
    snapshot = folder.parent / "models--a--b" / "snapshots" / "revision"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert read(snapshot).chat_template == expected
    linked = folder.parent / "linked"  # the folder itself may be a link
    linked.symlink_to(folder)
    assert read(linked).chat_template == expected


def test_weights_may_be_links_to_weights_elsewhere_and_to_nothing_else(folder: Path) -> None:
    elsewhere = folder.parent / "shard.safetensors"
    (folder / "model.safetensors").rename(elsewhere)
    (folder / "model.safetensors").symlink_to(elsewhere)
    read(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(elsewhere.rename(folder.parent / "secret"))
    with pytest.raises(CheckpointError, match=r"model.safetensors: a link to .*secret"):
        read(folder)
    assert weight_file(folder, "config.json") == folder / "config.json"


def test_a_link_to_itself_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to("x")
    assert folder_file(tmp_path, "x") is None


HOSTILE = {
    "brackets": ("[" * 100_000, "nested too deeply"),
    "objects": ('{"a":' * 100_000, "nested too deeply"),
    "digits": ('{"a": %s}' % ("9" * 5000), "a number of 5000 digits"),
    "NaN": ('{"a": NaN}', "NaN is not allowed in JSON"),
    "infinity": ('{"a": -Infinity}', "-Infinity is not allowed in JSON"),
    "a key twice": ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
    "no object": ("[1]", "expected a JSON object, found list"),
    "no JSON": ("{", "not valid JSON"),
    "no UTF-8": (b"\xff", "not valid JSON"),
}  # fmt: skip
JSON_FILES = [
    *("config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("generation_config.json", "quantize_config.json", "model.safetensors.index.json"),
]


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("kind", HOSTILE)
def test_json_that_nobody_should_parse_is_an_error_that_names_the_file(
    folder: Path, name: str, kind: str
) -> None:
    text, words = HOSTILE[kind]
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError, match=f"{name}: {words}"):
        read(folder)


def test_a_tokenizer_may_be_for_texts_of_a_nonillion_tokens(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert read(folder).vocab_size > 0
