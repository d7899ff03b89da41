"""Models that transformers has no class for, as models that it has: their layers compute the same,
under other names, in another order, or with values fixed that others have as options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sdk.loaders.folders.expert_names import spelled_as_ours
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import UnsupportedError
from tests.models.conftest import Paged, expected_logits, prompt, tiny

Load = Callable[..., Any]
Tensors = dict[str, Tensor]
IDS = prompt(41, 1)


def joined(tensors: Tensors, parts: tuple[str, ...], whole: str) -> Tensors:
    """Matrices (and biases) of a layer one above the other, as one."""
    found: Tensors = {}
    for name, values in tensors.items():
        own = next((part for part in parts if f".{part}." in name), None)
        if own is None:
            found[name] = values
        elif own == parts[0]:
            every = [tensors[name.replace(own, part)] for part in parts]
            found[name.replace(own, whole)] = torch.cat(every)
    return found


def by_group(tensors: Tensors, groups: int, width: int) -> Tensors:
    """Rows of q, k and v by key/value head: its query heads, its key, its value."""
    for name in [name for name in tensors if "qkv_proj" in name]:
        heads = tensors[name].view(-1, width, *tensors[name].shape[1:])
        q, k, v = heads.split([len(heads) - 2 * groups, groups, groups])
        rows = [torch.cat([q.chunk(groups)[i], k[i : i + 1], v[i : i + 1]]) for i in range(groups)]
        tensors[name] = torch.cat(rows).reshape(tensors[name].shape)
    return tensors


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    found: Tensors = {}
    for name, values in tensors.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        found[name] = values
    return found


_QKV = ("q_proj", "k_proj", "v_proj")
_ATTENTION = {"self_attn.qkv_proj": "attention.wqkv", "self_attn.o_proj": "attention.wo"}


def _internlm2(tensors: Tensors) -> Tensors:
    return renamed(
        by_group(joined(tensors, _QKV, "qkv_proj"), 2, 16),
        {
            **_ATTENTION,
            "embed_tokens": "tok_embeddings",
            "lm_head": "output",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
    )


def _qwen(tensors: Tensors) -> Tensors:
    return renamed(
        joined(tensors, _QKV, "qkv_proj"),
        {
            "model.layers": "transformer.h",
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.ln_f",
            "self_attn.qkv_proj": "attn.c_attn",
            "self_attn.o_proj": "attn.c_proj",
            "mlp.gate_proj": "mlp.w2",
            "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        },
    )


def _bailing(tensors: Tensors) -> Tensors:
    """Of an expert each matrix is a tensor, and queries, keys and values are one."""
    found: Tensors = {}
    for name, values in tensors.items():
        name = spelled_as_ours(name)
        if name.endswith("gate_up_proj"):
            halves = values.chunk(2, dim=1)
            for part, rows in zip(("gate_proj", "up_proj"), halves, strict=True):
                for index, own in enumerate(rows):
                    found[name.replace("gate_up_proj", f"{index}.{part}.weight")] = own
        elif name.endswith("experts.down_proj"):
            for index, own in enumerate(values):
                found[name.replace("down_proj", f"{index}.down_proj.weight")] = own
        elif name.endswith("shared_experts.gate_up_proj.weight"):
            for part, rows in zip(("gate_proj", "up_proj"), values.chunk(2), strict=True):
                found[name.replace("gate_up_proj", part)] = rows
        else:
            found[name] = values
    names = {
        "embed_tokens": "word_embeddings",
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
    }
    return renamed(joined(found, _QKV, "qkv_proj"), names)


class Relative(NamedTuple):
    """A model of transformers, how its tensors are stored as another one's, and keys of the
    config, ``None`` for those to leave out."""

    model_type: str
    options: dict[str, Any]
    stored: Callable[[Tensors], Tensors]
    config: dict[str, Any]


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}
FOLDERS: dict[str, Relative] = {
    "internlm2": Relative("llama", ROPE, _internlm2, {"rope_theta": 3000.0, "bias": False}),
    "internlm": Relative(
        "llama", {**ROPE, "attention_bias": True}, lambda tensors: tensors, {"rope_theta": 3000.0}
    ),
    "xverse": Relative("llama", ROPE, lambda tensors: tensors, {"rope_theta": 3000.0}),
    "minicpm": Relative(
        "granite",
        {
            **ROPE,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 1.4 / 3**0.5,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.25,
            "tie_word_embeddings": True,
        },
        lambda tensors: tensors,
        {
            "rope_theta": 3000.0,
            "scale_emb": 3.0,
            "scale_depth": 1.4,
            "dim_model_base": 16,
            **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling")),
            "attention_multiplier": None,
        },
    ),
    "orion": Relative(
        "stablelm",
        {"rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 1.0}},
        lambda tensors: tensors,
        {"rope_theta": 3000.0, "rms_norm_eps": 1e-5},
    ),
    "baichuan": Relative(
        "llama",
        {**ROPE, "num_key_value_heads": 4},
        lambda tensors: joined(tensors, _QKV, "W_pack"),
        {"rope_theta": 3000.0, "model_max_length": 256, "max_position_embeddings": None},
    ),
    "bailing_moe": Relative(
        "granitemoeshared",
        {
            **ROPE,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 256,
            "attention_multiplier": 0.25,
        },
        _bailing,
        {
            "rope_theta": 3000.0,
            "num_experts": 6,
            "num_local_experts": None,
            "moe_intermediate_size": 128,
            "num_shared_experts": 2,
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
            "attention_multiplier": None,
        },
    ),
    "qwen": Relative(
        "qwen2",
        {**ROPE, "num_key_value_heads": 4, "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        _qwen,
        {
            "intermediate_size": 256,
            "seq_length": 256,
            "rotary_emb_base": 3000.0,
            "layer_norm_epsilon": 1e-6,
            "no_bias": True,
            "rms_norm_eps": None,
        },
    ),
}


def saved(name: str, folder: Path, **changes: Any) -> Any:
    """transformers' model, and a folder of the model ``name`` with its weights."""
    relative = FOLDERS[name]
    oracle = tiny(relative.model_type, **relative.options)
    folder.mkdir(exist_ok=True)
    tied = oracle.config.tie_word_embeddings
    state = {k: v.clone() for k, v in oracle.state_dict().items() if not (tied and "lm_head" in k)}
    tensors = {k: v.contiguous() for k, v in relative.stored(state).items()}
    save_file(tensors, folder / "model.safetensors")
    keys = ("rope_parameters", "model_type", "architectures", "head_dim", "partial_rotary_factor")
    config = {k: v for k, v in oracle.config.to_dict().items() if k not in keys}
    config |= {"model_type": name, **relative.config, **changes}
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return oracle


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_the_logits_of_its_relative(name: str, tmp_path: Path, load: Load) -> None:
    oracle = saved(name, tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    found = Paged(load(checkpoint)).run("a", IDS, [7, 30])
    assert (found - expected_logits(oracle, IDS)).abs().max() <= 1e-4
    assert checkpoint.unused() == []


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("minicpm", {"num_experts": 8}, "num_experts: expected 0, found 8"),
        ("minicpm", {"sparse_config": {"topk": 64}}, "sparse_config: expected None"),
        ("qwen", {"no_bias": False}, "no_bias: expected True, found False"),
        ("qwen", {"rotary_pct": 0.5}, "rotary_pct: expected 1.0, found 0.5"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path, load: Load
) -> None:
    saved(name, tmp_path / "model", **changes)
    with pytest.raises(UnsupportedError, match=message):
        load(open_checkpoint(tmp_path / "model"))
