"""GGUF files of PLaMo and PLaMo 3, which transformers has no class of, against relatives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdk.loaders.folders.hf_folder import complete_config
from sdk.loaders.open import open_checkpoint
from sdk.models.parallel import Mesh
from sdk.quant.errors import UnsupportedError
from tests.gguf_models import ARRAY, BOOL, F32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, expected_logits, prompt, tiny

Load = Callable[..., Any]
_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def file_of(arch: str, model: Any, tensors: dict[str, Tensor]) -> GgufBytes:
    """``tensors``: by Hugging Face's names, and names of the file that it has as they are."""
    c = model.config
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, c.num_hidden_layers),
        "context_length": (U32, 256),
        "embedding_length": (U32, c.hidden_size),
        "feed_forward_length": (U32, c.intermediate_size),
        "attention.head_count": (U32, c.num_attention_heads),
        "attention.head_count_kv": (U32, c.num_key_value_heads),
        "attention.key_length": (U32, c.head_dim),
        "attention.value_length": (U32, c.head_dim),
        "attention.layer_norm_rms_epsilon": (F32, c.rms_norm_eps),
        "rope.freq_base": (F32, 3000.0),
    }
    file = GgufBytes({"general.architecture": (STRING, arch)})
    file.metadata |= {f"{arch}.{key}": value for key, value in facts.items()}
    for name, values in tensors.items():
        stem = name.removesuffix(".weight").removeprefix("model.")
        if stem.startswith("layers."):
            _, number, own = stem.split(".", 2)
            stem = f"blk.{number}.{_NAMES.get(own, own)}"
        stem = _NAMES.get(stem, stem)
        ending = "" if stem.endswith(("post_attention_norm", "post_ffw_norm")) else ".weight"
        data = np.ascontiguousarray(values.float().numpy(), "<f4")
        file.tensors[stem + ending] = (data.shape[::-1], 0, data.tobytes())
    return file


def plamo() -> tuple[Any, GgufBytes]:
    rope = {"rope_type": "default", "rope_theta": 3000.0}
    model = tiny("llama", rope_parameters=rope)
    for layer in model.model.layers:
        layer.forward = _parallel(layer)
    kept = {k: v for k, v in model.state_dict().items() if "post_attention_layernorm" not in k}
    return model, file_of("plamo", model, kept)


def _parallel(layer: Any) -> Callable[..., Tensor]:
    def forward(hidden_states: Tensor, **given: Any) -> Tensor:
        x = layer.input_layernorm(hidden_states)
        attended: Tensor = layer.self_attn(hidden_states=x, **given)[0]
        return hidden_states + attended + layer.mlp(x)

    return forward


def plamo3() -> tuple[Any, GgufBytes]:
    """Gemma 3 with a gate of SiLU: its factor of embeddings is in the file's, 8, and its norms are
    whole."""
    model = tiny(
        "gemma3_text",
        hidden_activation="silu",
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        num_hidden_layers=4,
        layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 3000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
        },
    )
    tensors: dict[str, Tensor] = {}
    for name, values in model.state_dict().items():
        if name.endswith("norm.weight") or "layernorm" in name:
            values = values + 1.0
        elif "embed_tokens" in name:
            values = values * 8.0
        tensors[name] = values
    for i in range(4):
        at = f"model.layers.{i}."
        qkv = [tensors.pop(f"{at}self_attn.{x}_proj.weight") for x in "qkv"]
        tensors[f"{at}attn_qkv.weight"] = torch.cat(qkv)
        wide = [tensors.pop(f"{at}mlp.{x}_proj.weight") for x in ("gate", "up")]
        tensors[f"{at}ffn_up.weight"] = torch.cat(wide)
    file = file_of("plamo3", model, tensors)
    slides = [kind == "sliding_attention" for kind in model.config.layer_types]
    file.metadata["plamo3.attention.sliding_window"] = (U32, 8)
    file.metadata["plamo3.attention.sliding_window_pattern"] = (ARRAY, (BOOL, slides))
    file.metadata["plamo3.rope.freq_base_swa"] = (F32, 777.0)
    return model, file


@pytest.mark.parametrize("written", [plamo, plamo3])
def test_logits_match_however_the_work_is_cut(
    written: Callable[[], tuple[Any, GgufBytes]], tmp_path: Path, load: Load
) -> None:
    oracle, file = written()
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    model, ids = load(checkpoint), prompt(75, 1)
    assert checkpoint.unused() == []
    whole = Paged(model).run("a", ids)
    assert (whole - expected_logits(oracle, ids)).abs().max() <= 1e-4
    for splits in ([7, 30], [16, 32, 70, 71, 72]):
        assert torch.equal(Paged(model).run("a", ids, splits), whole)


@pytest.mark.parametrize("written", [plamo, plamo3])
def test_two_ranks_have_the_logits_of_one(
    written: Callable[[], tuple[Any, GgufBytes]], tmp_path: Path, load: Load
) -> None:
    path = save_gguf(tmp_path / "m.gguf", written()[1])
    expected = Paged(load(open_checkpoint(path))).run("a", prompt(30, 1), [11])

    def work(own: Mesh) -> Tensor:
        return Paged(load(open_checkpoint(path), mesh=own), 1).run("a", prompt(30, 1), [11])

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


def test_every_eighth_layer_sees_all_tokens_if_a_file_does_not_say(tmp_path: Path) -> None:
    file = plamo3()[1]
    file.metadata.pop("plamo3.attention.sliding_window_pattern")
    file.metadata["plamo3.block_count"] = (U32, 9)
    found = open_checkpoint(save_gguf(tmp_path / "m.gguf", file)).config["layer_types"]
    assert [kind[0] for kind in found] == [*"sssssss", "f", "s"]


@pytest.mark.parametrize("model_type", ["plamo", "plamo3"])
def test_a_folder_says_that_its_file_runs(model_type: str) -> None:
    message = f"'{model_type}': folders of this model are not supported, its GGUF files are"
    with pytest.raises(UnsupportedError, match=message):
        complete_config({"model_type": model_type}, "here")
