"""Opening folders, single files and hub ids; configs; and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk.loaders.folders.hf_folder import HfFolder
from sdk.loaders.hub.hub import parse_hub_id
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError

GOLDEN = Path(__file__).parents[1] / "golden"
EMBED = "model.embed_tokens.weight"
ONES = np.ones((8, 32), np.float32)


@pytest.fixture
def folder(files: Any, tmp_path: Path) -> Path:
    made: Path = files.folder(tmp_path / "model")
    return made


# -- folders ---------------------------------------------------------------------------------------


FOLDERS = sorted({*GOLDEN.glob("*/config.json"), *GOLDEN.glob("*/hf/config.json")})


@pytest.mark.parametrize("config", FOLDERS, ids=lambda p: str(p.parent.relative_to(GOLDEN)))
def test_the_rows_of_the_golden_folders_are_exact(config: Path) -> None:
    checkpoint = open_checkpoint(config.parent)
    home = config.parent.parent if config.parent.name == "hf" else config.parent
    golden = np.load(home / "golden.npz")
    names = [name for name in golden.files if name.startswith("w_")]
    assert names
    for name in names:
        parts = [name]
        if ".experts." in name:  # gpt-oss: rows of gate and up take turns
            stem = name.removesuffix("gate_up_proj")
            parts = [name] if stem == name else [f"{stem}gate_proj", f"{stem}up_proj"]
        weights = [checkpoint.weight(f"model.layers.{part[2:]}").dequantize() for part in parts]
        found = torch.stack(weights, dim=1).flatten(0, 1)[:8]
        # Other programs multiply the scales of NVFP4 and LLM.int8 in another order.
        np.testing.assert_allclose(found.numpy(), golden[name], rtol=2e-7)
    assert checkpoint.format == "safetensors"
    described = config.parent / "generation_config.json"
    stored = json.loads(described.read_text()) if described.is_file() else {}
    assert checkpoint.generation_config == stored


@pytest.mark.parametrize("names", [("awq-gemm", "awq-gemv"), ("fp8-block", "ct-fp8-block")])
def test_two_spellings_of_the_same_codes_are_the_same_weights(
    golden: Path, names: tuple[str, str]
) -> None:
    one, other = (open_checkpoint(golden / name) for name in names)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
        path = f"model.layers.1.{name}"
        assert torch.equal(one.weight(path).dequantize(), other.weight(path).dequantize())


def test_the_tokenizer_of_a_folder_is_its_own(golden: Path, folder: Path) -> None:
    tokenizer = open_checkpoint(golden / "arch-llama3" / "hf").tokenizer
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert open_checkpoint(folder).tokenizer is None


def test_pulling_reports_bytes_and_leaves_the_rest_unused(files: Any, tmp_path: Path) -> None:
    tensors = {EMBED: ONES, "model.norm.weight": np.ones(32), "extra": np.ones(3)}
    checkpoint = open_checkpoint(files.folder(tmp_path / "model", tensors))
    seen: list[tuple[int, int]] = []
    checkpoint.on_bytes = lambda done, total: seen.append((done, total))
    assert str(checkpoint.weight("model.embed_tokens").spec) == "f32"
    assert checkpoint.tensor("model.norm.weight").tolist() == [1.0] * 32
    checkpoint.weight("model.embed_tokens")
    assert seen == [(1024, 1164), (1152, 1164)]
    assert checkpoint.unused() == ["extra"]
    assert checkpoint.has("model.embed_tokens")
    assert checkpoint.has("model.norm.weight")
    assert not checkpoint.has("lm_head")
    first = checkpoint.entries()[0]
    assert (first.name, first.shape, first.format) == (EMBED, (8, 32), "F32")


def test_an_embedding_that_is_stored_twice_is_not_called_unused(files: Any, tmp_path: Path) -> None:
    tensors = {EMBED: ONES, "lm_head.weight": ONES}
    tied = files.folder(tmp_path / "a", tensors, files.config(tie_word_embeddings=True))
    untied = files.folder(tmp_path / "b", tensors, files.config(tie_word_embeddings=False))
    assert open_checkpoint(tied).unused() == [EMBED]
    assert open_checkpoint(untied).unused() == [EMBED, "lm_head.weight"]


def test_weights_stay_valid_after_close(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    weight = checkpoint.weight("model.embed_tokens")
    checkpoint.close()
    checkpoint.close()
    assert torch.equal(weight.dequantize(), torch.ones(8, 32))
    with pytest.raises(CheckpointError, match=r"closed"):
        checkpoint.has("model.embed_tokens")


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("embed_tokens.weight", "model.embed_tokens"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens"),
        ("language_model.lm_head.weight", "lm_head"),
    ],
)
def test_the_language_model_is_found_wherever_it_is_kept(
    files: Any, tmp_path: Path, stored: str, ours: str
) -> None:
    vision = {} if stored.startswith("embed") else {"vision_tower.x": np.ones(3)}
    checkpoint = open_checkpoint(files.folder(tmp_path / "model", {stored: ONES, **vision}))
    seen: list[tuple[int, int]] = []
    checkpoint.on_bytes = lambda done, total: seen.append((done, total))
    assert checkpoint.weight(ours).shape == (8, 32)
    assert checkpoint.unused() == [*vision]  # a load names it
    assert seen == [(1024, 1024)]


def test_an_outer_head_belongs_to_an_inner_language_model(files: Any, tmp_path: Path) -> None:
    tensors = {"model.language_model.embed_tokens.weight": ONES, "lm_head.weight": ONES}
    checkpoint = open_checkpoint(files.folder(tmp_path / "model", tensors))
    assert checkpoint.weight("lm_head").shape == (8, 32)


def test_missing_tensors_and_wrong_shapes_are_named(files: Any, tmp_path: Path) -> None:
    tensors = {EMBED: np.ones((9, 32)), "model.layers.0.mlp.up_proj.weight": np.ones(32)}
    checkpoint = open_checkpoint(files.folder(tmp_path / "model", tensors))
    with pytest.raises(
        CheckpointError, match=r"layers.0.mlp.down_proj is missing.*down_proj.weight"
    ):
        checkpoint.weight("model.layers.0.mlp.down_proj")
    with pytest.raises(CheckpointError, match=r"embed_tokens: expected .*\[8, 32\].*\[9, 32\]"):
        checkpoint.weight("model.embed_tokens")
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight': expected a matrix, found shape \[32\]"
    ):
        checkpoint.weight("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("dtype", ["F64", "I32", "F8_E4M3"])
def test_plain_tensors_of_other_types_are_refused(files: Any, folder: Path, dtype: str) -> None:
    size = {"F64": 8, "I32": 4, "F8_E4M3": 1}[dtype] * 8 * 32
    header = {EMBED: {"dtype": dtype, "shape": [8, 32], "data_offsets": [0, size]}}
    (folder / "model.safetensors").write_bytes(files.safetensors(header, bytes(size)))
    with pytest.raises(UnsupportedError, match=f"is {dtype}, .*save the model in F32, F16, BF16"):
        open_checkpoint(folder).weight("model.embed_tokens")


def test_shards_win_over_a_stale_single_file(
    files: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    files.folder(folder, {"stale": np.ones(3)})
    index = {"weight_map": {EMBED: "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with caplog.at_level(logging.WARNING, "sdk"):
        checkpoint = open_checkpoint(folder)
    assert [entry.name for entry in checkpoint.entries()] == [EMBED]
    assert "ignored: model.safetensors" in caplog.text


def test_an_index_may_be_called_after_its_shards(files: Any, folder: Path) -> None:
    (folder / "model.safetensors").rename(
        folder / "gptq_model-4bit-128g-00001-of-00002.safetensors"
    )
    files.folder(
        folder, {"other": np.ones(3)}, name="gptq_model-4bit-128g-00002-of-00002.safetensors"
    )
    places = {EMBED: "1", "other": "2"}
    index = {
        name: f"gptq_model-4bit-128g-0000{part}-of-00002.safetensors"
        for name, part in places.items()
    }
    path = folder / "gptq_model-4bit-128g.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    assert [entry.name for entry in open_checkpoint(folder).entries()] == [EMBED, "other"]


def test_other_files_beside_a_single_one_are_ignored_and_reported(
    files: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.folder(folder, {"other": np.ones(3)}, name="consolidated.safetensors")
    with caplog.at_level(logging.WARNING, "sdk"):
        checkpoint = open_checkpoint(folder)
    assert [entry.name for entry in checkpoint.entries()] == [EMBED]
    assert "ignored: consolidated.safetensors" in caplog.text


def test_one_file_under_another_name_is_taken(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert open_checkpoint(folder).has("model.embed_tokens")


def test_a_single_file_is_opened_with_the_config_beside_it(files: Any, folder: Path) -> None:
    files.folder(folder, {"model.norm.weight": np.ones(32)}, name="second.safetensors")
    checkpoint = open_checkpoint(folder / "second.safetensors")
    assert [entry.name for entry in checkpoint.entries()] == ["model.norm.weight"]


def test_several_files_without_an_index_are_refused(files: Any, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    files.folder(folder, {"b": np.ones(3)}, name="b.safetensors")
    with pytest.raises(CheckpointError, match=r"2 safetensors files \(a.safetensors, b.safet"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "x.ckpt"])
def test_pickles_are_refused_with_the_way_out(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsupportedError, match=f"only pickles .{name}.*save_pretrained"):
        open_checkpoint(folder)
    with pytest.raises(UnsupportedError, match=r"pickles are not supported"):
        open_checkpoint(folder / name)


def test_an_adapter_is_not_a_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match=r"expected a model, found a LoRA .PEFT. adapter"):
        open_checkpoint(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no .safetensors files"):
        open_checkpoint(folder)


def test_a_git_lfs_pointer_in_place_of_weights_is_named(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match=r"git-lfs pointer.*git lfs pull"):
        open_checkpoint(folder)


# -- paths and hub ids -----------------------------------------------------------------------------


def test_a_folder_with_one_gguf_model_opens_it(files: Any, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(files.llama().build())
    assert open_checkpoint(tmp_path).format == "gguf"
    assert open_checkpoint(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several GGUF models in it; name one: a.gguf, b.gg"):
        open_checkpoint(tmp_path)


def test_a_gguf_file_is_known_by_its_first_bytes(files: Any, tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(files.llama().build())
    assert open_checkpoint(tmp_path / "model").format == "gguf"


@pytest.mark.parametrize("name", ["missing.gguf", "./a/b", "/no/where", "a\0b", "x" * 5000])
def test_a_path_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such file or folder|expected a usable path"):
        open_checkpoint(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("name", False),
        ("a/b/c", False),
        ("./name", False),
        ("../name", False),
        ("folder/model.gguf", False),
        ("folder/model.safetensors", False),
        ("org/", False),
        ("o rg/name", False),
    ],
)
def test_hub_ids_are_told_from_paths(name: str, expected: bool) -> None:
    assert (parse_hub_id(name) is not None) == expected


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


def test_a_model_in_the_hub_cache_is_opened_without_a_network(files: Any, hub_cache: Path) -> None:
    home = hub_cache / "models--org--name"
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    files.folder(home / "blobs")
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    checkpoint = open_checkpoint("org/name", local_files_only=True)
    assert isinstance(checkpoint, HfFolder)
    assert checkpoint.has("model.embed_tokens")
    with pytest.raises(CheckpointError, match=r"org/name: .*not found in the local cache"):
        open_checkpoint("org/name", revision="v2", local_files_only=True)
    (snapshot / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"org/name: no model found in it"):
        open_checkpoint("org/name", local_files_only=True)


def test_a_hub_id_that_is_not_in_the_cache_is_named(hub_cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"org/other: not a local path.*local cache"):
        open_checkpoint("org/other", local_files_only=True)


def test_a_local_folder_wins_over_a_hub_id(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    files.folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("org/name").path == Path("org/name")
