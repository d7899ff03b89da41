"""Jais: transformers has no class of it; the oracle is its arithmetic in torch."""

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
from torch.nn.functional import layer_norm, silu

from sdk import LLM
from sdk.loaders.open import open_checkpoint
from sdk.models.parallel import Mesh
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import F32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, prompt

Load = Callable[..., Any]
Tensors = dict[str, Tensor]
_HIDDEN, _HEADS, _VOCAB, _LAYERS, _WIDTH = 64, 4, 96, 3, 96
CONFIG: dict[str, Any] = {
    "model_type": "jais",
    "n_embd": _HIDDEN,
    "n_head": _HEADS,
    "n_layer": _LAYERS,
    "n_inner": _WIDTH,
    "n_positions": 256,
    "vocab_size": _VOCAB,
    "activation_function": "swiglu",
    "position_embedding_type": "alibi",
    "layer_norm_epsilon": 1e-5,
    "mup_embeddings_scale": 3.0,
    "mup_output_alpha": 2.0,
    "mup_width_scale": 0.4,
    "mup_scale_qk_dot_by_d": True,
}
_MATRICES = {
    "attn.c_attn": (_HIDDEN, 3 * _HIDDEN),
    "attn.c_proj": (_HIDDEN, _HIDDEN),
    "mlp.c_fc": (_HIDDEN, _WIDTH),
    "mlp.c_fc2": (_HIDDEN, _WIDTH),
    "mlp.c_proj": (_WIDTH, _HIDDEN),
}


def tensors() -> Tensors:
    random = torch.Generator().manual_seed(5)

    def normal(*shape: int, scale: float = 0.1, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=random) * scale + mean

    found = {
        "transformer.wte.weight": normal(_VOCAB, _HIDDEN, scale=0.5),
        "lm_head.weight": normal(_VOCAB, _HIDDEN, scale=0.2),
    }
    norms = [f"h.{i}.{name}" for i in range(_LAYERS) for name in ("ln_1", "ln_2")]
    for name in (*norms, "ln_f"):
        found[f"transformer.{name}.weight"] = normal(_HIDDEN, mean=1.0)
        found[f"transformer.{name}.bias"] = normal(_HIDDEN)
    for i in range(_LAYERS):
        for name, shape in _MATRICES.items():
            found[f"transformer.h.{i}.{name}.weight"] = normal(*shape, scale=0.15)
            found[f"transformer.h.{i}.{name}.bias"] = normal(shape[1])
    return found


def slopes() -> Tensor:
    return torch.tensor([2.0 ** (-8 * (i + 1) / _HEADS) for i in range(_HEADS)])


def logits(t: Tensors, ids: list[int]) -> Tensor:
    """One prompt, with Jais' own formulas."""

    def norm(x: Tensor, name: str) -> Tensor:
        own = t[f"transformer.{name}.weight"], t[f"transformer.{name}.bias"]
        return layer_norm(x, (_HIDDEN,), *own, 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ t[f"transformer.{name}.weight"] + t[f"transformer.{name}.bias"]

    n = len(ids)
    x = t["transformer.wte.weight"][ids] * 3.0
    distance = torch.arange(n)[None, :] - torch.arange(n)[:, None]
    masked = torch.where(distance > 0, float("-inf"), slopes()[:, None, None] * distance)
    for i in range(_LAYERS):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (one.view(n, _HEADS, -1).transpose(0, 1) for one in qkv.chunk(3, dim=1))
        scores = q @ k.transpose(1, 2) / q.shape[-1] + masked
        y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, _HIDDEN)
        x = x + linear(y, f"h.{i}.attn.c_proj")
        y = norm(x, f"h.{i}.ln_2")
        y = linear(y, f"h.{i}.mlp.c_fc") * silu(linear(y, f"h.{i}.mlp.c_fc2"))
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ t["lm_head.weight"].t() * 0.8


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    stored = {**tensors(), "transformer.relative_pe.slopes": slopes().view(_HEADS, 1, 1)}
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return path


_NAMES = {
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_fc2": "ffn_gate",
    "mlp.c_proj": "ffn_down",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
}


def gguf(t: Tensors) -> GgufBytes:
    """As llama.cpp's converter writes it (conversion/jais.py): factors in the weights."""
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, _LAYERS),
        "context_length": (U32, 256),
        "embedding_length": (U32, _HIDDEN),
        "feed_forward_length": (U32, _WIDTH),
        "attention.head_count": (U32, _HEADS),
        "attention.layer_norm_epsilon": (F32, 1e-5),
        "attention.max_alibi_bias": (F32, 8.0),
    }
    file = GgufBytes({"general.architecture": (STRING, "jais")})
    file.metadata |= {f"jais.{key}": value for key, value in facts.items()}
    tops = {"wte": ("token_embd", 3.0), "ln_f": ("output_norm", 1.0), "lm_head": ("output", 0.8)}
    for name, values in t.items():
        stem, _, ending = name.removeprefix("transformer.").rpartition(".")
        if stem in tops:
            theirs, factor = tops[stem]
            values = values * factor
        else:
            _, number, own = stem.split(".", 2)
            theirs = f"blk.{number}.{_NAMES[own]}"
            values = values.t() if own in _MATRICES and ending == "weight" else values
        data = np.ascontiguousarray(values.numpy(), "<f4")
        file.tensors[f"{theirs}.{ending}"] = (data.shape[::-1], 0, data.tobytes())
    return file


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_logits_match_however_the_work_is_cut(kind: str, tmp_path: Path, load: Load) -> None:
    path = folder(tmp_path / "m") if kind == "folder" else tmp_path / "m.gguf"
    if kind == "file":
        save_gguf(path, gguf(tensors()))
    model, ids = load(open_checkpoint(path)), prompt(75, 1)
    whole = Paged(model).run("a", ids)
    assert (whole - logits(tensors(), ids)).abs().max() <= 1e-4
    for splits in ([7, 30], [16, 32, 70, 71, 72]):
        assert torch.equal(Paged(model).run("a", ids, splits), whole)


def test_a_folder_without_a_head_has_that_of_the_embedding(tmp_path: Path, load: Load) -> None:
    path, own = folder(tmp_path / "m"), tensors()
    save_file(
        {k: v for k, v in own.items() if not k.startswith("lm_head")}, path / "model.safetensors"
    )
    found = Paged(load(open_checkpoint(path))).run("a", prompt(20, 1))
    own["lm_head.weight"] = own["transformer.wte.weight"]
    assert (found - logits(own, prompt(20, 1))).abs().max() <= 1e-4


def test_scores_over_the_root_of_the_width_are_those_of_other_files(
    tmp_path: Path, load: Load
) -> None:
    changes = {"mup_scale_qk_dot_by_d": None, "mup_output_alpha": None, "width_scale": 0.8}
    changes |= {"mup_embeddings_scale": None, "embeddings_scale": 3.0}
    kept = {key: value for key, value in changes.items() if value is not None}
    path = folder(tmp_path / "m", **changes)
    config = {k: v for k, v in CONFIG.items() if k not in changes} | kept
    (path / "config.json").write_text(json.dumps(config))
    config = load(open_checkpoint(path)).config
    assert (config.attention_scale, config.embedding_scale) == (0.25, 3.0)
    assert config.logits_scale == pytest.approx(1.25)


def test_ranks_have_the_slopes_of_their_heads(tmp_path: Path, load: Load) -> None:
    path = folder(tmp_path / "m")
    expected = Paged(load(open_checkpoint(path))).run("a", prompt(30, 1), [11])

    def work(own: Mesh) -> Tensor:
        return Paged(load(open_checkpoint(path), mesh=own), 2).run("a", prompt(30, 1), [11])

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


def test_slopes_that_follow_from_the_heads_are_no_leftovers(tmp_path: Path) -> None:
    with LLM(folder(tmp_path / "m"), skip_tokenizer_init=True, num_threads=1) as llm:
        assert len(llm.embed([prompt(5, 1)])) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "learned"}, "position_embedding_type: expected alibi"),
        ({"activation_function": "gelu"}, "activation_function: expected swiglu, found gelu"),
        ({"width_scale": -1.0, "mup_output_alpha": None}, "width_scale: expected a number above 0"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path, load: Load
) -> None:
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        load(open_checkpoint(folder(tmp_path / "m", **changes)))
