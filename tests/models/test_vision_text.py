"""The text part of vision checkpoints: folders as transformers saves them, text alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import sdk
from sdk import SamplingParams
from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.gguf_metadata import model_metadata
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import BOOL, F32, STRING, U32, gguf_of, save_gguf
from tests.models.conftest import DictCheckpoint, Paged, Ranks, prompt
from tests.models.sweep import random_model

TEXT = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: Rotary sections of half of a head of 16.
SECTIONS = {"rope_type": "default", "mrope_section": [4, 2, 2]}
TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**TEXT, "rope_parameters": {**SECTIONS, "rope_theta": 3000.0}},
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    },
    "qwen2_5_vl": {
        "text_config": {
            **TEXT,
            "rope_parameters": {**SECTIONS, "rope_theta": 3000.0},
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
        "vision_config": {**TOWER, "intermediate_size": 64},
    },
    "qwen3_vl": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "attention_bias": True,
            "rope_parameters": {**SECTIONS, "mrope_interleaved": True, "rope_theta": 3000.0},
        },
        "vision_config": {
            **TOWER,
            "intermediate_size": 64,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
            "rope_parameters": {**SECTIONS, "mrope_interleaved": True, "rope_theta": 3000.0},
        },
        "vision_config": {
            **TOWER,
            "intermediate_size": 64,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
    "hunyuan_vl": {
        "text_config": {
            **TEXT,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 3000.0,
                "alpha": 50.0,
                "factor": 1.0,
                "mrope_section": [2, 2, 2, 2],
            },
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 4,
            "max_image_size": 16,
        },
    },
    # the common base with a layer of none, and layer types that do not follow the rotation
    "muse_glimmer": {
        "text_config": {
            **TEXT,
            "num_hidden_layers": 5,
            "head_dim": 16,
            "sliding_window": 9,
            "layer_rope_theta": [0, 3000.0, 3000.0, 0, 3000.0],
            "final_logit_softcapping": 5.0,
            "output_multiplier": 0.7,
            "post_norm_eps": 0.01,
            "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
        },
        "vision_config": {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "patch_size": 4,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        "out_hidden_size": 128,
        "projector_hidden_size": 64,
    },
}


def random_text(name: str, tied: bool, **text: Any) -> Any:
    """A random model; ``text``: changed values of its text part."""
    values = {**MODELS[name], "text_config": {**MODELS[name]["text_config"], **text}}
    # files of Qwen 2-VL have it outside of the text part, those of Qwen 3-VL in both
    config = transformers.CONFIG_MAPPING[name](**values, tie_word_embeddings=tied)
    return random_model(config, transformers.AutoModelForImageTextToText)


@pytest.fixture(params=[(name, tied) for name in MODELS for tied in (False, True)], ids=str)
def oracle(request: pytest.FixtureRequest) -> Any:
    return random_text(*request.param)


def test_text_has_the_logits_of_the_whole_model(oracle: Any, tmp_path: Path) -> None:
    oracle.save_pretrained(tmp_path)
    ids = prompt(41, 1)
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    assert 0.5 < expected.std() < 20
    ops = Ops(num_threads=1, compute="exact")
    checkpoint = open_checkpoint(tmp_path)
    model = build_model(checkpoint, Mesh(), ops, max_model_len=256)
    found = Paged(model).run("a", ids, [5, 30])
    ops.close()
    assert (found - expected).abs().max() <= 1e-4
    with sdk.LLM(tmp_path, skip_tokenizer_init=True, max_model_len=64) as llm:
        [output] = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1))
        assert output.outputs[0].token_ids == [int(expected[-1].argmax())]
        # a tower that runs is taken, whether the prompt has images or not
        runs = llm.model_config.vision is not None
        assert any("beside the lang" in warning for warning in llm.load_warnings) != runs


def test_a_published_config_of_hunyuan_has_the_keys_of_its_text_outside(tmp_path: Path) -> None:
    oracle, ids = random_text("hunyuan_vl", False), prompt(41, 1)
    oracle.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text, rope = config.pop("text_config"), MODELS["hunyuan_vl"]["text_config"]["rope_parameters"]
    del text["rope_parameters"]
    stated = {"alpha": rope["alpha"], "factor": 1.0, "mscale": 1.0, "xdrope_section": [2, 2, 2, 2]}
    published = {
        **text,
        **config,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "xdrope", "beta_fast": 32, "beta_slow": 1, **stated},
        "num_experts": 1,
        "norm_type": "rms",
        "use_qk_norm": True,
        "use_cla": False,
    }
    for key, value in {"num_experts": 8, "use_qk_norm": False, "use_cla": True}.items():
        path.write_text(json.dumps({**published, key: value}))
        with pytest.raises(UnsupportedError, match=f"{key}: expected {published[key]}"):
            open_checkpoint(tmp_path)
    path.write_text(json.dumps(published))
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    ops = Ops(num_threads=1, compute="exact")
    model = build_model(open_checkpoint(tmp_path), Mesh(), ops, max_model_len=256)
    found = Paged(model).run("a", ids)
    ops.close()
    assert (found - expected).abs().max() <= 1e-4


def test_a_file_of_hunyuan_vl_has_the_logits_of_the_folder(tmp_path: Path) -> None:
    """It has the rotary base as it is, and beside it what enlarges it."""
    oracle, ids = random_text("hunyuan_vl", False), prompt(41, 1)
    tensors = {
        name.replace("language_model.", ""): values
        for name, values in oracle.state_dict().items()
        if name.startswith(("model.language_model.", "lm_head"))
    }
    metadata = {
        "rope.scaling.alpha": (F32, 50.0),
        "rope.scaling.type": (STRING, "none"),
        "rope.scaling.factor": (F32, 1.0),
        "rope.scaling.original_context_length": (U32, 256),
        "rope.dimension_sections": (9, (U32, [2, 2, 2, 2])),
    }
    model = SimpleNamespace(config=oracle.config.text_config, state_dict=lambda: tensors)
    path = save_gguf(tmp_path / "m.gguf", gguf_of(model, metadata, arch="hunyuan_vl"))
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    ops = Ops(num_threads=1, compute="exact")
    checkpoint = open_checkpoint(path)
    found = Paged(build_model(checkpoint, Mesh(), ops, max_model_len=256)).run("a", ids, [5, 30])
    ops.close()
    assert (found - expected).abs().max() <= 1e-4 and checkpoint.unused() == []


def test_a_file_of_muse_glimmer_has_the_logits_of_the_folder(tmp_path: Path) -> None:
    """The converter makes a norm of the factor of queries, and leaves out what llama.cpp fixes."""
    fixed = {"layer_rope_theta": None, "post_norm_eps": 1e-8, "qk_scale_factor": 2.5}
    oracle = random_text("muse_glimmer", False, **fixed)
    text, tensors = oracle.config.text_config, {}
    for name, values in oracle.state_dict().items():
        if name.startswith(("model.language_model.", "lm_head")):
            tensors[name.replace("language_model.", "")] = values
    for index in range(text.num_hidden_layers):
        own = f"model.layers.{index}.self_attn"
        tensors[f"{own}.q_norm.weight"] = torch.full((16,), 2.5)
        tensors[f"{own}.k_norm.weight"] = torch.ones(16)
    metadata = {
        "logit_scale": (F32, text.output_multiplier),
        "final_logit_softcapping": (F32, text.final_logit_softcapping),
        "attention.sliding_window": (U32, text.sliding_window),
        "attention.sliding_window_pattern": (9, (BOOL, [False, True, True, True, False])),
    }
    model = SimpleNamespace(config=text, state_dict=lambda: tensors)
    path = save_gguf(tmp_path / "m.gguf", gguf_of(model, metadata, arch="muse-glimmer"))
    ids = prompt(41, 1)
    with torch.no_grad():
        expected = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    ops = Ops(num_threads=1, compute="exact")
    checkpoint = open_checkpoint(path)
    found = Paged(build_model(checkpoint, Mesh(), ops, max_model_len=256)).run("a", ids, [5, 30])
    ops.close()
    assert (found - expected).abs().max() <= 1e-4 and checkpoint.unused() == []
    with pytest.raises(UnsupportedError, match="muse_glimmer_text is not written as a GGUF file"):
        model_metadata(checkpoint.config, "here")


def test_a_base_of_one_layer_of_muse_glimmer_is_refused(tmp_path: Path) -> None:
    for bases, message in (
        ([3000.0, 0, 77.0, 0, 3000.0], r"expected 0 or rope_theta 3000.0, found 77.0"),
        ([0, 3000.0], "expected a list of 5 numbers"),
    ):
        random_text("muse_glimmer", False).save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        config["text_config"]["layer_rope_theta"] = bases
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=rf"layer_rope_theta: {message}"):
            sdk.LLM(tmp_path, skip_tokenizer_init=True, max_model_len=64)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_gates_of_their_heads(size: int, load: Callable[..., Any]) -> None:
    """With four ranks a key head is copied, a gate is not."""
    oracle = random_text("muse_glimmer", False)
    config = oracle.config.text_config.to_dict()
    tensors = {
        name.replace("language_model.", ""): values.detach()
        for name, values in oracle.state_dict().items()
        if name.startswith(("model.language_model.", "lm_head"))
    }
    ids = prompt(37, 8)
    expected = Paged(load(DictCheckpoint(config, tensors))).run("a", ids, [20])

    def work(own: Mesh) -> Tensor:
        model = load(DictCheckpoint(config, tensors), mesh=own)
        return Paged(model, max(model.config.num_kv_heads // size, 1)).run("a", ids, [20])

    for found in Ranks(size).run(work):
        assert (found - expected).abs().max() <= 1e-4
