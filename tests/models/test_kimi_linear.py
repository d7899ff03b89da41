"""Kimi Linear as a folder and as a GGUF file, against transformers.

llama.cpp gave the same logits for the same file (docs/log/models.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdk import LLM
from sdk.loaders.open import open_checkpoint
from sdk.models.configs.config import ModelConfig
from sdk.models.parallel import Mesh
from sdk.quant.caches import AttentionCache, StateCache
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import ARRAY, F32, I32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, expected_logits, prompt, tiny
from tests.same_answers import OPTIONS, answers, check_answers

Load = Callable[..., Any]
OPTIONS_OF_MODEL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "rms_norm_eps": 0.02,  # results of a head may be near 0, and its norm enlarges their rounding
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
}


def oracle() -> Any:
    return tiny("kimi_linear", **OPTIONS_OF_MODEL)


def saved(path: Path) -> Path:
    """As transformers saves it."""
    oracle().save_pretrained(path / "m")
    return path / "m"


def published(path: Path) -> Path:
    """With the names and the config of the published folders."""
    folder = saved(path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    dense = "model.layers.0.block_sparse_moe."
    tensors = {name.replace(dense, "model.layers.0.mlp."): x for name, x in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types"):
        del config[key]
    config["linear_attn_config"] = {
        "full_attn_layers": [2],
        "kda_layers": [1, 3, 4],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    config |= {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
    config |= {"first_k_dense_replace": 1, "rope_theta": 10000.0, "use_grouped_topk": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    **{f"self_attn.forget_gate.f_{part}_proj": f"ssm_f_{part}" for part in "ab"},
    **{f"self_attn.g_{part}_proj": f"ssm_g_{part}" for part in "ab"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
}
_TOP = {
    "lm_head.weight": "output.weight",
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


def _parts(own: str, x: Tensor, *, joined: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer that one of transformers' becomes."""
    stem, _, ending = own.rpartition(".")
    if ending == "A_log":
        yield "ssm_a", -x.exp().reshape(-1, 1)
    elif ending == "dt_bias":
        yield "ssm_dt.bias", x
    elif ending == "e_score_correction_bias":
        yield "exp_probs_b.bias", x
    elif stem == "self_attn.conv1d":
        yield from zip((f"ssm_conv1d_{one}.weight" for one in "qkv"), x.chunk(3), strict=True)
    elif ending == "gate_up_proj":
        both = x.chunk(2, dim=1)
        yield from zip(("ffn_gate_exps.weight", "ffn_up_exps.weight"), both, strict=True)
    elif ending == "down_proj":
        yield "ffn_down_exps.weight", x
    elif stem == "self_attn.kv_b_proj" and not joined:
        keys, values = x.view(4, 24 + 32, 48).split([24, 32], dim=1)
        yield from (("attn_k_b.weight", keys.mT), ("attn_v_b.weight", values))
    else:
        yield f"{_NAMES[stem]}.{ending}", x


def gguf(*, joined: bool = False) -> GgufBytes:
    """As llama.cpp's converter writes it; ``joined``: with one matrix for keys and values."""
    model = oracle()
    c = model.config
    file = GgufBytes({"general.architecture": (STRING, "kimi-linear")})
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, c.num_hidden_layers),
        "context_length": (U32, 4096),
        "embedding_length": (U32, c.hidden_size),
        "feed_forward_length": (U32, c.intermediate_size),
        "vocab_size": (U32, c.vocab_size),
        "attention.layer_norm_rms_epsilon": (F32, c.rms_norm_eps),
        "attention.head_count": (U32, 4),
        "attention.head_count_kv": (ARRAY, (I32, [0, 4 if joined else 1, 0, 0])),
        "attention.kv_lora_rank": (U32, 48),
        "attention.key_length": (U32, 40 if joined else 64),
        "attention.value_length": (U32, 32 if joined else 48),
        "attention.key_length_mla": (U32, 40),
        "attention.value_length_mla": (U32, 32),
        "rope.dimension_count": (U32, 16),
        "ssm.conv_kernel": (U32, 4),
        "kda.head_dim": (U32, 16),
        "leading_dense_block_count": (U32, 1),
        "expert_count": (U32, 6),
        "expert_used_count": (U32, 3),
        "expert_shared_count": (U32, 1),
        "expert_feed_forward_length": (U32, 48),
        "expert_weights_scale": (F32, c.routed_scaling_factor),
        "expert_gating_func": (U32, 2),
    }
    file.metadata |= {f"kimi-linear.{key}": value for key, value in facts.items()}
    for name, x in model.state_dict().items():
        made = [(_TOP[name], x)] if name in _TOP else []
        if not made:
            _, _, layer, own = name.split(".", 3)
            made = [(f"blk.{layer}.{part}", y) for part, y in _parts(own, x, joined=joined)]
        for theirs, values in made:
            data = np.ascontiguousarray(values.float().numpy(), "<f4")
            file.tensors[theirs] = (data.shape[::-1], 0, data.tobytes())
    return file


def _file(path: Path) -> Path:
    return save_gguf(path / "m.gguf", gguf())


KINDS: dict[str, Callable[[Path], Path]] = {
    "saved": saved,
    "published": published,
    "gguf": _file,
    "gguf-joined": lambda path: save_gguf(path / "m.gguf", gguf(joined=True)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_match_however_the_work_is_cut(kind: str, tmp_path: Path, load: Load) -> None:
    checkpoint = open_checkpoint(KINDS[kind](tmp_path))
    model, ids = load(checkpoint), prompt(70, 1)
    whole = Paged(model).run("a", ids)
    assert (whole - expected_logits(oracle(), ids)).abs().max() <= 1e-4
    for splits in ([7, 30], [16, 32, 33, 34, 69]):
        assert torch.equal(Paged(model).run("a", ids, splits), whole)
    assert checkpoint.unused() == []


def test_ranks_divide_the_heads(tmp_path: Path, load: Load) -> None:
    path, ids = saved(tmp_path), prompt(41, 3)
    expected = expected_logits(oracle(), ids)

    def work(own: Mesh) -> Tensor:
        return Paged(load(open_checkpoint(path), mesh=own), ranks=2).run("a", ids, [30])

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


def test_what_layers_keep(tmp_path: Path) -> None:
    model = ModelConfig.from_dict(open_checkpoint(published(tmp_path)).config)
    state, latent, *_ = model.caches
    assert isinstance(state, StateCache) and isinstance(latent, AttentionCache)
    assert [part.shape for part in state.parts] == [(3, 192), (4, 16, 16)]
    assert latent.latent and (latent.key_dim, latent.value_dim) == (64, 48)
    assert not any(rope.rotates for rope in map(model.ropes.__getitem__, model.rope_of_layer))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"mla_use_nope": False}, UnsupportedError, "mla_use_nope"),
        ({"moe_router_activation_func": "softmax"}, UnsupportedError, "moe_router_activation"),
        ({"linear_attn_config": {"head_dim": 16}}, CheckpointError, "num_heads"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = open_checkpoint(published(tmp_path)).config
    with pytest.raises(error, match=message):
        ModelConfig.from_dict({**config, **changed})
    lists = {**config["linear_attn_config"], "kda_layers": [1, 3]}
    with pytest.raises(CheckpointError, match=r"each of the layers 1 to 4 once"):
        ModelConfig.from_dict({**config, "linear_attn_config": lists, "layer_types": None})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["published", "gguf"])
def test_answers_are_the_same_however_requests_run(kind: str, tmp_path: Path) -> None:
    """Alone, together, in chunks, after hits, from a snapshot; packed."""
    path, kept = KINDS[kind](tmp_path), tmp_path / "kept"
    _, turns, again = check_answers(path)
    with LLM(path, **OPTIONS) as llm:
        llm.snapshot({"prompt_token_ids": turns[0]}).save(kept)
    with LLM(path, **OPTIONS) as llm:
        llm.restore(kept)
        assert answers(llm, turns[:1]) == again[:1]
    with LLM(path, **OPTIONS, quantization="int8") as llm:
        assert len(answers(llm, turns[:1])[0]) == 20
