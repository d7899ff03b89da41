"""A tiny random MiniCPM-V 4.5: a folder as its publisher writes them, files as llama.cpp's old
converter does, and what the model computes, in float64.

The encoder is that of transformers' MiniCPM-V 4.6 without its merger. The code of the resampler is
beside published weights alone; its reference here is torch's attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.minicpmv4_6.modeling_minicpmv4_6 import MiniCPMV4_6VisionModel

from tests.gguf_models import ARRAY, BOOL, F32, I32, STRING, U32, GgufBytes, gguf_of, save_gguf
from tests.models.tiny_vision import SIGLIP, TEXT
from tests.vision_prompts import Family, write_tokenizer

WIDTH, QUERIES, PATCH = 256, 16, 7
MARKS = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
PROMPTS = Family(
    "minicpmv",
    ("<|im_start|>", "<|im_end|>", "<unk>", *MARKS),
    {"eos_token": "<|im_end|>"},
    "<unk>",
    # As published: contents are strings.
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    {},
    "MiniCPMVImageProcessor",
    {"scale_resolution": 56, "patch_size": PATCH, "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3},
)
_KINDS = {"2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}


class Resampler(torch.nn.Module):
    """Queries to the patches of a tile."""

    def __init__(self, patches: int) -> None:
        super().__init__()
        self.query = torch.nn.Parameter(torch.empty(QUERIES, WIDTH))
        self.kv_proj = torch.nn.Linear(patches, WIDTH, bias=False)
        self.attn = torch.nn.MultiheadAttention(WIDTH, WIDTH // 128)
        self.ln_q, self.ln_kv, self.ln_post = (torch.nn.LayerNorm(WIDTH, 1e-6) for _ in range(3))
        self.proj = torch.nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor, shape: tuple[int, int]) -> Tensor:
        """x ``[patches, width]``, row by row -> ``[queries, WIDTH]``."""
        x = self.ln_kv(self.kv_proj(x))
        keys = (x + _waves(shape))[:, None]
        found, _ = self.attn(self.ln_q(self.query)[:, None], keys, x[:, None])
        return self.ln_post(found[:, 0]) @ self.proj


def _waves(shape: tuple[int, int]) -> Tensor:
    rows, columns = shape
    turns_of = 10000.0 ** -(torch.arange(WIDTH // 4, dtype=torch.float64) / (WIDTH // 4))
    across = torch.arange(columns, dtype=torch.float64).repeat(rows)
    down = torch.arange(rows, dtype=torch.float64).repeat_interleave(columns)
    angles = [at[:, None] * turns_of for at in (across, down)]
    return torch.cat([wave(one) for one in angles for wave in (torch.sin, torch.cos)], dim=1)


class TinyMiniCPM:
    """``version``: of MiniCPM-V."""

    def __init__(self, version: str = "4.5") -> None:
        torch.manual_seed(45)
        self.version = version
        text = {**TEXT, "hidden_size": WIDTH, "vocab_size": 320, "max_position_embeddings": 2048}
        self.text_config = transformers.CONFIG_MAPPING[_KINDS[version]](**text)
        self.text = transformers.AutoModelForCausalLM.from_config(self.text_config).eval()
        vision = transformers.CONFIG_MAPPING["minicpmv4_6"](vision_config=SIGLIP).vision_config
        self.tower = MiniCPMV4_6VisionModel(vision).eval()
        self.resampler = Resampler(vision.hidden_size).eval()
        self.vision = vision
        with torch.no_grad():
            for model in (self.text, self.tower, self.resampler):
                for one in model.parameters():
                    wide = one.dim() > 1
                    spread = one[0].numel() ** -0.5 if wide else 0.3
                    one.normal_(0.0 if wide else 0.3, spread)
        for model in (self.tower, self.resampler):
            model.double()

    def rows(self, tiles: tuple[NDArray[np.uint8], ...]) -> Tensor:
        """float64 ``[tiles * QUERIES, WIDTH]``."""
        found = []
        for tile in tiles:
            values = (torch.from_numpy(tile / 255.0) - 0.5) / 0.5
            down, right = (side // PATCH for side in tile.shape[:2])
            parts = values.permute(2, 0, 1).reshape(3, down, PATCH, right, PATCH)
            pixels = parts.permute(0, 2, 1, 3, 4).reshape(1, 3, PATCH, -1)
            shape = torch.tensor([[down, right]])
            with torch.no_grad():
                x = self.tower(pixels, target_sizes=shape, use_vit_merger=False)
                found.append(self.resampler(x.last_hidden_state[0], (down, right)))
        return torch.cat(found)

    def tensors(self) -> dict[str, Tensor]:
        """By the names in a folder."""
        parts = {"llm": self.text, "vpm": self.tower, "resampler": self.resampler}
        found = {
            f"{name}.{key}": values.float().contiguous()
            for name, part in parts.items()
            for key, values in part.state_dict().items()
            if "vit_merger" not in key
        }
        found["llm.lm_head.weight"] = found["llm.lm_head.weight"].clone()
        return found

    def save(self, folder: Path, **changes: Any) -> None:
        """A folder. ``changes``: of its config."""
        write_tokenizer(PROMPTS, folder)
        save_file(self.tensors(), folder / "model.safetensors")
        config = {
            **self.text_config.to_dict(),
            "model_type": "minicpmv",
            "architectures": ["MiniCPMV"],
            "auto_map": {"AutoModel": "modeling_minicpmv.MiniCPMV"},
            "version": float(self.version),
            "query_num": QUERIES,
            "image_size": 448,
            "slice_config": {"max_slice_nums": 9, "model_type": "minicpmv"},
            "drop_vision_last_layer": False,
            "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
            **changes,
        }
        (folder / "config.json").write_text(json.dumps(config))
        settings = {"image_processor_type": PROMPTS.kind, "max_slice_nums": 4, **PROMPTS.size}
        settings["image_feature_size"] = QUERIES
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))

    def mmproj(self, version: int = 6) -> GgufBytes:
        """The file of the encoder, as llama.cpp's old converter writes it, in float32."""
        file = GgufBytes(
            {
                "general.architecture": (STRING, "clip"),
                "clip.has_text_encoder": (BOOL, False),
                "clip.has_vision_encoder": (BOOL, True),
                "clip.projector_type": (STRING, "resampler"),
                "clip.minicpmv_version": (I32, version),
                "clip.minicpmv_query_num": (U32, QUERIES),
                "clip.use_gelu": (BOOL, True),
            }
        )
        facts: dict[str, tuple[int, Any]] = {
            "image_size": (U32, 56),
            "patch_size": (U32, PATCH),
            "embedding_length": (U32, self.vision.hidden_size),
            "feed_forward_length": (U32, self.vision.intermediate_size),
            "projection_dim": (U32, 0),
            "attention.head_count": (U32, self.vision.num_attention_heads),
            "attention.layer_norm_epsilon": (F32, 1e-6),
            "block_count": (U32, self.vision.num_hidden_layers),
            "image_mean": (ARRAY, (F32, [0.5] * 3)),
            "image_std": (ARRAY, (F32, [0.5] * 3)),
        }
        file.metadata |= {f"clip.vision.{key}": value for key, value in facts.items()}
        for key, values in self.tensors().items():
            for own, part in _in_file(key, values):
                data = np.ascontiguousarray(part.numpy(), "<f4")
                file.tensors[own] = (data.shape[::-1], 0, data.tobytes())
        return file

    def save_files(self, folder: Path, version: int = 6) -> Path:
        """The path of the text model, beside which the other file is."""
        text = gguf_of(self.text, {}, _KINDS[self.version])
        tokens = [f"t{i}" for i in range(320)]
        tokens[90 if self.version == "4.5" else 0] = "<unk>"
        text.metadata["tokenizer.ggml.tokens"] = (ARRAY, (STRING, tokens))
        save_gguf(folder / "mmproj-model-f32.gguf", self.mmproj(version))
        return save_gguf(folder / "model.gguf", text)


def _in_file(key: str, values: Tensor) -> list[tuple[str, Tensor]]:
    """What the converter makes of a tensor."""
    if key.startswith("resampler.attn.in_proj_"):
        end = key.rpartition("_")[2]
        return [
            (f"resampler.attn.{part}.{end}", own)
            for part, own in zip("qkv", values.chunk(3), strict=True)
        ]
    if key == "resampler.proj":
        return [("resampler.proj.weight", values.T), ("resampler.pos_embed_k", values.clone())]
    if key.startswith("resampler."):
        return [(key.replace("_proj", ""), values)]
    if not key.startswith("vpm."):
        return []
    own = key.replace("vpm.", "v.").replace("encoder.layers", "blk").replace("embeddings.", "")
    for theirs, name in (
        ("self_attn.", "attn_"),
        ("_proj", ""),
        ("layer_norm", "ln"),
        ("layernorm", "ln"),
        ("mlp.fc1", "ffn_down"),
        ("mlp.fc2", "ffn_up"),
        ("embedding", "embd"),
    ):
        own = own.replace(theirs, name)
    return [(own, values)]


__all__ = ["PROMPTS", "QUERIES", "TinyMiniCPM"]
