"""Configs of CLIP and SigLIP: published ones leave out what equals the defaults of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sdk import LLM, CheckpointError, UnsupportedError
from sdk.loaders.folders.hf_folder import complete_config
from sdk.models.configs.config import ModelConfig
from tests.dual_models import TEXTS, write_dual

KINDS = ("clip", "siglip", "siglip2")


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_names_types_alone_has_the_defaults_of_transformers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk.loaders.folders.hf_folder.filled_by_transformers", None)  # not called
    given = {
        "model_type": kind,
        "text_config": {"model_type": f"{kind}_text_model"},
        "vision_config": {"model_type": f"{kind}_vision_model"},
    }
    found = ModelConfig.from_dict(complete_config(dict(given), "config.json"))
    theirs = transformers.CONFIG_MAPPING[kind]()
    text, vision = theirs.text_config, theirs.vision_config
    assert found.vision is not None
    for own, other in ((found, text), (found.vision.tower, vision)):
        assert own.hidden_size == other.hidden_size
        assert own.intermediate_size == other.intermediate_size
        assert own.num_layers == other.num_hidden_layers
        assert own.num_heads == other.num_attention_heads
        assert own.norm_eps == other.layer_norm_eps
        assert (own.activation_slope == 1.702) == (other.hidden_act == "quick_gelu")
    assert (found.vocab_size, found.max_position) == (text.vocab_size, text.max_position_embeddings)
    assert found.vision.patch == vision.patch_size
    side = vision.num_patches**0.5 if kind == "siglip2" else vision.image_size / vision.patch_size
    assert found.vision.tile_side == side
    width = theirs.projection_dim if kind == "clip" else vision.hidden_size
    assert (found.vision.hidden_size, found.causal) == (width, kind == "clip")


def changed(folder: Path, part: str | None, **values: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config if part is None else config[part]).update(values)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["siglip", "naflex"])
def test_a_tower_without_a_head_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    write_dual(kind, tmp_path)
    changed(tmp_path, "vision_config", vision_use_head=False)
    with pytest.raises(UnsupportedError, match="vision_use_head: expected True"):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "name", "shape", "message"),
    [
        ("siglip", "vision_model.head.probe", (1, 2, 72), "vision.projector.probe: expected shape"),
        (
            "siglip",
            "vision_model.head.attention.in_proj_weight",
            (72, 72),
            "vision.projector.attention.in_proj_weight: expected shape [216, 72]",
        ),
        ("siglip", "text_model.head.weight", (72, 63), "expected a matrix of 64 columns"),
        ("siglip", "text_model.head.bias", (3,), "text_model.head.bias: expected shape [72]"),
        ("siglip", "logit_scale", (2,), "logit_scale: expected one finite number"),
        ("siglip", "logit_bias", None, "logit_bias"),
        ("siglip", "text_model.head.weight", None, "text_model.head"),
        ("clip", "text_projection.weight", (48,), "expected a matrix"),
        ("clip", "visual_projection.weight", None, "vision.projector.linear"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    kind: str, name: str, shape: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    write_dual(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    if shape is not None:
        tensors[name] = torch.ones(shape)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        LLM(str(tmp_path))


def test_texts_need_a_token_that_fills_them_up(tmp_path: Path) -> None:
    """What a load does not need: hidden states are there without it."""
    write_dual("siglip", tmp_path)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["pad_token"]
    path.write_text(json.dumps(settings))
    with LLM(str(tmp_path), num_threads=1) as llm:
        with pytest.raises(UnsupportedError, match="expected pad_token, with which texts are fill"):
            llm.embed(TEXTS)
        assert llm.encode("a", pooling="mean")
    path.write_text(json.dumps({**settings, "pad_token": "<nothing>"}))
    named = pytest.raises(Exception, match="filled up to 24 tokens with '<nothing>'")
    with LLM(str(tmp_path), num_threads=1) as llm, named:
        llm.embed(TEXTS)


def test_an_encoder_of_texts_alone_runs(tmp_path: Path) -> None:
    """CLIP's, with the projection and without it."""
    theirs = write_dual("clip", tmp_path / "whole")
    for name, made in (
        ("projected", transformers.CLIPTextModelWithProjection(theirs.config.text_config)),
        ("plain", transformers.CLIPTextModel(theirs.config.text_config)),
    ):
        folder = tmp_path / name
        own = made.eval()
        own.save_pretrained(folder)
        for file in (tmp_path / "whole").glob("tok*"):
            (folder / file.name).write_bytes(file.read_bytes())
        tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
        given = tokenizer(TEXTS, padding=True, return_tensors="pt")
        with torch.no_grad():
            found = own(**given)
        wanted = found.text_embeds if name == "projected" else found.pooler_output
        wanted = torch.nn.functional.normalize(wanted, dim=-1)
        with LLM(str(folder), num_threads=1, dtype="float32", compute="exact") as llm:
            rows = torch.tensor([one.embedding for one in llm.embed(TEXTS)])
        assert ((rows * wanted).sum(-1) >= 0.99999).all(), name
