"""OpenELM: layers that grow in heads and width.

transformers has no class of it. The oracle is its Qwen3 with the sizes of the largest layer: what a
smaller one lacks adds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sdk.loaders.open import open_checkpoint
from sdk.models.parallel import Mesh
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import ARRAY, F32, I32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, expected_logits, prompt, tiny

Load = Callable[..., Any]
_HIDDEN, _HEAD = 64, 16
#: Query heads, heads of keys and the width of each layer.
LAYERS = [(2, 1, 64), (4, 2, 128), (4, 2, 256)]
_NAMES = {
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.down_proj": "ffn.proj_2",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {"model.embed_tokens": "token_embeddings", "model.norm": "norm"}
_GGUF = {
    "token_embeddings": "token_embd",
    "norm": "output_norm",
    "attn.qkv_proj": "attn_qkv",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.out_proj": "attn_output",
    "ffn.proj_2": "ffn_down",
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}


@torch.no_grad()
def oracle() -> Any:
    model = tiny(
        "qwen3",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=_HEAD,
        intermediate_size=256,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
    )
    for layer, (heads, _, width) in zip(model.model.layers, LAYERS, strict=True):
        layer.self_attn.o_proj.weight[:, heads * _HEAD :] = 0
        layer.mlp.down_proj.weight[:, width:] = 0
    return model


def stored(model: Any) -> dict[str, Tensor]:
    """The tensors of a folder."""
    state, found = model.state_dict(), {}
    for ours, theirs in _TOP.items():
        found[f"transformer.{theirs}.weight"] = state[f"{ours}.weight"].clone()
    for i, (heads, kv_heads, width) in enumerate(LAYERS):
        path = f"model.layers.{i}."
        own = {k.removeprefix(path): v for k, v in state.items() if k.startswith(path)}
        rows = {"q": heads * _HEAD, "k": kv_heads * _HEAD, "v": kv_heads * _HEAD}
        qkv = [own[f"self_attn.{x}_proj.weight"][:n] for x, n in rows.items()]
        wide = [own[f"mlp.{x}_proj.weight"][:width] for x in ("gate", "up")]
        own["self_attn.o_proj.weight"] = own["self_attn.o_proj.weight"][:, : heads * _HEAD]
        own["mlp.down_proj.weight"] = own["mlp.down_proj.weight"][:, :width]
        into = f"transformer.layers.{i}."
        found[f"{into}attn.qkv_proj.weight"] = torch.cat(qkv)
        found[f"{into}ffn.proj_1.weight"] = torch.cat(wide)
        for ours, theirs in _NAMES.items():
            found[f"{into}{theirs}.weight"] = own[f"{ours}.weight"].contiguous()
    return found


def folder(model: Any, path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(stored(model), path / "model.safetensors")
    config = {
        "model_type": "openelm",
        "model_dim": _HIDDEN,
        "num_transformer_layers": len(LAYERS),
        "num_query_heads": [heads for heads, _, _ in LAYERS],
        "num_kv_heads": [kv_heads for _, kv_heads, _ in LAYERS],
        "ffn_multipliers": [width / _HIDDEN for _, _, width in LAYERS],
        "ffn_dim_divisor": 32,
        "head_dim": _HEAD,
        "rope_freq_constant": 3000,
        "max_context_length": 256,
        "vocab_size": model.config.vocab_size,
        **changes,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def gguf(model: Any) -> GgufBytes:
    """As llama.cpp's converter writes it (conversion/openelm.py)."""
    file = GgufBytes({"general.architecture": (STRING, "openelm")})
    heads, kv_heads, widths = ([int(one) for one in each] for each in zip(*LAYERS, strict=True))
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, len(LAYERS)),
        "context_length": (U32, 256),
        "embedding_length": (U32, _HIDDEN),
        "attention.layer_norm_rms_epsilon": (F32, 1e-6),
        "attention.key_length": (U32, _HEAD),
        "attention.value_length": (U32, _HEAD),
        "rope.freq_base": (F32, 3000.0),
        "rope.dimension_count": (U32, _HEAD),
        "attention.head_count": (ARRAY, (I32, heads)),
        "attention.head_count_kv": (ARRAY, (I32, kv_heads)),
        "feed_forward_length": (ARRAY, (I32, widths)),
    }
    file.metadata |= {f"openelm.{key}": value for key, value in facts.items()}
    for name, values in stored(model).items():
        stem = name.removesuffix(".weight").removeprefix("transformer.")
        number, own = "", stem
        if stem.startswith("layers."):
            _, layer, own = stem.split(".", 2)
            number = f"blk.{layer}."
        parts = {_GGUF.get(own, own): values}
        if own == "ffn.proj_1":
            parts = dict(zip(("ffn_gate", "ffn_up"), values.chunk(2), strict=True))
        for theirs, part in parts.items():
            data = np.ascontiguousarray(part.numpy(), "<f4")
            file.tensors[f"{number}{theirs}.weight"] = (data.shape[::-1], 0, data.tobytes())
    return file


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_logits_match_however_the_work_is_cut(kind: str, tmp_path: Path, load: Load) -> None:
    model = oracle()
    path = folder(model, tmp_path / "m") if kind == "folder" else tmp_path / "m.gguf"
    if kind == "file":
        save_gguf(path, gguf(model))
    checkpoint = open_checkpoint(path)
    loaded = load(checkpoint)
    assert checkpoint.unused() == []
    assert [cache.kv_heads for cache in loaded.config.caches] == [1, 2, 2]
    ids = prompt(75, 1)
    whole = Paged(loaded).run("a", ids)
    assert (whole - expected_logits(model, ids)).abs().max() <= 1e-4
    for splits in ([7, 30], [16, 32, 70, 71, 72]):
        assert torch.equal(Paged(loaded).run("a", ids, splits), whole)


def test_ranks_have_parts_of_each_layer(tmp_path: Path, load: Load) -> None:
    path = folder(oracle(), tmp_path / "m")
    expected = Paged(load(open_checkpoint(path))).run("a", prompt(30, 1), [11])

    def work(own: Mesh) -> Tensor:
        model = load(open_checkpoint(path), mesh=own)
        return Paged(model, [1, 1, 1], ranks=2).run("a", prompt(30, 1), [11])

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": [1, 2]}, "per_layer: expected a list of 3 numbers"),
        ({"num_kv_heads": [1, 3, 2]}, "num_key_value_heads: expected a divisor of 4 heads"),
        ({"ffn_with_glu": False}, "ffn_with_glu: expected True, found False"),
        ({"normalization_layer_name": "layer_norm"}, "normalization_layer_name: expected rms_norm"),
    ],
)
def test_what_does_not_fit_or_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path, load: Load
) -> None:
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        load(open_checkpoint(folder(oracle(), tmp_path / "m", **changes)))
