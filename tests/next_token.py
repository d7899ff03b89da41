"""Small models (GLM-4.5, K-EXAONE, Hunyuan 3) with a block of multi-token prediction.

The block is the last layer of a transformers model whose other layers are the model itself, and its
matrices are made so that it drafts what the model says: its layer is a copy of the model's last
one, before which almost nothing happens, and ``eh_proj`` passes the embedding on, with a little of
the hidden state. The only difference is that it does not see the first token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask

from tests.gguf_models import F32, U32, gguf_of, save_gguf

VOCAB, HIDDEN, LAYERS = 448, 64, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS + 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
#: Latent attention and experts.
LATENT: dict[str, Any] = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
}
#: A gated delta net before attention.
DELTAS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
KINDS: dict[str, dict[str, Any]] = {
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "use_qk_norm": True},
    "hy_v3": {**EXPERTS, "num_experts": 4, "num_shared_experts": 1},
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 512},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "qwen3_next": {
        **EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        **DELTAS,
    },
    "qwen3_5_text": DELTAS,
    "exaone_moe": {
        **EXPERTS,
        "num_experts": 4,
        "num_shared_experts": 1,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense"],
    },
}
#: Folders that have the block beside the model, and those whose norms are stored minus 1.
APART = ("exaone_moe", "qwen3_next", "qwen3_5_text")
MINUS_ONE = ("qwen3_next", "qwen3_5_text")
#: The names of the parts beside the layer, ours and those of folders that put them beside.
BESIDE = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}


class NextToken(NamedTuple):
    """A model with its block: a folder and, for GLM, a GGUF file; both in torch."""

    folder: Path
    gguf: Path | None
    model: Any
    parts: dict[str, Tensor]


def random_model(kind: str = "glm4_moe") -> Any:
    """A model one of whose layers is the block."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.12)
            elif name.endswith("bias"):
                weight.normal_(0, 0.1)
        embedding = model.model.embed_tokens.weight
        embedding.normal_(0, 1.0)
        embedding /= embedding.square().mean(1, keepdim=True).sqrt()
        model.lm_head.weight.normal_(0, 0.35)
        for name, weight in model.model.layers[0].named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                weight *= 0.02  # so that the last layer of the model reads the embedding
        source = model.model.layers[0 if kind == "exaone_moe" else LAYERS - 1]
        model.model.layers[LAYERS].load_state_dict(source.state_dict())
    return model


def parts_of(model: Any) -> dict[str, Tensor]:
    """What the block has beside its layer; its norms are not exactly the model's."""
    torch.manual_seed(3)
    final = model.model.norm.weight.detach() + (model.config.model_type in MINUS_ONE)
    straight = torch.cat([torch.eye(HIDDEN), 0.02 * torch.randn(HIDDEN, HIDDEN)], dim=1)
    norms = {name: 1 + 0.02 * torch.randn(HIDDEN) for name in ("enorm", "hnorm")}
    return {
        "eh_proj.weight": straight,
        **{f"{name}.weight": values for name, values in norms.items()},
        "shared_head.norm.weight": final + 0.02 * torch.randn(HIDDEN),
    }


def write_folder(folder: Path, model: Any, parts: dict[str, Tensor], *, beside: bool) -> Path:
    """``beside``: the names of Qwen and EXAONE."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": LAYERS}
    for key in ("layer_types", "mlp_layer_types"):
        if config.get(key):
            config[key] = config[key][:LAYERS]
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "model.safetensors")
    block = f"model.layers.{LAYERS}."
    minus_one = model.config.model_type in MINUS_ONE
    for name, values in parts.items():
        tensors[block + name] = values - 1 if minus_one and "norm" in name else values.contiguous()
    if model.config.model_type == "hy_v3":
        norm = "shared_head.norm.weight"
        tensors[f"{block}final_layernorm.weight"] = tensors.pop(block + norm)
    if beside:
        tensors = {_beside(name.partition(block)) or name: own for name, own in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _beside(name: tuple[str, str, str]) -> str | None:
    if not name[1]:
        return None
    stem = name[2].removesuffix(".weight")
    return f"mtp.{BESIDE[stem]}.weight" if stem in BESIDE else f"mtp.layers.0.{name[2]}"


def write_gguf(path: Path, model: Any, parts: dict[str, Tensor], *, blocks: int = 1) -> Path:
    """As llama.cpp's converter does: the block counts as a layer."""
    c = model.config
    file = gguf_of(
        model,
        {
            "expert_count": (U32, c.n_routed_experts),
            "expert_used_count": (U32, c.num_experts_per_tok),
            "expert_feed_forward_length": (U32, c.moe_intermediate_size),
            "expert_shared_count": (U32, c.n_shared_experts),
            "expert_gating_func": (U32, 2),
            "expert_weights_scale": (F32, c.routed_scaling_factor),
            "expert_weights_norm": (7, c.norm_topk_prob),
            "leading_dense_block_count": (U32, c.first_k_dense_replace),
            "rope.dimension_count": (U32, 8),
            "nextn_predict_layers": (U32, blocks),
        },
    )
    for name, values in parts.items():
        stem, _, suffix = name.rpartition(".")
        data = np.ascontiguousarray(values.numpy(), "<f4")
        own = f"blk.{LAYERS}.nextn.{stem.replace('.', '_')}.{suffix}"
        file.tensors[own] = (data.shape[::-1], 0, data.tobytes())
    return save_gguf(path, file)


def write_next_token(
    folder: Path, kind: str = "glm4_moe", tokenizer: Path | None = None
) -> NextToken:
    """The tiny model; ``tokenizer``: a folder with one for as many tokens."""
    model = random_model(kind)
    parts = parts_of(model)
    path = write_folder(folder / "model", model, parts, beside=kind in APART)
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copy(tokenizer / name, path)
    gguf = write_gguf(folder / "m.gguf", model, parts) if kind == "glm4_moe" else None
    return NextToken(path, gguf, model, parts)


def _run(model: Any, layers: Sequence[Any], x: Tensor) -> Tensor:
    """Some layers over ``[T, hidden]``, each with its own mask."""
    positions = torch.arange(len(x))[None]
    x = x[None]
    turns = model.model.rotary_emb(x, position_ids=positions)
    for layer in layers:
        own = getattr(layer, "self_attn", None)
        window = own.sliding_window if getattr(own, "is_sliding", False) else None
        mask = create_causal_mask(model.config, x, None, None, positions)
        if own is None:  # a delta net
            mask = None
        elif window:
            far = (positions[0][:, None] - positions[0]) >= window
            mask = (torch.zeros(1, 1, *far.shape) if mask is None else mask).masked_fill(far, -1e30)
        x = layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=turns,
        )
    return x[0]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SIZES["rms_norm_eps"]) * weight


def draft_logits(tiny: NextToken, tokens: Sequence[int], known: int) -> Tensor:
    """The logits of the draft after ``tokens``, of which those behind ``known`` are drafts."""
    model, parts = tiny.model, tiny.parts
    embed, layers = model.model.embed_tokens, model.model.layers
    ids = torch.tensor(tokens)
    with torch.no_grad():
        hidden = model.model.norm(_run(model, layers[:LAYERS], embed(ids[: known - 1])))
        shifted = ids[1:]
        while True:
            embedded = _norm(embed(shifted[: len(hidden)]), parts["enorm.weight"])
            joined = torch.cat([embedded, _norm(hidden, parts["hnorm.weight"])], dim=1)
            x = _run(model, layers[LAYERS:], joined @ parts["eh_proj.weight"].T)
            x = _norm(x, parts["shared_head.norm.weight"])
            if len(hidden) == len(shifted):
                return model.lm_head(x[-1])
            hidden = torch.cat([hidden, x[-1:]])
