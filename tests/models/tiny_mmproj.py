"""GGUF files as llama.cpp's converter writes them from vision models: text, and the encoder of
images (mmproj)."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from sdk.models.vision.family import vision_of
from tests.gguf_models import ARRAY, BOOL, F32, I32, STRING, U32, GgufBytes, gguf_of, save_gguf
from tests.models.test_layer_geometries import gemma4_file

#: For each family the architecture of the text, the projector, the name of an image's token, and
#: the names of tensors, the folder's to the file's.
SIGLIP = {
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.embeddings.position_embedding": "v.position_embd",
    "vision_tower.post_layernorm": "v.post_ln",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
QWEN = {
    "visual.patch_embed.proj": "v.patch_embd",
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
}
LLAVA = {
    "vision_tower.embeddings.class_embedding": "v.class_embd",
    "vision_tower.pre_layrnorm": "v.pre_ln",
    "multi_modal_projector.linear_1": "mm.0",
    "multi_modal_projector.linear_2": "mm.2",
    "image_newline": "model.image_newline",
}
PIXTRAL = {
    "vision_tower.patch_conv": "v.patch_embd",
    "vision_tower.ln_pre": "v.pre_ln",
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_out",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "multi_modal_projector.norm": "mm.input_norm",
    "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
}
FAMILIES: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "llava": ("llama", "mlp", "<image>", {**SIGLIP, **LLAVA}),
    "llava_next": ("llama", "mlp", "<image>", {**SIGLIP, **LLAVA}),
    "llava_next-siglip": ("granite", "mlp", "<image>", {**SIGLIP, **LLAVA}),
    "llava-pixtral": ("llama", "pixtral", "[IMG]", PIXTRAL),
    "internvl": (
        "qwen2",
        "internvl",
        "<IMG_CONTEXT>",
        {
            "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
            "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
            "vision_tower.embeddings.cls_token": "v.class_embd",
            "layernorm_before": "ln1",
            "layernorm_after": "ln2",
            "attention.q_proj": "attn_q",
            "attention.k_proj": "attn_k",
            "attention.v_proj": "attn_v",
            "attention.projection_layer": "attn_out",
            "lambda_1": "ls1.weight",
            "lambda_2": "ls2.weight",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
            "multi_modal_projector.layer_norm": "mm.model.mlp.0",
            "multi_modal_projector.linear_1": "mm.model.mlp.1",
            "multi_modal_projector.linear_2": "mm.model.mlp.3",
        },
    ),
    "gemma3": (
        "gemma3",
        "gemma3",
        "<image_soft_token>",
        {
            **SIGLIP,
            "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
            "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
        },
    ),
    "gemma4": (
        "gemma4",
        "gemma4v",
        "<|image|>",
        {
            "vision_tower.patch_embedder.input_proj": "v.patch_embd",
            "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
            "vision_tower.std_bias": "v.std_bias",
            "vision_tower.std_scale": "v.std_scale",
            "embed_vision.embedding_projection": "mm.input_projection",
            "input_layernorm": "ln1",
            "post_attention_layernorm": "attn_post_norm",
            "pre_feedforward_layernorm": "ln2",
            "post_feedforward_layernorm": "ffn_post_norm",
            **{
                f"{theirs}{linear}": own
                for linear in (".linear", "")
                for theirs, own in (
                    ("self_attn.q_proj", "attn_q"),
                    ("self_attn.k_proj", "attn_k"),
                    ("self_attn.v_proj", "attn_v"),
                    ("self_attn.o_proj", "attn_out"),
                    ("mlp.gate_proj", "ffn_gate"),
                    ("mlp.up_proj", "ffn_up"),
                    ("mlp.down_proj", "ffn_down"),
                )
            },
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
        },
    ),
    "lfm2_vl": (
        "lfm2",
        "lfm2",
        "<image>",
        {
            **SIGLIP,
            "multi_modal_projector.layer_norm": "mm.input_norm",
            "multi_modal_projector.linear_1": "mm.1",
            "multi_modal_projector.linear_2": "mm.2",
        },
    ),
    "minicpmv4_6": (
        "llama",  # its hybrid text has other layers: tests write them elsewhere
        "minicpmv4_6",
        "<|image_pad|>",
        {
            "vision_tower.vit_merger.layer_norm1": "v.vit_merger.ln1",
            "vision_tower.vit_merger.self_attn.q_proj": "v.vit_merger.attn_q",
            "vision_tower.vit_merger.self_attn.k_proj": "v.vit_merger.attn_k",
            "vision_tower.vit_merger.self_attn.v_proj": "v.vit_merger.attn_v",
            "vision_tower.vit_merger.self_attn.out_proj": "v.vit_merger.attn_out",
            "vision_tower.vit_merger.pre_norm": "v.vit_merger.ds_ln",
            "vision_tower.vit_merger.linear_1": "v.vit_merger.ds_ffn_up",
            "vision_tower.vit_merger.linear_2": "v.vit_merger.ds_ffn_down",
            **SIGLIP,
            "merger.mlp.0.pre_norm": "mm.input_norm",
            "merger.mlp.0.linear_1": "mm.up",
            "merger.mlp.0.linear_2": "mm.down",
        },
    ),
    "smolvlm": (
        "llama",
        "idefics3",
        "<image>",
        {
            **{key.replace("_tower", "_model"): value for key, value in SIGLIP.items()},
            "connector.modality_projection.proj": "mm.model.fc",
        },
    ),
    "mistral3": (
        "llama",
        "pixtral",
        "[IMG]",
        PIXTRAL,
    ),
    "qwen2_5_vl": (
        "qwen2vl",
        "qwen2.5vl_merger",
        "<|image_pad|>",
        {
            **QWEN,
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            "visual.merger.ln_q": "v.post_ln",
            "visual.merger.mlp.0": "mm.0",
            "visual.merger.mlp.2": "mm.2",
        },
    ),
    "qwen3_vl": (
        "qwen3vl",
        "qwen3vl_merger",
        "<|image_pad|>",
        {
            **QWEN,
            "visual.pos_embed": "v.position_embd",
            "mlp.linear_fc1": "ffn_up",
            "mlp.linear_fc2": "ffn_down",
            "visual.merger.norm": "v.post_ln",
            "visual.merger.linear_fc1": "mm.0",
            "visual.merger.linear_fc2": "mm.2",
            **{
                f"visual.deepstack_merger_list.{i}.{theirs}": f"v.deepstack.{layer}.{own}"
                for i, layer in enumerate((0, 2))
                for theirs, own in (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2"))
            },
        },
    ),
}


def _family(name: str) -> tuple[str, str, str, dict[str, str]]:
    return FAMILIES.get(name) or FAMILIES[name.partition("-")[0]]


def text_file(model: Any, name: str, *, token: str | None = None) -> GgufBytes:
    """The file of the text part. ``token``: another name of an image's token."""
    arch, _, image_token, _ = _family(name)
    config = model.config.text_config
    config.tie_word_embeddings = model.config.tie_word_embeddings
    tensors = {
        key.replace("language_model.", "").replace("text_model.", ""): values
        for key, values in model.state_dict().items()
        if "language_model" in key or "text_model" in key or key.startswith("lm_head")
    }
    sections = config.rope_parameters.get("mrope_section")
    facts: dict[str, Any] = (
        {} if sections is None else {"rope.dimension_sections": (ARRAY, (I32, [*sections, 0]))}
    )
    vision = model.config.vision_config
    if deepstack := getattr(vision, "deepstack_visual_indexes", None):
        facts["n_deepstack_layers"] = (U32, len(deepstack))  # llama.cpp compares widths by it
    own = SimpleNamespace(config=config, state_dict=lambda: tensors)
    file = gemma4_file(own) if arch == "gemma4" else gguf_of(own, facts, arch)
    tokens = [f"t{i}" for i in range(config.vocab_size)]
    tokens[90] = image_token if token is None else token
    file.metadata["tokenizer.ggml.tokens"] = (ARRAY, (STRING, tokens))
    return file


def mmproj_file(model: Any, name: str) -> GgufBytes:
    """The file of the encoder of images, in float32."""
    _, projector, _, names = _family(name)
    vision = model.config.vision_config
    layers = getattr(vision, "depth", None) or vision.num_hidden_layers
    patch = vision.patch_size
    side = getattr(vision, "image_size", 560)
    if name == "qwen3_vl":
        side = patch * math.isqrt(vision.num_position_embeddings)
    patch, side = (one[0] if isinstance(one, (list, tuple)) else one for one in (patch, side))
    layers -= name in ("llava", "llava_next")  # the text does not read the last one
    file = GgufBytes({"general.architecture": (STRING, "clip"), "general.type": (STRING, "mmproj")})
    file.metadata |= {
        "clip.has_vision_encoder": (BOOL, True),
        "clip.projector_type": (STRING, projector),
    }
    colors: Any = vision_of(model.config.to_dict())
    if projector == "gemma4v":  # the converter says nothing of its activation
        del file.metadata["clip.projector_type"]
        file.metadata["clip.vision.projector_type"] = (STRING, projector)
        colors = SimpleNamespace(mean=(0.0,) * 3, std=(1.0,) * 3)
    else:
        activation = "use_silu" if vision.hidden_act == "silu" else "use_gelu"
        named = vision.hidden_act != "quick_gelu" and name != "llava_next-siglip"
        file.metadata[f"clip.{activation}"] = (BOOL, named)
    facts: dict[str, tuple[int, Any]] = {
        "projection_dim": (U32, model.config.text_config.hidden_size),
        "image_size": (U32, side),
        "patch_size": (U32, patch),
        "embedding_length": (U32, vision.hidden_size),
        "feed_forward_length": (U32, vision.intermediate_size),
        "block_count": (U32, layers),
        "attention.head_count": (U32, vision.num_attention_heads),
        "attention.layer_norm_epsilon": (
            F32,
            1e-5 if projector == "pixtral" else getattr(vision, "layer_norm_eps", 1e-6),
        ),
        "image_mean": (ARRAY, (F32, list(colors.mean))),
        "image_std": (ARRAY, (F32, list(colors.std))),
    }
    facts |= _own_facts(model, name)
    file.metadata |= {f"clip.vision.{key}": value for key, value in facts.items()}
    for key, values in model.state_dict().items():
        if name.endswith("-4x") and "vit_merger" in key:  # which the converter leaves out
            continue
        theirs = _named(key.removeprefix("model."), names)
        if theirs is None or theirs.startswith(f"v.blk.{layers}."):
            continue
        for own, part in _parts(theirs, values.detach().float(), name):
            data = np.ascontiguousarray(part.numpy(), "<f4")
            file.tensors[own] = (data.shape[::-1], 0, data.tobytes())
    if projector == "pixtral":  # the row of a token, which llama.cpp puts between rows of patches
        row = model.get_input_embeddings().weight[91].detach().float().numpy()
        file.tensors["v.token_embd.img_break"] = (row.shape, 0, row.tobytes())
    return file


def _own_facts(model: Any, name: str) -> dict[str, tuple[int, Any]]:
    if name == "gemma3":
        side = model.config.vision_config.image_size // model.config.vision_config.patch_size
        merge = side // int(model.config.mm_tokens_per_image**0.5)
        return {"projector.scale_factor": (U32, merge)}
    if name == "smolvlm":
        return {
            "projector.scale_factor": (U32, model.config.scale_factor),
            "preproc_image_size": (U32, 112),
        }
    if name.startswith("minicpm"):
        merge = 2 if model.config.downsample_mode == "4x" else 4
        return {
            "image_size": (U32, 56),  # of slices
            "projector.scale_factor": (U32, merge),
            "wa_layer_indexes": (ARRAY, (I32, [model.config.insert_layer_id])),
        }
    if name == "lfm2_vl" or name.startswith("gemma4"):
        return {"projector.scale_factor": (U32, 2)}
    if name == "llava-pixtral":
        return {}
    if name.startswith("llava"):
        read = [1, 2, 3] if name == "llava_next-siglip" else [2]
        sizes = getattr(model.config, "image_grid_pinpoints", [])
        more = {
            "image_grid_pinpoints": (ARRAY, (I32, [side for size in sizes for side in size])),
            "mm_patch_merge_type": (STRING, "spatial_unpad"),
        }
        own = {"projection_dim": (U32, 768), "feature_layer": (ARRAY, (I32, read))}
        return {**own, **(more if sizes else {})}
    if name == "internvl":
        return {"projector.scale_factor": (U32, 2), "preproc_max_tiles": (U32, 6)}
    if name == "mistral3":
        return {"spatial_merge_size": (U32, 2)}
    if name == "qwen2_5_vl":
        return {"n_wa_pattern": (U32, 2)}
    return {
        "spatial_merge_size": (U32, 2),
        "is_deepstack_layers": (ARRAY, (BOOL, [True, False, True])),
    }


def _named(key: str, names: dict[str, str]) -> str | None:
    layer = None
    for root in ("encoder.layers.", "encoder.layer.", "transformer.layers.", "visual.blocks."):
        if root in key and "language" not in key and "text_model" not in key:
            layer, _, key = key.partition(root)[2].partition(".")
    for theirs, own in names.items():
        if key == theirs or key.startswith(f"{theirs}."):
            ending = key.removeprefix(theirs)
            return own + ending if layer is None else f"v.blk.{layer}.{own}{ending}"
    return None


def _parts(name: str, values: Tensor, family: str) -> list[tuple[str, Tensor]]:
    """What the converter makes of a tensor."""
    if name == "v.patch_embd.weight" and values.dim() == 5:
        return [(name, values[:, :, 0]), (f"{name}.1", values[:, :, 1])]
    if family == "qwen2_5_vl" and "attn_qkv" in name:
        parts = values.chunk(3)
        return [(name.replace("qkv", part), own) for part, own in zip("qkv", parts, strict=True)]
    turned = name.endswith(("attn_q.weight", "attn_k.weight"))
    if turned and family in ("mistral3", "llava-pixtral"):
        pairs = values.view(3, 2, 12, -1)  # heads, halves, features of a half
        return [(name, pairs.transpose(1, 2).reshape(values.shape))]
    if family == "lfm2_vl" and name == "v.patch_embd.weight":  # of pixels, colors last
        return [(name, values.view(len(values), 7, 7, 3).permute(0, 3, 1, 2))]
    if family.startswith("gemma4") and name == "v.patch_embd.weight":
        return [(name, values.view(len(values), 4, 4, 3).permute(0, 3, 1, 2))]
    if not values.dim():
        return [(name, values[None])]
    if name == "mm.soft_emb_norm.weight":
        return [(name, values + 1)]
    return [(name, values)]


def save_both(model: Any, name: str, folder: Path) -> Path:
    """The path of the text model, beside which the other file is."""
    save_gguf(folder / "mmproj-model-f32.gguf", mmproj_file(model, name))
    return save_gguf(folder / "model.gguf", text_file(model, name))


__all__ = ["FAMILIES", "mmproj_file", "save_both", "text_file"]
