"""Gemma 3n: several residual streams, in GGUF files, beside transformers, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sdk
from sdk.loaders.open import open_checkpoint
from sdk.models.configs.config import ModelConfig
from sdk.quant.errors import AlignmentError, CheckpointError, UnsupportedError
from tests.gguf_models import ARRAY, BOOL, F32, I32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, checkpoint_of, expected_logits, prompt, tiny
from tests.models.test_layer_geometries import check_answers
from tests.models.tiny_architectures import GEMMA3N

Load = Callable[..., Any]
#: What llama.cpp's converter calls the tensors of a layer.
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "altup.router_norm": "altup_router_norm",
    "altup.modality_router": "altup_router",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.correction_coefs": "altup_correct_coef",
    "altup": "altup_correct_scale",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}
_STACKS = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}


def gemma3n_file(model: Any) -> GgufBytes:
    """The file of a model as llama.cpp's converter writes it."""
    c = SimpleNamespace(**model.config.to_dict())
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, c.num_hidden_layers),
        "context_length": (U32, c.max_position_embeddings),
        "embedding_length": (U32, c.hidden_size),
        "feed_forward_length": (ARRAY, (I32, c.intermediate_size)),
        "attention.head_count": (U32, c.num_attention_heads),
        "attention.head_count_kv": (U32, c.num_key_value_heads),
        "attention.key_length": (U32, c.head_dim),
        "attention.value_length": (U32, c.head_dim),
        "attention.layer_norm_rms_epsilon": (F32, c.rms_norm_eps),
        "attention.sliding_window": (U32, c.sliding_window),
        "attention.sliding_window_pattern": (
            ARRAY,
            (BOOL, [kind == "sliding_attention" for kind in c.layer_types]),
        ),
        "attention.shared_kv_layers": (U32, c.num_kv_shared_layers),
        "embedding_length_per_layer_input": (U32, c.hidden_size_per_layer_input),
        "final_logit_softcapping": (F32, c.final_logit_softcapping),
        "altup.num_inputs": (U32, c.altup_num_inputs),
        "altup.active_idx": (U32, 0),
        "activation_sparsity_scale": (
            ARRAY,
            (F32, [NormalDist().inv_cdf(p) if p else -math.inf for p in _shares(c)]),
        ),
        "rope.freq_base": (F32, c.rope_parameters["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": (F32, c.rope_parameters["sliding_attention"]["rope_theta"]),
    }
    file = GgufBytes({"general.architecture": (STRING, "gemma3n")})
    file.metadata |= {f"gemma3n.{key}": value for key, value in facts.items()}
    stacks: dict[str, list[Any]] = {}
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" or name.endswith("inv_freq"):
            continue
        stack = name.removeprefix("model.").partition(".")[0]
        if stack in _STACKS:
            stacks.setdefault(_STACKS[stack], []).append(values)
        else:
            _add(file, _named(name), values)
    for name, own in stacks.items():
        _add(file, f"{name}.weight", torch.stack(own))
    return file


def _shares(config: Any) -> list[float]:
    return list(config.activation_sparsity_pattern)


def _add(file: GgufBytes, name: str, values: Any) -> None:
    data = np.ascontiguousarray(values.float().numpy(), "<f4")
    file.tensors[name] = (data.shape[::-1], 0, data.tobytes())


def _named(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layer, _, own = name.removeprefix("model.layers.").partition(".")
    stem, _, suffix = own.rpartition(".")
    suffix = "weight" if suffix == "correct_output_scale" else suffix
    return f"blk.{layer}.{_NAMES[stem]}.{suffix}"


def test_a_file_has_the_logits_of_transformers(tmp_path: Path, load: Load) -> None:
    oracle = tiny("gemma3n_text", **GEMMA3N)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", gemma3n_file(oracle)))
    ids = prompt(41, 1)
    found = Paged(load(checkpoint)).run("a", ids, [7, 30])
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    assert checkpoint.unused() == []


@pytest.mark.parametrize("scaled", [True, False])
def test_other_numbers_of_streams_than_four(scaled: bool, load: Load) -> None:
    options = {"altup_num_inputs": 3, "altup_correct_scale": scaled}
    oracle = tiny("gemma3n_text", **{**GEMMA3N, **options})
    ids = prompt(41, 1)
    found = Paged(load(checkpoint_of(oracle))).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4


def test_tokens_without_embeddings_for_layers_are_refused_in_prompts(
    tmp_path: Path, load: Load
) -> None:
    """Those of images and sounds. An answer may have them: their rows are zeros."""
    oracle = tiny("gemma3n_text", **{**GEMMA3N, "vocab_size_per_layer_input": 90})
    with torch.no_grad():
        oracle.model.embed_tokens_per_layer.weight[0] = 0.0  # what transformers takes
    ids = [5, 90, 95, 7, 89]
    found = Paged(load(checkpoint_of(oracle))).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    oracle.save_pretrained(tmp_path)
    with sdk.LLM(tmp_path, skip_tokenizer_init=True, num_threads=1, max_model_len=64) as llm:
        with pytest.raises(sdk.RequestError, match=r"token id 90 is outside the vocabu"):
            llm.generate({"prompt_token_ids": ids})
        assert llm.generate({"prompt_token_ids": [5, 89]}, sdk.SamplingParams(max_tokens=3))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"altup_active_idx": 1}, UnsupportedError, "altup_active_idx: expected 0, found 1"),
        ({"altup_num_inputs": 1}, CheckpointError, "altup_num_inputs: expected at least 2"),
        ({"intermediate_size": [64] * 4}, CheckpointError, "a width, or 5 of them"),
        ({"activation_sparsity_pattern": [0.5]}, CheckpointError, "expected a list of 5 shares"),
        ({"activation_sparsity_pattern": [1.0] * 5}, CheckpointError, "expected shares of 0 to 1"),
        ({"num_kv_shared_layers": 4}, CheckpointError, "num_kv_shared_layers: expected a number"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = {**tiny("gemma3n_text", **GEMMA3N).config.to_dict(), **changed}
    with pytest.raises(error, match=message):
        ModelConfig.from_dict(config)


def test_without_a_pattern_the_first_ten_of_more_layers_are_sparse() -> None:
    config = tiny("gemma3n_text", **GEMMA3N).config.to_dict()
    del config["activation_sparsity_pattern"]
    few = ModelConfig.from_dict(config).streams
    many = ModelConfig.from_dict(
        {
            **config,
            "num_hidden_layers": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 6,
            "intermediate_size": 64,
        }
    ).streams
    assert few is not None and few.deviations == (None,) * 5
    assert many is not None and many.deviations[10:] == (None, None)
    assert many.deviations[:10] == pytest.approx([1.6448536] * 10)


def test_metadata_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = gemma3n_file(tiny("gemma3n_text", **GEMMA3N))
    key = "gemma3n.activation_sparsity_scale"
    for value in ((ARRAY, (F32, [1.0, 1.0])), (ARRAY, (F32, [math.inf] * 5))):
        other = GgufBytes({**file.metadata, key: value}, dict(file.tensors))
        with pytest.raises(CheckpointError, match=r"activation_sparsity_scale is .* 5 numbers"):
            open_checkpoint(save_gguf(tmp_path / "m.gguf", other))
    del file.tensors["blk.0.laurel_l.weight"]
    with pytest.raises(CheckpointError, match=r"laurel_l\.weight is None, expected a matrix"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_ranks_have_parts_of_layers_without_sparse_mlps_alone(load: Load) -> None:
    ids = prompt(41, 1)
    sparse = checkpoint_of(tiny("gemma3n_text", **GEMMA3N))
    dense = tiny("gemma3n_text", **{**GEMMA3N, "activation_sparsity_pattern": [0.0] * 5})
    found = Ranks(2).run(
        lambda mesh: Paged(load(checkpoint_of(dense), mesh=mesh), kv_heads=1).run("a", ids)
    )
    for logits in found:
        assert (logits - expected_logits(dense, ids)).abs().max() <= 1e-4

    def refused(mesh: Any) -> str:
        with pytest.raises(AlignmentError) as error:
            load(sparse, mesh=mesh)
        return str(error.value)

    for message in Ranks(2).run(refused):
        assert "layers.0.mlp: cannot split an MLP whose activations are chosen" in message


def test_answers_are_the_same_alone_together_in_chunks_after_hits_and_preempted(
    tmp_path: Path,
) -> None:
    tiny("gemma3n_text", **GEMMA3N).save_pretrained(tmp_path)
    check_answers(tmp_path)
