"""One model from a folder and from a GGUF file gives the logits of transformers' own.

Mixtures of experts, and Phi-3 with joined projections and long rope factors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sdk.loaders.open import open_checkpoint
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import checkpoint_of, expected_logits, prompt, tiny

GOLDEN = Path(__file__).parents[1] / "golden" / "gptoss-mxfp4"
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 8},
    "phi3": {
        "sliding_window": None,
        "original_max_position_embeddings": 32,  # below the prompt: the long factors everywhere
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    },
}
GGUF_NAMES = {"mixtral": "llama", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "phi3": "phi3"}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
F32, F16, MXFP4 = 0, 1, 39


def metadata(config: Any) -> dict[str, tuple[int, Any]]:
    arch = GGUF_NAMES[config.model_type]
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (4, config.num_hidden_layers),
        "context_length": (4, config.max_position_embeddings),
        "embedding_length": (4, config.hidden_size),
        "feed_forward_length": (4, config.intermediate_size),
        "attention.head_count": (4, config.num_attention_heads),
        "attention.head_count_kv": (4, config.num_key_value_heads),
        "attention.key_length": (4, head_dim),
        "attention.value_length": (4, head_dim),
        "attention.layer_norm_rms_epsilon": (6, config.rms_norm_eps),
        "rope.freq_base": (6, rope["rope_theta"]),
    }
    if config.model_type == "phi3":
        original = rope["original_max_position_embeddings"]
        stretch = config.max_position_embeddings / original
        facts |= {
            "rope.dimension_count": (4, int(head_dim * rope["partial_rotary_factor"])),
            "rope.scaling.original_context_length": (4, original),
            "rope.scaling.attn_factor": (6, (1 + math.log(stretch) / math.log(original)) ** 0.5),
        }
    else:
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        facts |= {
            "expert_feed_forward_length": (4, width),
            "expert_count": (4, experts),
            "expert_used_count": (4, config.num_experts_per_tok),
        }
    if config.model_type == "gpt_oss":
        facts |= {
            "attention.sliding_window": (4, config.sliding_window),
            "rope.scaling.type": (8, "yarn"),
            "rope.scaling.factor": (6, rope["factor"]),
            "rope.scaling.original_context_length": (4, rope["original_max_position_embeddings"]),
        }
    return {
        "general.architecture": (8, arch),
        **{f"{arch}.{key}": value for key, value in facts.items()},
    }


def gguf_of(model: Any) -> GgufBytes:
    """The model in float16 (vectors and routers in float32), as llama.cpp's converter writes it."""
    config = model.config
    tensors: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    norm = "post_attention_norm" if config.model_type == "gpt_oss" else "ffn_norm"
    for name, values in checkpoint_of(model).tensors.items():
        stem, _, suffix = name.rpartition(".")
        parts = stem.split(".")
        if not name.startswith("model.layers."):
            whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
            tensors[f"{whole.get(stem, 'output')}.weight"] = values
            continue
        own = ".".join(parts[3:])
        if name.endswith("sinks"):
            own, suffix = "self_attn.sinks", "weight"
        if config.model_type == "mixtral" and own in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = len(values) // config.head_dim
            pairs = values.view(heads, 2, config.head_dim // 2, -1)
            values = pairs.transpose(1, 2).reshape(values.shape)
        if parts[4:5] == ["experts"]:
            part = parts[-1].removesuffix("_proj")
            experts.setdefault(f"blk.{parts[2]}.ffn_{part}_exps.{suffix}", []).append(values)
            continue
        theirs = norm if own == "post_attention_layernorm" else LAYER[own]
        tensors[f"blk.{parts[2]}.{theirs}.{suffix}"] = values
    tensors |= {name: torch.stack(values) for name, values in experts.items()}
    if config.model_type == "phi3":
        for kind in ("long", "short"):
            factors = torch.tensor(config.rope_parameters[f"{kind}_factor"])
            tensors[f"rope_factors_{kind}.weight"] = factors
    file = GgufBytes(metadata(config))
    for name, values in tensors.items():
        plain = values.dim() == 1 or "gate_inp" in name or name.endswith("bias")
        data = values.numpy().astype("<f4" if plain else "<f2").tobytes()
        file.tensors[name] = (tuple(reversed(values.shape)), F32 if plain else F16, data)
    return file


def rounded(model_type: str) -> Any:
    """A tiny model whose weights float16 holds."""
    model = tiny(model_type, **MODELS[model_type])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    return model


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("model_type", list(MODELS))
def test_the_folder_and_the_gguf_file_of_a_model_agree_with_transformers(
    model_type: str, tmp_path: Path, logits_of: Callable[..., Tensor]
) -> None:
    model = rounded(model_type)
    model.save_pretrained(tmp_path / "folder")
    (tmp_path / "model.gguf").write_bytes(gguf_of(model).build())
    ids = prompt(40, 3)
    expected = expected_logits(model, ids)
    for path in (tmp_path / "folder", tmp_path / "model.gguf"):
        whole = logits_of(path, torch.tensor(ids), "exact", len(ids))
        assert (whole - expected).abs().max() <= 1e-4
        for chunk in (1, 9):
            assert torch.equal(logits_of(path, torch.tensor(ids), "exact", chunk), whole)


def test_experts_joined_in_a_folder_are_those_stored_one_by_one(
    tmp_path: Path, logits_of: Callable[..., Tensor]
) -> None:
    model = rounded("mixtral")
    model.save_pretrained(tmp_path)
    ids = torch.tensor(prompt(20, 3))
    single = logits_of(tmp_path, ids, "auto", 20)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in names
    state = {name: t.detach().contiguous() for name, t in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits_of(tmp_path, ids, "auto", 20), single)


def mxfp4_gguf() -> GgufBytes:
    """The golden gpt-oss as a GGUF file: codes of a block in ggml's order, gate and up apart."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(GOLDEN)
    file = GgufBytes(metadata(config))

    def put(name: str, values: Tensor, kind: int = F32) -> None:
        shape = list(values.shape)
        if kind == MXFP4:
            shape[-1] = shape[-1] // 17 * 32
            data = values.numpy().tobytes()
        else:
            data = values.float().numpy().tobytes()
        file.tensors[name] = (tuple(reversed(shape)), kind, data)

    def blocks(codes: Tensor, scales: Tensor) -> Tensor:
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        packed = nibbles[..., :16] | nibbles[..., 16:] << 4
        return torch.cat([scales.unsqueeze(-1), packed], dim=-1).flatten(-2)

    with safe_open(GOLDEN / "model.safetensors", "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, values in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if stem in ends:
            put(f"{ends[stem]}.weight", values)
            continue
        _, _, layer, own = name.split(".", 3)
        path = f"blk.{layer}."
        match own.removeprefix("mlp.experts."):
            case "gate_up_proj_blocks" | "down_proj_blocks" as part:
                packed = blocks(values, tensors[name.replace("_blocks", "_scales")])
                turns = {"ffn_gate": packed[:, ::2], "ffn_up": packed[:, 1::2]}
                found = turns if part.startswith("gate") else {"ffn_down": packed}
                for theirs, rows in found.items():
                    put(f"{path}{theirs}_exps.weight", rows.contiguous(), MXFP4)
            case "gate_up_proj_bias":
                put(f"{path}ffn_gate_exps.bias", values[:, ::2].contiguous())
                put(f"{path}ffn_up_exps.bias", values[:, 1::2].contiguous())
            case "down_proj_bias":
                put(f"{path}ffn_down_exps.bias", values)
            case "gate_up_proj_scales" | "down_proj_scales":
                pass
            case "self_attn.sinks":
                put(f"{path}attn_sinks.weight", values)
            case "post_attention_layernorm.weight":
                put(f"{path}post_attention_norm.weight", values)
            case other:
                stem, _, suffix = other.rpartition(".")
                put(f"{path}{LAYER[stem]}.{suffix}", values)
    return file


def test_gpt_oss_from_gguf_gives_the_logits_of_its_folder(
    tmp_path: Path, logits_of: Callable[..., Tensor]
) -> None:
    (tmp_path / "model.gguf").write_bytes(mxfp4_gguf().build())
    with np.load(GOLDEN / "golden.npz") as golden:
        ids, expected = torch.from_numpy(golden["prompt"]), torch.from_numpy(golden["logits"])
    found = logits_of(tmp_path / "model.gguf", ids, "exact", len(ids))
    assert (found - expected).norm() / expected.norm() < 1e-4
    for compute in ("exact", "auto"):
        folder = logits_of(GOLDEN, ids, compute, len(ids))
        assert torch.equal(logits_of(tmp_path / "model.gguf", ids, compute, len(ids)), folder)


def test_old_files_have_a_tensor_for_every_expert(
    tmp_path: Path, logits_of: Callable[..., Tensor]
) -> None:
    model = rounded("mixtral")
    file = gguf_of(model)
    (tmp_path / "joined.gguf").write_bytes(file.build())
    for name, (dims, kind, data) in list(file.tensors.items()):
        if "_exps" in name:
            del file.tensors[name]
            size = len(data) // dims[2]
            for expert in range(dims[2]):
                own = data[expert * size : (expert + 1) * size]
                file.tensors[name.replace("_exps", f".{expert}")] = (dims[:2], kind, own)
    (tmp_path / "single.gguf").write_bytes(file.build())
    ids = torch.tensor(prompt(20, 3))
    joined = logits_of(tmp_path / "joined.gguf", ids, "auto", 20)
    assert torch.equal(logits_of(tmp_path / "single.gguf", ids, "auto", 20), joined)


def test_fewer_experts_than_the_config_says_are_refused(tmp_path: Path) -> None:
    from sdk.api.errors import CheckpointError

    model = rounded("mixtral")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 6}))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.5\.gate_proj is missing"):
        checkpoint.weight("model.layers.0.mlp.experts.5.gate_proj")
    state = {name: t.detach().contiguous() for name, t in model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*expected shape \[6, .*found \[5, "):
        checkpoint.weight("model.layers.0.mlp.experts.0.gate_proj")
