"""The text part of vision checkpoints: folders as transformers saves them, text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import sdk
from sdk import SamplingParams
from sdk.kernels.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from tests.models.conftest import Paged, prompt
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


@pytest.fixture(params=[(name, tied) for name in MODELS for tied in (False, True)], ids=str)
def oracle(request: pytest.FixtureRequest) -> Any:
    name, tied = request.param
    kind = transformers.CONFIG_MAPPING[name]
    values = MODELS[name]
    # files of Qwen 2-VL have it outside of the text part, those of Qwen 3-VL in both
    config = kind(**values, tie_word_embeddings=tied)
    return random_model(config, transformers.AutoModelForImageTextToText)


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
        assert any("visual" in warning for warning in llm.load_warnings)
