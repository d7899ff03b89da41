"""Encoders of images in GGUF files beside the folders they were made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdk.images.processors import image_processor
from sdk.kernels.operators.ops import Ops
from sdk.loaders.gguf_files.checkpoint import GgufCheckpoint
from sdk.loaders.gguf_files.mmproj import Mmproj
from sdk.loaders.gguf_files.reader import read_gguf
from sdk.loaders.open import open_checkpoint
from sdk.models.parallel import Mesh
from sdk.models.vision.anyres import packed_tokens
from sdk.models.vision.family import VISION, WHOLE, vision_of
from sdk.models.vision.tower import build_tower
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import BOOL, STRING, U32, save_gguf
from tests.models.test_vision_towers import encode
from tests.models.tiny_mmproj import mmproj_file, save_both, text_file
from tests.models.tiny_vision import MODELS, image, picture, vision_model

#: Options with which a file says all that the folder does, and sizes of tiles.
CASES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "gemma3": ({}, [(56, 56)]),
    "gemma4": ({}, [(40, 24)]),
    "gemma4-e": (
        {"text_config": {**MODELS["gemma4-e"]["text_config"], "pad_token_id": 0}},
        [(40, 24)],
    ),
    "smolvlm": ({}, [(56, 56), (56, 56)]),
    "mistral3": ({"vision_feature_layer": -1}, [(40, 24)]),
    "qwen2_5_vl": (
        {"vision_config": {**MODELS["qwen2_5_vl"]["vision_config"], "window_size": 112}},
        [(160, 240)],
    ),
    "qwen3_vl": ({}, [(40, 104)]),
    "llava": ({}, [(56, 56)]),
    "llava_next": ({}, [(56, 56)] * 3),
    "llava_next-siglip": ({}, []),
    "llava-pixtral": ({}, [(40, 24)]),
    "internvl": ({}, [(56, 56)] * 2),
}


@pytest.fixture
def ops() -> Iterator[Ops]:
    found = Ops(num_threads=1, compute="exact")
    yield found
    found.close()


@pytest.mark.parametrize("name", CASES)
def test_a_file_has_the_tower_of_its_folder(name: str, tmp_path: Path, ops: Ops) -> None:
    options, sizes = CASES[name]
    model = vision_model(name, **options)
    model.save_pretrained(tmp_path / "folder")
    (tmp_path / "files").mkdir()
    checkpoint = open_checkpoint(save_both(model, name, tmp_path / "files"))
    assert isinstance(checkpoint, GgufCheckpoint) and checkpoint.mmproj is not None
    own = build_tower(checkpoint, Mesh(), ops)
    folder = build_tower(open_checkpoint(tmp_path / "folder"), Mesh(), ops)
    assert own is not None and folder is not None
    assert not [x for x in checkpoint.unused() if x.startswith(("v.", "mm."))]
    assert own.config.token_id == 90 and own.config.axes == folder.config.axes
    assert own.config.family == folder.config.family
    one = image(own.config, sizes, 1)
    if own.config.pictures:
        one = picture(own.config, (57, 113), 1)
        one = one._replace(num_tokens=packed_tokens(one, own.config))
    found, expected = encode(own, [one])[0], encode(folder, [one])[0]
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()
    image_processor(checkpoint.config, checkpoint.processor)
    for key in ("mean", "std"):
        # Gemma 4's tower reads numbers from -1 to 1, its processor says 0 to 1.
        gemma = name.startswith("gemma4")
        colors = getattr(own.config, key) if gemma else checkpoint.processor[f"image_{key}"]
        assert colors == pytest.approx(getattr(folder.config, key))
    assert own.config.both_ways == folder.config.both_ways
    assert own.config.stand_in == folder.config.stand_in


@pytest.mark.parametrize(
    ("name", "text_type", "token", "sizes"),
    [
        ("lfm2_vl", "lfm2", "<image>", [(28, 42)]),
        ("minicpmv4_6", "qwen3_5_text", "<|image_pad|>", [(56, 84), (28, 56)]),
        ("minicpmv4_6-4x", "qwen3_5_text", "<|image_pad|>", [(42, 28)]),
    ],
)
def test_the_file_beside_a_hybrid_has_the_tower_of_its_folder(
    name: str, text_type: str, token: str, sizes: list[tuple[int, int]], tmp_path: Path, ops: Ops
) -> None:
    """Its text model has other layers than attention; here that of SmolVLM stands for it."""
    model = vision_model(name)
    model.save_pretrained(tmp_path / "folder")
    path = save_gguf(tmp_path / "mmproj.gguf", mmproj_file(model, name))
    stand_in = text_file(vision_model("smolvlm"), "smolvlm", token=token)
    text = save_gguf(tmp_path / "text.gguf", stand_in)
    config = {"model_type": text_type, "hidden_size": 64}
    own = Mmproj(path, read_gguf(text), config)
    view: Any = SimpleNamespace(
        path=path,
        format="gguf",
        config={**config, **own.config},
        generation_config={},
        processor=own.processor,
        weight=own.weight,
        tensor=own.tensor,
        has=own.has,
        entries=own.entries,
    )
    tower = build_tower(view, Mesh(), ops)
    folder = build_tower(open_checkpoint(tmp_path / "folder"), Mesh(), ops)
    assert tower is not None and folder is not None and own.unused() == []
    assert tower.config.inner_after == folder.config.inner_after
    pictures = [image(tower.config, sizes, 1)]
    found, expected = encode(tower, pictures)[0], encode(folder, pictures)[0]
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()
    if name != "lfm2_vl":  # sides of its tiles are not multiples of 7
        whole = {**own.config[WHOLE], "vision_config": own.config[VISION]}
        assert image_processor(whole, own.processor).most_tokens


def test_a_file_is_found_beside_its_model(tmp_path: Path) -> None:
    model = vision_model("gemma3")
    path = save_both(model, "gemma3", tmp_path)
    own = tmp_path / "mmproj-model-f32.gguf"
    for opened, expected in (
        (open_checkpoint(path), own),
        (open_checkpoint(tmp_path), own),  # the folder has one model
        (open_checkpoint(path, mmproj=False), None),
        (open_checkpoint(path, mmproj=str(own)), own),
    ):
        assert isinstance(opened, GgufCheckpoint)
        assert opened.mmproj == expected
        assert ("vision_config" in opened.config) == (expected is not None)
        assert opened.has("vision.patches") == (expected is not None)
        entries = {entry.name for entry in opened.entries()}
        assert ("vision.layers.0.mlp.up_proj.weight" in entries) == (expected is not None)
        opened.close()


def test_of_several_files_the_one_that_fits_in_16_bits_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = vision_model("gemma3")
    path = save_both(model, "gemma3", tmp_path)
    save_gguf(tmp_path / "mmproj-F16.gguf", mmproj_file(model, "gemma3"))
    save_gguf(tmp_path / "mmproj-BF16.gguf", mmproj_file(vision_model("smolvlm"), "smolvlm"))
    opened = open_checkpoint(path)
    assert isinstance(opened, GgufCheckpoint) and opened.mmproj == tmp_path / "mmproj-F16.gguf"
    (tmp_path / "mmproj-F16.gguf").unlink()
    (tmp_path / "mmproj-model-f32.gguf").unlink()
    opened = open_checkpoint(path)  # a text model, and the reason is logged
    assert isinstance(opened, GgufCheckpoint) and opened.mmproj is None
    assert "not used for images" in caplog.text and "mmproj-BF16.gguf" in caplog.text


def test_names_of_old_files_are_understood(tmp_path: Path, ops: Ops) -> None:
    """Files before the middle of 2025 call the first matrix of an MLP ``ffn_down``."""
    model = vision_model("gemma3")
    path = save_both(model, "gemma3", tmp_path)
    pictures, found = [], []
    for swapped in (False, True):
        file = mmproj_file(model, "gemma3")
        if swapped:
            ends = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
            file.tensors = {
                next((n.replace(a, b) for a, b in ends.items() if a in n), n): tensor
                for n, tensor in file.tensors.items()
            }
        save_gguf(tmp_path / "mmproj-model-f32.gguf", file)
        tower = build_tower(open_checkpoint(path), Mesh(), ops)
        assert tower is not None
        pictures = pictures or [image(tower.config, [(56, 56)], 1)]
        found.append(encode(tower, pictures)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("missing", ["v.blk.0.attn_q_norm.weight", "v.position_embd.weight"])
def test_sizes_that_a_file_says_by_its_tensors_must_be_there(missing: str, tmp_path: Path) -> None:
    model = vision_model("gemma4")
    file = mmproj_file(model, "gemma4")
    del file.tensors[missing]
    path = save_gguf(tmp_path / "eyes.gguf", file)
    text = save_gguf(tmp_path / "model.gguf", text_file(model, "gemma4"))
    with pytest.raises(CheckpointError, match="expected the norms and positions of a tower of Gem"):
        open_checkpoint(text, mmproj=str(path))


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind": (
        {"general.architecture": (STRING, "llama")},
        CheckpointError,
        "general.architecture: expected 'clip', the encoder of images of a model",
    ),
    "sound": (
        {"clip.has_vision_encoder": (BOOL, False)},
        UnsupportedError,
        "has_vision_encoder: expected true, found False: files for sound alone",
    ),
    "projector": (
        {"clip.projector_type": (STRING, "ldpv2")},
        UnsupportedError,
        "clip.projector_type: expected one of .*gemma3.*, found 'ldpv2'",
    ),
    "family": (
        {"clip.projector_type": (STRING, "qwen3vl_merger")},
        CheckpointError,
        "a file for images of qwen3_vl_text or .*, but the text model is 'gemma3_text'",
    ),
    "width": (
        {"clip.vision.projection_dim": (U32, 72)},
        CheckpointError,
        "projection_dim: expected the text model's embedding_length, 64, found 72",
    ),
    "number": (
        {"clip.vision.block_count": (U32, 0)},
        CheckpointError,
        r"clip.vision: block_count: expected an integer in 1..512, found 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    changes, error, message = REFUSED[name]
    model = vision_model("gemma3")
    path = save_both(model, "gemma3", tmp_path)
    file = mmproj_file(model, "gemma3")
    file.metadata |= changes
    if "general.architecture" in changes:
        del file.metadata["general.type"]
    own = save_gguf(tmp_path / "mmproj-changed.gguf", file)
    with pytest.raises(error, match=message):
        open_checkpoint(path, mmproj=own)


def test_an_mmproj_of_a_model_without_its_token_is_refused(tmp_path: Path) -> None:
    model = vision_model("smolvlm")
    own = save_gguf(tmp_path / "mmproj.gguf", mmproj_file(model, "smolvlm"))
    path = save_gguf(tmp_path / "model.gguf", text_file(model, "smolvlm", token="<other>"))
    with pytest.raises(CheckpointError, match="expected a token <image> in the vocabulary"):
        open_checkpoint(path, mmproj=own)


def test_patches_that_a_file_does_not_merge_are_noticed(tmp_path: Path) -> None:
    """Without the size the file of Mistral Small 3 would be read as one of Pixtral 12B."""
    model = vision_model("mistral3", vision_feature_layer=-1)
    file = mmproj_file(model, "mistral3")
    del file.metadata["clip.vision.spatial_merge_size"]
    own = save_gguf(tmp_path / "mmproj.gguf", file)
    path = save_gguf(tmp_path / "model.gguf", text_file(model, "mistral3"))
    with pytest.raises(CheckpointError, match=r"spatial_merge_size: expected more .* found 1"):
        open_checkpoint(path, mmproj=own)


def test_paths_that_are_no_mmproj_are_refused(tmp_path: Path) -> None:
    model = vision_model("gemma3")
    path = save_both(model, "gemma3", tmp_path)
    with pytest.raises(CheckpointError, match=r"mmproj: .*none\.gguf: expected a GGUF file"):
        open_checkpoint(path, mmproj=tmp_path / "none.gguf")
    model.save_pretrained(tmp_path / "folder")
    with pytest.raises(UnsupportedError, match="a folder has its own encoder of images"):
        open_checkpoint(tmp_path / "folder", mmproj=path)


@pytest.mark.parametrize("left_out", ["mm.input_projection.weight", "v.blk.1.attn_q.weight"])
def test_a_missing_tensor_is_named(left_out: str, tmp_path: Path, ops: Ops) -> None:
    model = vision_model("gemma3")
    path = save_both(model, "gemma3", tmp_path)
    file = mmproj_file(model, "gemma3")
    del file.tensors[left_out]
    save_gguf(tmp_path / "mmproj-model-f32.gguf", file)
    with pytest.raises(CheckpointError, match=r"mmproj-model-f32.gguf: vision\.\S+ is missing"):
        build_tower(open_checkpoint(path), Mesh(), ops)


def test_wrong_shapes_are_named(tmp_path: Path, ops: Ops) -> None:
    model = vision_model("qwen3_vl")
    path = save_both(model, "qwen3_vl", tmp_path)
    for name, shape, message in (
        ("v.patch_embd.weight.1", (4, 2, 6, 72), "weight.1': expected shape .72, 3, 4, 4."),
        ("v.position_embd.weight", (24, 75), r"vision.positions.weight: expected shape \[25, 72\]"),
        ("v.blk.0.ffn_up.weight", (72, 13, 8), "expected a matrix, found shape"),
    ):
        file = mmproj_file(model, "qwen3_vl")
        _, kind, data = file.tensors[name]
        file.tensors[name] = (shape, kind, data)
        save_gguf(tmp_path / "mmproj-model-f32.gguf", file)
        with pytest.raises(CheckpointError, match=message):
            build_tower(open_checkpoint(path), Mesh(), ops)


def test_rows_that_are_no_heads_are_named(tmp_path: Path, ops: Ops) -> None:
    model = vision_model("mistral3", vision_feature_layer=-1)
    path = save_both(model, "mistral3", tmp_path)
    file = mmproj_file(model, "mistral3")
    _, kind, data = file.tensors["v.blk.0.attn_q.weight"]
    file.tensors["v.blk.0.attn_q.weight"] = ((72, 70), kind, data[: 72 * 70 * 4])
    save_gguf(tmp_path / "mmproj-model-f32.gguf", file)
    with pytest.raises(CheckpointError, match=r"attn_q.weight': expected a multiple of 6 rows"):
        build_tower(open_checkpoint(path), Mesh(), ops)


def test_a_tower_without_a_class_token_is_refused(tmp_path: Path) -> None:
    """Unless it is Granite Vision's: LLaVA-OneVision's files are those of LLaVA with the tower of
    SigLIP."""
    model = vision_model("llava")
    text = read_gguf(save_gguf(tmp_path / "text.gguf", text_file(model, "llava")))
    file = mmproj_file(model, "llava")
    del file.tensors["v.class_embd"]
    path = save_gguf(tmp_path / "mmproj.gguf", file)
    with pytest.raises(UnsupportedError, match=r"v.class_embd\), found one without, .*'image': 0"):
        Mmproj(path, text, {"model_type": "llama", "hidden_size": 64})


def test_llava_files_of_other_widths_and_vit_6b_are_refused(tmp_path: Path) -> None:
    """What LLaVA's files call the projection's width is CLIP's, so the last matrix tells it."""
    model = vision_model("llava")
    text = read_gguf(save_gguf(tmp_path / "text.gguf", text_file(model, "llava")))
    path = save_gguf(tmp_path / "mmproj.gguf", mmproj_file(model, "llava"))
    with pytest.raises(
        CheckpointError, match=r"the rows of mm\.2\.weight: expected .* 128, found 64"
    ):
        Mmproj(path, text, {"model_type": "llama", "hidden_size": 128})
    file = mmproj_file(vision_model("internvl"), "internvl")
    for name in list(file.tensors):
        if name.endswith("ln1.bias"):
            del file.tensors[name]
    own = Mmproj(
        save_gguf(tmp_path / "other.gguf", file),
        read_gguf(save_gguf(tmp_path / "t.gguf", text_file(vision_model("internvl"), "internvl"))),
        {"model_type": "qwen2", "hidden_size": 64},
    )
    with pytest.raises(
        UnsupportedError, match="norm_type: expected 'layer_norm', found 'rms_norm'"
    ):
        vision_of({**own.config, "text_config": {"hidden_size": 64}})
