"""DeciLM and Llama-Nemotron: layers that lack attention or an MLP, or have sizes of their own.

transformers has no class of them. The oracle is its Llama with the most heads of keys in each layer
(those that share one are equal), the widest MLP (what is beyond a layer's width is 0), projections
of 0 for blocks that a layer lacks, and a module for a matrix in the place of attention.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sdk import LLM, SamplingParams
from sdk.loaders.open import open_checkpoint
from sdk.models.parallel import Mesh
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import ARRAY, F32, I32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, expected_logits, prompt, tiny

Load = Callable[..., Any]
_HIDDEN, _HEADS, _WIDTH, _WIDEST = 64, 4, 16, 512


class Searched(NamedTuple):
    """A layer: query heads of a key head, ``None`` without attention; a matrix in its place; the
    factor of the MLP's width, ``None`` without one, and that width."""

    group: int | None = None
    linear: bool = False
    factor: float | None = None
    width: int = 0

    @property
    def kv_heads(self) -> int:
        return 0 if self.group is None else _HEADS // self.group

    def config(self) -> dict[str, Any]:
        lacks = self.group is None and not self.linear
        return {
            "attention": {
                "n_heads_in_group": self.group,
                "no_op": lacks,
                "replace_with_linear": self.linear,
                "window_length": None,
            },
            "ffn": {"ffn_mult": self.factor, "no_op": self.factor is None, "sparsify": None},
        }


LAYERS = [
    Searched(2, factor=1.5, width=256),
    Searched(factor=9.0, width=512),
    Searched(linear=True, factor=1.5, width=256),
    Searched(),
    Searched(4),
    Searched(linear=True),
    Searched(1, factor=12.0, width=512),
]


class Matrix(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_attn = torch.nn.Linear(_HIDDEN, _HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.linear_attn(hidden_states), None


@torch.no_grad()
def oracle() -> Any:
    rope = {"rope_type": "default", "rope_theta": 3000.0}
    sizes = {"num_key_value_heads": _HEADS, "intermediate_size": _WIDEST}
    model = tiny("llama", num_hidden_layers=len(LAYERS), rope_parameters=rope, **sizes)
    for layer, own in zip(model.model.layers, LAYERS, strict=True):
        if own.linear:
            layer.self_attn = Matrix()
            layer.self_attn.linear_attn.weight.normal_(0, 0.1)
        elif own.group is None:
            layer.self_attn.o_proj.weight.zero_()
        else:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                heads = projection.weight.view(_HEADS, _WIDTH, _HIDDEN)
                heads.copy_(heads[:: own.group].repeat_interleave(own.group, dim=0))
        layer.mlp.down_proj.weight[:, own.width :] = 0
    return model


def stored(model: Any) -> dict[str, Tensor]:
    """The tensors that each layer has."""
    found: dict[str, Tensor] = {}
    for name, values in model.state_dict().items():
        number = name.partition("layers.")[2].partition(".")[0]
        own = LAYERS[int(number)] if number else None
        if own is not None:
            kept = _of_layer(name, values, own)
            if kept is None:
                continue
            values = kept
        found[name] = values.contiguous()
    return found


def _of_layer(name: str, values: Tensor, own: Searched) -> Tensor | None:
    mixes = own.linear or own.group is not None
    if "input_layernorm" in name or ".self_attn." in name:
        if not mixes:
            return None
        if "k_proj" in name or "v_proj" in name:
            assert own.group is not None
            return values.view(_HEADS, _WIDTH, -1)[:: own.group].reshape(-1, _HIDDEN)
        return values
    if not own.width:
        return None
    if "down_proj" in name:
        return values[:, : own.width]
    return values if "norm" in name else values[: own.width]


def folder(model: Any, path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(stored(model), path / "model.safetensors")
    c = model.config
    config = {
        "model_type": "nemotron-nas",
        "block_configs": [own.config() for own in LAYERS],
        "rope_theta": 3000.0,
        "hidden_act": "silu",
        "intermediate_size": None,
        "num_key_value_heads": None,
        "num_hidden_layers": len(LAYERS),
        **{key: getattr(c, key) for key in ("vocab_size", "hidden_size", "num_attention_heads")},
        **{key: getattr(c, key) for key in ("rms_norm_eps", "max_position_embeddings")},
        "tie_word_embeddings": False,
        **changes,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


_NAMES = {
    "self_attn.linear_attn": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}
_TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def gguf(model: Any) -> GgufBytes:
    """As llama.cpp's converter writes it (conversion/deci.py)."""
    file = GgufBytes({"general.architecture": (STRING, "deci")})
    each = {
        "attention.head_count": [_HEADS * (own.linear or own.kv_heads > 0) for own in LAYERS],
        "attention.head_count_kv": [own.kv_heads for own in LAYERS],
        "feed_forward_length": [own.width for own in LAYERS],
    }
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, len(LAYERS)),
        "context_length": (U32, 256),
        "embedding_length": (U32, _HIDDEN),
        "attention.layer_norm_rms_epsilon": (F32, model.config.rms_norm_eps),
        "attention.key_length": (U32, _WIDTH),
        "attention.value_length": (U32, _WIDTH),
        "rope.freq_base": (F32, 3000.0),
        **{key: (ARRAY, (I32, values)) for key, values in each.items()},
    }
    file.metadata |= {f"deci.{key}": value for key, value in facts.items()}
    for name, values in stored(model).items():
        stem = name.removesuffix(".weight").removeprefix("model.")
        if stem in _TOP:
            theirs = _TOP[stem]
        else:
            _, number, own = stem.split(".", 2)
            theirs = f"blk.{number}.{_NAMES[own]}"
            if own.endswith(("q_proj", "k_proj")):
                pairs = values.view(-1, 2, _WIDTH // 2, _HIDDEN)
                values = pairs.transpose(1, 2).reshape(values.shape)
        data = np.ascontiguousarray(values.numpy(), "<f4")
        file.tensors[f"{theirs}.weight"] = (data.shape[::-1], 0, data.tobytes())
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
    ids = prompt(75, 1)
    whole = Paged(loaded).run("a", ids)
    assert (whole - expected_logits(model, ids)).abs().max() <= 1e-4
    for splits in ([7, 30], [16, 32, 70, 71, 72]):
        assert torch.equal(Paged(loaded).run("a", ids, splits), whole)
    batch = Paged(loaded)
    found = [batch.step({"a": ids[:40], "b": ids[:9]})["a"], batch.step({"a": ids[40:]})["a"]]
    assert torch.equal(torch.cat(found), whole)


def test_ranks_have_parts_of_the_layers_that_attend(tmp_path: Path, load: Load) -> None:
    path = save_gguf(tmp_path / "m.gguf", gguf(oracle()))
    expected = Paged(load(open_checkpoint(path))).run("a", prompt(30, 1), [11])

    def work(own: Mesh) -> Tensor:
        model = load(open_checkpoint(path), mesh=own)
        return Paged(model, [1, 1, 2], ranks=2).run("a", prompt(30, 1), [11])

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


def test_answers_are_the_same_together_and_after_hits(tmp_path: Path) -> None:
    path = folder(oracle(), tmp_path / "m")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt(n, n)} for n in (70, 33, 17)]

    def answers(llm: LLM, prompts: list[Any]) -> list[list[int]]:
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, greedy)]

    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "max_model_len": 128}
    with LLM(path, **options, enable_prefix_caching=False) as llm:
        alone = [answers(llm, [one])[0] for one in asked]
    with LLM(path, **options) as llm:
        assert answers(llm, asked) == alone
        assert answers(llm, asked) == alone
        assert llm.get_metrics()["num_prompt_tokens_cached"] >= 64 + 32 + 16


def test_layers_without_attention_keep_nothing(tmp_path: Path, load: Load) -> None:
    config = load(open_checkpoint(folder(oracle(), tmp_path / "m"))).config
    assert [cache.kv_heads for cache in config.caches] == [2, 1, 4]
    assert [config.caches_of(layer) for layer in range(7)] == [(0,), (), (), (), (1,), (), (2,)]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"attention": {"n_heads_in_group": 2}}, "layer 0: expected attention with .* found"),
        ({"attention": {"n_heads_in_group": 0}, "ffn": {"ffn_mult": 1.0}}, "layer 0: expected"),
        (
            {"attention": {"n_heads_in_group": 2, "window_length": 64}, "ffn": {"ffn_mult": 1.0}},
            "layer 0: window_length: expected none, found 64",
        ),
        (
            {"attention": {"n_heads_in_group": 2}, "ffn": {"replace_with_linear": True}},
            "layer 0: ffn replace_with_linear: expected none, found True",
        ),
    ],
)
def test_a_layer_that_is_impossible_or_asks_for_more_is_refused_by_name(
    layer: dict[str, Any], message: str, tmp_path: Path, load: Load
) -> None:
    layers = [layer, *(own.config() for own in LAYERS[1:])]
    path = folder(oracle(), tmp_path / "m", block_configs=layers)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        load(open_checkpoint(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_configs": 3}, "block_configs: expected a list, found 3"),
        (
            {"block_configs": None, "num_key_value_heads_per_layer": [1], "num_key_value_heads": 4}
            | {"intermediate_size": 64},
            "num_key_value_heads_per_layer: expected a list of 7 numbers",
        ),
    ],
)
def test_lists_of_another_length_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path, load: Load
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(open_checkpoint(folder(oracle(), tmp_path / "m", **changes)))
