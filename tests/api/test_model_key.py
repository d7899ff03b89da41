"""What makes two models the same to a snapshot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sdk.engine.model_key import ModelKey, model_key
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import read_config


def _key(path: Path, max_model_len: int = 64, **options: object) -> ModelKey:
    overrides = options.pop("overrides", {})
    checkpoint = open_checkpoint(path)
    config = read_config({**checkpoint.config, **overrides})
    checkpoint.close()
    return model_key(
        path,
        config,
        max_model_len,
        quantization=options.pop("quantization", None),
        overrides=overrides,
    )


def test_names_and_lengths_do_not_count_and_options_that_change_values_do(
    golden: Path, tmp_path: Path
) -> None:
    folder = golden / "arch-llama3" / "hf"
    key = _key(folder)
    moved = _key(Path(shutil.copytree(folder, tmp_path / "elsewhere")))
    assert moved.digest == key.digest and moved.name == "elsewhere"
    assert _key(folder, max_model_len=128).digest == key.digest
    assert _key(folder, quantization="int8").digest != key.digest
    assert _key(folder, overrides={"rms_norm_eps": 0.5}).digest != key.digest


@pytest.mark.parametrize("at", [0, -1])
def test_other_bytes_at_either_end_make_another_model(
    tiny_path: Path, tmp_path: Path, at: int
) -> None:
    checkpoint = open_checkpoint(tiny_path)
    config = read_config(checkpoint.config)
    checkpoint.close()
    data = bytearray(tiny_path.read_bytes())
    other = tmp_path / "model.gguf"
    keys = []
    for flip in (0, 1):
        data[at] ^= flip
        other.write_bytes(data)
        keys.append(model_key(other, config, 64, quantization=None, overrides={}))
    assert keys[0].name == keys[1].name and keys[0].digest != keys[1].digest


def test_weights_in_no_file_are_like_no_others(tiny_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_path)
    config = read_config(checkpoint.config)
    checkpoint.close()
    first, second = (
        model_key(Path("random-weights"), config, 64, quantization=None, overrides={})
        for _ in range(2)
    )
    assert first != second
