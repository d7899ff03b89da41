"""Latent attention: matrices of heads in every format, what configs and files must say, limits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from sdk.kernels.weights.layouts import Affine, Float8
from sdk.loaders.open import open_checkpoint
from sdk.models.configs.config import ModelConfig
from sdk.models.head_projection import HeadProjection
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import Weight, weight_of
from tests.gguf_models import F32, STRING, U32, gguf_of, save_gguf
from tests.models.conftest import (
    TINY,
    DictCheckpoint,
    Paged,
    checkpoint_of,
    expected_logits,
    prompt,
    seeded,
    tiny,
)
from tests.models.test_gguf_architectures import LATENT_FACTS
from tests.models.tiny_architectures import LATENT, V3, YARN

Load = Callable[..., Any]
IDS = prompt(41, 1)


def mistral4() -> Any:
    """transformers' auto classes know it as a part of Mistral 3 only."""
    rope = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
    values = {**TINY, **V3, **LATENT, "head_dim": 40, "rope_parameters": rope}
    kind = transformers.models.mistral4.Mistral4ForCausalLM
    config = transformers.AutoConfig.for_model("mistral4", **values)
    return seeded(config, SimpleNamespace(from_config=kind._from_config))


def test_mistral4_scales_queries_by_their_positions(load: Load, tmp_path: Path) -> None:
    oracle = mistral4()
    checkpoint = checkpoint_of(oracle)
    model = load(checkpoint)
    expected = expected_logits(oracle, IDS)
    found = Paged(model).run("a", IDS, [7, 30])
    assert (found - expected).abs().max() <= 1e-4
    assert model.config.query_scale is not None
    assert checkpoint.unused() == []


def _fp8(weight: Weight) -> Weight:
    """Blocks of 16 x 16, whose edges heads of 24 + 32 rows cross."""
    values = weight.dequantize()
    rows, columns = values.shape
    blocks = values.view(rows // 16, 16, columns // 16, 16)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
    return weight_of(Float8(codes, scale, (16, 16)))


def _int4(weight: Weight) -> Weight:
    values = weight.dequantize()
    rows, columns = values.shape
    groups = values.view(rows, columns // 16, 16)
    scale = (groups.abs().amax(dim=2) / 7).half()
    codes = (groups / scale.unsqueeze(2)).round().clamp(-8, 7).view(rows, columns) + 8
    pairs = codes.to(torch.uint8).view(rows, -1, 2)
    packed = pairs[..., 0] | pairs[..., 1] << 4
    zero = torch.full(scale.shape, 8.0).half()
    return weight_of(Affine((rows, columns), 4, 16, packed, scale, zeros=zero))


class _Packed(DictCheckpoint):
    """Matrices of heads in another format than the file's."""

    pack: Callable[[Weight], Weight]

    def weight(self, name: str) -> Weight:
        found = super().weight(name)
        return self.pack(found) if name.endswith("kv_b_proj") else found


@pytest.mark.parametrize(("pack", "form"), [(_fp8, "fp8"), (_int4, "w4a16g16")])
def test_matrices_of_heads_may_be_codes(
    pack: Callable[[Weight], Weight], form: str, load: Load
) -> None:
    """The values' part keeps its codes, that of keys is transposed as 16-bit floats."""
    oracle = tiny("deepseek_v3", **V3, **LATENT)
    plain = checkpoint_of(oracle)
    checkpoint = _Packed(plain.config, plain.tensors)
    checkpoint.pack = pack
    model = load(checkpoint)
    for layer in oracle.model.layers:
        stored = layer.self_attn.kv_b_proj.weight
        with torch.no_grad():
            exact = weight_of(plain.weight("model.layers.0.self_attn.kv_b_proj").layout)
            assert stored.shape == exact.shape
            dense = DictCheckpoint({}, {"x.weight": stored}).weight("x")
            stored.copy_(pack(dense).dequantize())
    expected = expected_logits(oracle, IDS)
    found = Paged(model).run("a", IDS)
    assert (found - expected).abs().max() <= 4e-3 * expected.abs().max()
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))
    heads = {path: one for path, one in model.linears() if isinstance(one, HeadProjection)}
    keys, values = (heads[f"model.layers.0.self_attn.{name}_b_proj"].weight for name in "kv")
    assert str(keys.spec) == "f16"
    assert str(values.spec).startswith(form)


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_that_chooses_all_tokens_changes_nothing(name: str, load: Load) -> None:
    more = {"index_topk": 48, "index_head_dim": 32, "index_n_heads": 2}
    oracle = tiny(name, **V3, **LATENT, **more)
    checkpoint = checkpoint_of(oracle)
    model = load(checkpoint, max_model_len=48)
    assert model.config.max_position == 48
    found = Paged(model).run("a", IDS, [7, 30])
    assert (found - expected_logits(oracle, IDS)).abs().max() <= 1e-4
    assert all(".indexer." in one for one in checkpoint.unused())
    # beyond it the models differ: that is why the context ends there
    longer = prompt(90, 2)
    beyond = Paged(model).run("b", longer)
    assert (beyond - expected_logits(oracle, longer))[60:].abs().max() > 1e-2


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"qk_rope_head_dim": 15}, CheckpointError, "qk_rope_head_dim: expected an even number"),
        ({"kv_lora_rank": 0}, CheckpointError, "kv_lora_rank: expected an integer in 1"),
        ({"topk_method": "noaux_tc"}, UnsupportedError, "topk_method: expected one of greedy, "),
        ({"norm_topk_prob": True}, UnsupportedError, "norm_topk_prob: expected False, found True"),
        ({"rope_interleave": False}, UnsupportedError, "rope_interleave: expected True"),
        ({"scoring_func": "sigmoid"}, UnsupportedError, "scoring_func: expected softmax"),
    ],
)
def test_what_a_config_must_say(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = {**TINY, **V3, **LATENT, "norm_topk_prob": False, "model_type": "deepseek_v2"}
    assert ModelConfig.from_dict(config).latent is not None
    with pytest.raises(error, match=message):
        ModelConfig.from_dict({**config, **changed})


def test_values_are_as_wide_as_heads_where_a_config_says_nothing() -> None:
    config = {**TINY, **LATENT, "model_type": "minicpm3", "v_head_dim": None}
    spec = ModelConfig.from_dict(config).latent
    assert spec is not None
    assert (spec.value, spec.query, spec.key, spec.adjacent_pairs) == (16, 40, 64, False)


def test_a_file_with_yarn_needs_its_multiplier(tmp_path: Path) -> None:
    options = {**LATENT, "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}
    facts = {
        **LATENT_FACTS,
        "rope.scaling.type": (STRING, "yarn"),
        "rope.scaling.factor": (F32, 8.0),
        "rope.scaling.original_context_length": (U32, 32),
    }
    file = gguf_of(tiny("youtu", tie_word_embeddings=False, **options), facts)
    with pytest.raises(
        UnsupportedError, match=r"yarn_log_multiplier: expected a number beside YaRN"
    ):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_a_file_without_a_head_is_refused_by_name(tmp_path: Path, load: Load) -> None:
    options = {**LATENT, "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}
    file = gguf_of(tiny("youtu", tie_word_embeddings=False, **options), LATENT_FACTS)
    shape, kind, data = file.tensors["blk.1.attn_k_b.weight"]
    file.tensors["blk.1.attn_k_b.weight"] = ((*shape[:2], 2), kind, data[: len(data) // 2])
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    with pytest.raises(CheckpointError, match=r"attn_k_b"):
        load(checkpoint)


def test_gate_and_up_of_experts_may_be_one_tensor(tmp_path: Path, load: Load) -> None:
    """As in files of Mistral Small 4."""
    oracle = tiny(
        "deepseek_v3", **V3, **LATENT, rope_parameters={"rope_type": "default", "rope_theta": 3e3}
    )
    facts = {
        **LATENT_FACTS,
        "expert_count": (U32, 6),
        "expert_used_count": (U32, 3),
        "expert_feed_forward_length": (U32, 48),
        "expert_gating_func": (U32, 2),
        "expert_weights_norm": (7, True),
        "expert_weights_scale": (F32, 2.5),
        "expert_group_count": (U32, 3),
        "expert_group_used_count": (U32, 2),
        "expert_shared_count": (U32, 2),
        "leading_dense_block_count": (U32, 1),
    }
    file = gguf_of(oracle, facts)
    for layer in (1, 2):
        (columns, rows, count), kind, gate = file.tensors.pop(f"blk.{layer}.ffn_gate_exps.weight")
        _, _, up = file.tensors.pop(f"blk.{layer}.ffn_up_exps.weight")
        size = len(gate) // count
        parts = (one[i * size : (i + 1) * size] for i in range(count) for one in (gate, up))
        both = ((columns, 2 * rows, count), kind, b"".join(parts))
        file.tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = both
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    found = Paged(load(checkpoint)).run("a", IDS)
    assert (found - expected_logits(oracle, IDS)).abs().max() <= 1e-4
    assert checkpoint.unused() == []
