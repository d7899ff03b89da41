"""Models whose layers differ in their heads, share keys or have inputs of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sdk
from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.gguf_metadata import model_metadata
from sdk.models.auto import build_model
from sdk.models.configs.config import ModelConfig
from sdk.models.decoder import Decoder
from sdk.models.parallel import Mesh
from sdk.quant.caches import AttentionCache
from sdk.quant.errors import AlignmentError, CheckpointError, UnsupportedError
from tests.gguf_models import ARRAY, BOOL, F32, I32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import Paged, Ranks, checkpoint_of, expected_logits, prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES, GEMMA4

Load = Callable[..., Any]
SIZES = ("gemma4_text", "gemma4_text-e", "gemma4_text-experts")
#: What llama.cpp's converter calls the tensors of a layer.
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
_WHOLE = {
    "layer_scalar": "layer_output_scale.weight",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}


def _named(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layer, _, own = name.removeprefix("model.layers.").partition(".")
    if own in _WHOLE:
        return f"blk.{layer}.{_WHOLE[own]}"
    stem, _, suffix = own.rpartition(".")
    return f"blk.{layer}.{_NAMES[stem]}.{suffix}"


def gemma4_file(model: Any) -> GgufBytes:
    """The file of a model as llama.cpp's converter writes it."""
    # transformers' config object does not say what differs between layers
    c = SimpleNamespace(**model.config.to_dict())
    layers = c.num_hidden_layers
    slides = [kind == "sliding_attention" for kind in c.layer_types]
    whole = slides.index(False)
    own = [c.per_layer_config.get(str(i), {}) for i in range(layers)]
    heads = [one.get("num_key_value_heads", c.num_key_value_heads) for one in own]
    full = own[whole]["head_dim"]
    shared, width = c.num_kv_shared_layers, c.intermediate_size
    double = [
        2 * width if c.use_double_wide_mlp and i >= layers - shared else width
        for i in range(layers)
    ]
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, layers),
        "context_length": (U32, c.max_position_embeddings),
        "embedding_length": (U32, c.hidden_size),
        "feed_forward_length": (ARRAY, (I32, double)),
        "attention.head_count": (U32, c.num_attention_heads),
        "attention.head_count_kv": (ARRAY, (I32, heads)),
        "attention.key_length": (U32, full),
        "attention.value_length": (U32, full),
        "attention.key_length_swa": (U32, c.head_dim),
        "attention.value_length_swa": (U32, c.head_dim),
        "attention.layer_norm_rms_epsilon": (F32, c.rms_norm_eps),
        "attention.sliding_window": (U32, c.sliding_window),
        "attention.sliding_window_pattern": (ARRAY, (BOOL, slides)),
        "attention.shared_kv_layers": (U32, shared),
        "embedding_length_per_layer_input": (U32, c.hidden_size_per_layer_input),
        "final_logit_softcapping": (F32, c.final_logit_softcapping),
        "rope.dimension_count": (U32, full),
        "rope.dimension_count_swa": (U32, c.head_dim),
        "rope.freq_base": (F32, c.rope_parameters["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": (F32, c.rope_parameters["sliding_attention"]["rope_theta"]),
    }
    if c.enable_moe_block:
        facts["expert_count"] = (U32, c.num_experts)
        facts["expert_used_count"] = (U32, c.top_k_experts)
        facts["expert_feed_forward_length"] = (U32, c.moe_intermediate_size)
    file = GgufBytes({"general.architecture": (STRING, "gemma4")})
    file.metadata |= {f"gemma4.{key}": value for key, value in facts.items()}
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" or name.endswith("inv_freq"):
            continue
        data = np.ascontiguousarray(values.float().numpy(), "<f4")
        file.tensors[_named(name)] = (data.shape[::-1], 0, data.tobytes())
    turning = full // 2 // 4  # a quarter of the pairs
    factors = np.array([1.0] * turning + [1e30] * (full // 2 - turning), "<f4")
    file.tensors["rope_freqs.weight"] = (factors.shape, 0, factors.tobytes())
    return file


@pytest.mark.parametrize("name", SIZES)
def test_a_file_has_the_logits_of_transformers(name: str, tmp_path: Path, load: Load) -> None:
    oracle = tiny("gemma4_text", **ARCHITECTURES[name])
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", gemma4_file(oracle)))
    ids = prompt(41, 1)
    found = Paged(load(checkpoint)).run("a", ids, [7, 30])
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_a_table_of_per_layer_embeddings_may_have_more_rows_than_there_are_tokens(
    load: Load,
) -> None:
    options = {**ARCHITECTURES["gemma4_text-e"], "vocab_size_per_layer_input": 130}
    oracle = tiny("gemma4_text", **options)
    ids = prompt(41, 1)
    found = Paged(load(checkpoint_of(oracle))).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    fewer = tiny("gemma4_text", **{**options, "vocab_size_per_layer_input": 90})
    with pytest.raises(CheckpointError, match=r"per_layer: expected shape \[96, 96\], found \[90"):
        load(checkpoint_of(fewer))


def test_caches_have_the_heads_of_their_layers_and_shared_ones_exist_once() -> None:
    options = {**ARCHITECTURES["gemma4_text-e"], "num_kv_shared_layers": 2}
    config = ModelConfig.from_dict(tiny("gemma4_text", **options).config.to_dict())
    window, whole = AttentionCache(1, 8, 8, 8), AttentionCache(1, 16, 16, None)
    assert config.caches == (window, window, whole, window)
    assert [config.caches_of(i) for i in range(6)] == [(0,), (1,), (2,), (3,), (3,), (2,)]
    assert [config.shares_keys(i) for i in range(6)] == [False] * 4 + [True] * 2
    assert config.layer_widths == (128,) * 4 + (256,) * 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: expected a number of layers after"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers: expected a number of layers after"),
        ({"per_layer_config": {"1": {"num_attention_heads": 2}}}, "per_layer_config: expected"),
        ({"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "a divisor of 4 heads in each"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: expected true or"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    config = {**tiny("gemma4_text", **GEMMA4).config.to_dict(), **changed}
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.value_length_swa", (U32, 16), r"value_length_swa is another, expected key_l"),
        ("attention.shared_kv_layers", (U32, 9), r"shared_kv_layers is 9, expected an integer"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    file = gemma4_file(tiny("gemma4_text", **GEMMA4))
    file.metadata[f"gemma4.{key}"] = value
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_factors_of_frequencies_that_are_no_share_of_a_head_are_refused(tmp_path: Path) -> None:
    file = gemma4_file(tiny("gemma4_text", **GEMMA4))
    factors = np.array([1.0, 2.0, 1e30, 1e30] * 2, "<f4")
    file.tensors["rope_freqs.weight"] = (factors.shape, 0, factors.tobytes())
    with pytest.raises(CheckpointError, match=r"factors of 1, then of 1e30"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_gemma_4_is_not_written_as_a_gguf_file() -> None:
    config = tiny("gemma4_text", **GEMMA4).config.to_dict()
    with pytest.raises(UnsupportedError, match="type gemma4_text cannot be written as GGUF"):
        model_metadata(config, "here")


@pytest.mark.parametrize("name", SIZES)
def test_ranks_have_parts_of_layers_that_differ(name: str, load: Load) -> None:
    """With one key head of the layers that see all tokens both ranks have it."""
    oracle = tiny("gemma4_text", **ARCHITECTURES[name])
    ids, ranks = prompt(41, 1), Ranks(2)
    found = ranks.run(
        lambda mesh: Paged(load(checkpoint_of(oracle), mesh=mesh), kv_heads=1).run("a", ids, [7])
    )
    for logits in found:
        assert (logits - expected_logits(oracle, ids)).abs().max() <= 1e-4


def test_a_stage_needs_the_keys_that_its_layers_read(load: Load) -> None:
    options = {**ARCHITECTURES["gemma4_text-e"], "hidden_size_per_layer_input": 0}
    checkpoint = checkpoint_of(tiny("gemma4_text", **options))
    with pytest.raises(AlignmentError, match="layer 4 of gemma4_text reads the keys of layer 1"):
        load(checkpoint, layers=range(4, 6))


def _greedy(llm: sdk.LLM, prompts: list[list[int]], tokens: int = 24) -> list[list[int]]:
    params = sdk.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    given = [{"prompt_token_ids": ids} for ids in prompts]
    return [list(one.outputs[0].token_ids) for one in llm.generate(given, params)]


@pytest.mark.parametrize("name", SIZES)
def test_answers_are_the_same_alone_together_in_chunks_after_hits_and_preempted(
    name: str, tmp_path: Path
) -> None:
    tiny("gemma4_text", **ARCHITECTURES[name]).save_pretrained(tmp_path)
    check_answers(tmp_path)


def check_answers(path: Path) -> None:
    """Of requests alone, together, after hits, in chunks and preempted."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "compute": "exact",
        "num_threads": 1,
        "max_model_len": 192,
    }
    prompts = [prompt(n, n) for n in (70, 33, 90, 90, 12)]
    with sdk.LLM(path, max_num_seqs=4, **options) as llm:
        alone = [_greedy(llm, [ids])[0] for ids in prompts]
        assert len({tuple(ids) for ids in alone}) > 2
        assert _greedy(llm, prompts) == alone  # after hits, too
        assert llm.get_metrics()["prefix_hits"] > 0
        short = [prompt(n, n) for n in (12, 13, 14, 15)]
        long = [_greedy(llm, [ids], 100)[0] for ids in short]
    options |= {"max_num_batched_tokens": 16, "enable_prefix_caching": False, "max_num_seqs": 4}
    sizes = range(2**15, 2**19, 2**15)
    plans = (sdk.LLM.plan(path, kv_cache_memory_bytes=n, **options).fits for n in sizes)
    least = next(n for n, fits in zip(sizes, plans, strict=True) if fits)
    with sdk.LLM(path, kv_cache_memory_bytes=least, **options) as llm:
        assert _greedy(llm, prompts) == alone
        assert _greedy(llm, short, 100) == long
        assert llm.get_metrics()["num_preemptions"] > 0


def test_embeddings_in_place_of_tokens_are_refused_where_layers_look_tokens_up(
    tmp_path: Path,
) -> None:
    tiny("gemma4_text", **ARCHITECTURES["gemma4_text-e"]).save_pretrained(tmp_path)
    with pytest.raises(sdk.RequestError, match="enable_prompt_embeds: expected False, found True"):
        sdk.LLM(tmp_path, skip_tokenizer_init=True, enable_prompt_embeds=True)


def test_the_table_of_inputs_of_layers_stays_in_its_file(tmp_path: Path) -> None:
    """Its bytes are not in the plan; a step has the same bits as with the table in memory."""
    options = {**ARCHITECTURES["gemma4_text-e"], "hidden_size_per_layer_input": 128}
    oracle = tiny("gemma4_text", **options)
    oracle.save_pretrained(tmp_path / "folder")
    file = save_gguf(tmp_path / "m.gguf", gemma4_file(oracle))
    ids, table = prompt(41, 1), 96 * 6 * 128 * 4
    for path in (tmp_path / "folder", file):
        found = []
        for backends in (None, ("reference",)):
            ops = Ops(compute="exact", num_threads=1, backends=backends)
            checkpoint = open_checkpoint(path)
            model = build_model(checkpoint, Mesh(), ops, max_model_len=64)
            assert isinstance(model, Decoder) and model.inputs is not None
            assert model.inputs.table.nbytes == (0 if backends is None else table)
            checkpoint.close()  # the rows are read through a descriptor of their own
            found.append(model.inputs.table.rows(torch.tensor(ids)))
            assert (Paged(model).run("a", ids) - expected_logits(oracle, ids)).abs().max() <= 1e-4
            ops.close()
        assert torch.equal(*found)
        plan = sdk.LLM.plan(path, max_model_len=64, compute="exact")
        assert plan.weights < sum(p.nbytes for p in oracle.state_dict().values()) - table // 2
