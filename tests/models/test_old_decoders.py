"""Models whose files have names, joined projections and positions of their own: GPT-2 and others.

Logits of folders are compared in test_model_architectures.py. The GGUF files here are laid out as
llama.cpp's converter of October 2026 writes them; its own files give the same (docs/log.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import sdk
from sdk import LLM, LoRARequest, SamplingParams
from sdk.kernels.reference.decode import decode
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.integer_layers import gptq_tensors
from sdk.loaders.writers.peft_writer import random_adapter_for
from sdk.models.alibi import alibi_slopes
from sdk.models.configs.config import ModelConfig
from sdk.models.configs.score_biases import Alibi
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.methods.integers import round_to_nearest
from sdk.quant.spec import QuantSpec
from tests.gguf_models import BOOL, F32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import (
    Paged,
    Ranks,
    checkpoint_of,
    expected_logits,
    prompt,
    tiny,
)

Load = Callable[..., Any]
GROUPED = {"new_decoder_architecture": True, "num_kv_heads": 2}
_LAYER = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.embed_positions": "position_embd",
    "model.embed_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
}
#: In a file of Falcon-40B the norm of the MLP has the name that the norm of both has in 7B's.
_TWO_NORMS = {"input_layernorm": "attn_norm_2", "post_attention_layernorm": "attn_norm"}
#: The name in the file: transformers' model, its options, metadata besides the usual, other names.
FILES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, Any]], dict[str, str]]] = {
    "gpt2": ("gpt2", {"layer_norm_epsilon": 1e-3}, {}, {}),
    "starcoder": ("gpt_bigcode", {}, {"attention.head_count_kv": (U32, 1)}, {}),
    "gptneox": (
        "gpt_neox",
        {"use_parallel_residual": True, "tie_word_embeddings": False},
        {"rope.dimension_count": (U32, 4), "use_parallel_residual": (BOOL, True)},
        {},
    ),
    "gptneox-sequential": (
        "gpt_neox",
        {"use_parallel_residual": False},
        {"rope.dimension_count": (U32, 4), "use_parallel_residual": (BOOL, False)},
        {},
    ),
    "falcon": ("falcon", {}, {"attention.head_count_kv": (U32, 1)}, {}),
    "falcon-two-norms": ("falcon", GROUPED, {"attention.head_count_kv": (U32, 2)}, _TWO_NORMS),
    "falcon-one-norm": (
        "falcon",
        {**GROUPED, "num_ln_in_parallel_attn": 1},
        {"attention.head_count_kv": (U32, 2)},
        {},
    ),
    "bloom": ("bloom", {}, {}, {}),
    "mpt": ("mpt", {"max_seq_len": 256}, {"attention.max_alibi_bias": (F32, 8.0)}, {}),
}


def written(name: str) -> tuple[Any, GgufBytes]:
    """transformers' model, and the bytes of its file."""
    model_type, options, metadata, names = FILES[name]
    oracle, arch = tiny(model_type, **options), name.partition("-")[0]
    checkpoint = checkpoint_of(oracle)
    c = ModelConfig.from_dict(checkpoint.config)
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, c.num_layers),
        "context_length": (U32, 256),
        "embedding_length": (U32, c.hidden_size),
        "feed_forward_length": (U32, c.intermediate_size),
        "attention.head_count": (U32, c.num_heads),
        "attention.layer_norm_epsilon": (F32, c.norm_eps),
        **metadata,
    }
    file = GgufBytes({"general.architecture": (STRING, arch)})
    file.metadata |= {f"{arch}.{key}": value for key, value in facts.items()}
    for name_, values in checkpoint.tensors.items():
        stem, _, suffix = name_.rpartition(".")
        if stem not in _TOP:
            _, _, layer, own = stem.split(".", 3)
            theirs = f"blk.{layer}.{names.get(own) or _LAYER[own]}"
        else:
            theirs = _TOP[stem]
        data = np.ascontiguousarray(values.float().numpy(), "<f4")
        file.tensors[f"{theirs}.{suffix}"] = (data.shape[::-1], 0, data.tobytes())
    return oracle, file


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_has_the_logits_of_transformers(name: str, tmp_path: Path, load: Load) -> None:
    oracle, file = written(name)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    found = Paged(load(checkpoint)).run("a", prompt(41, 1), [7, 30])
    assert (found - expected_logits(oracle, prompt(41, 1))).abs().max() <= 1e-4
    assert checkpoint.unused() == []
    assert checkpoint.unread_keys == []


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        (
            "mpt",
            {"mpt.attention.max_alibi_bias": (F32, 0.0)},
            "max_alibi_bias: expected 8, found 0",
        ),
        ("mpt", {"mpt.attention.clamp_kqv": (F32, 6.0)}, "clamp_kqv: expected 0, found 6"),
        ("bloom", {"bloom.attention.max_alibi_bias": (F32, 4.0)}, "max_alibi_bias: expected 0"),
    ],
)
def test_what_a_gguf_file_asks_for_besides_is_refused_by_name(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, file = written(name)
    file.metadata |= metadata
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


@pytest.mark.parametrize(
    ("model_type", "changed", "message"),
    [
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights: expected True, found False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx: expected False"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: expected False, found True"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm: expected False"),
        (
            "mpt",
            {"attn_config": {"clip_qkv": 6.0}},
            "attn_config: clip_qkv: expected None, found 6",
        ),
        (
            "mpt",
            {"attn_config": {"alibi": False}},
            "attn_config: alibi: expected True, found False",
        ),
        ("mpt", {"logit_scale": 0.5}, "logit_scale: expected None, found 0.5"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "expected False, found True"),
        (
            "falcon",
            {**GROUPED, "parallel_attn": False},
            "parallel_attn: expected True with new_dec",
        ),
    ],
)
def test_what_a_config_asks_for_besides_is_refused_by_name(
    model_type: str, changed: dict[str, Any], message: str, load: Load
) -> None:
    checkpoint = checkpoint_of(tiny(model_type, num_hidden_layers=1))
    checkpoint.config.update(changed)
    with pytest.raises(UnsupportedError, match=message):
        load(checkpoint)


def test_rows_of_four_ranks_need_a_width_that_they_divide() -> None:
    config = {**tiny("codegen", num_hidden_layers=1).config.to_dict(), "n_embd": 62, "n_head": 2}
    with pytest.raises(CheckpointError, match="hidden_size: expected a multiple of 4, found 62"):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize("key", ["n_embd", "n_head", "n_layer", "n_positions", "n_inner"])
@pytest.mark.parametrize("value", ["x", [3], -1])
def test_a_wrong_number_is_an_error_by_our_name(key: str, value: object) -> None:
    config = {**tiny("gpt2", num_hidden_layers=1).config.to_dict(), key: value}
    names = {"n_embd": "hidden_size|num_attention_heads", "n_head": "num_attention_heads"}
    names |= {"n_layer": "num_hidden_layers", "n_positions": "max_position", "n_inner": "intermedi"}
    with pytest.raises(CheckpointError, match=names[key]):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "gpt_neox", "opt"])
def test_a_body_saved_alone_is_the_same_model(model_type: str, tmp_path: Path, load: Load) -> None:
    oracle = tiny(model_type, tie_word_embeddings=True, use_parallel_residual=True, ffn_dim=96)
    oracle.base_model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    found = Paged(load(checkpoint)).run("a", prompt(20, 1))
    assert (found - expected_logits(oracle, prompt(20, 1))).abs().max() <= 1e-4
    assert checkpoint.unused() == []


@pytest.mark.slow  # 4 s; logits are compared in test_model_architectures.py
def test_a_post_norm_decoder_answers_the_same_however_the_work_is_cut(tmp_path: Path) -> None:
    """OPT-350m: recorded steps, batches, chunks, prefix hits and drafts; packed weights."""
    tiny("opt", ffn_dim=96, word_embed_proj_dim=32, do_layer_norm_before=False).save_pretrained(
        tmp_path
    )
    ids = [prompt(40 + 3 * i, i % 2) for i in range(4)]
    params = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True)
    options = {"skip_tokenizer_init": True, "max_model_len": 128, "num_threads": 1}
    found = []
    for more in (
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": False},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"quantization": "rtn-w8s"},
        {"quantization": "rtn-w8s", "max_num_seqs": 1},
    ):
        with LLM(tmp_path, **options, **more) as llm:
            llm.generate({"prompt_token_ids": ids[0]}, params)  # the next one has a hit
            outputs = llm.generate([{"prompt_token_ids": one} for one in ids], params)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] == found[2] and found[3] == found[4]
    assert len({tuple(one) for one in found[0]}) > 1


def test_causal_masks_in_a_file_are_no_leftovers_and_other_tensors_are(tmp_path: Path) -> None:
    tiny("gpt2", num_hidden_layers=1).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, path, metadata={"format": "pt"})
    options = {"skip_tokenizer_init": True, "max_model_len": 64}
    with LLM(tmp_path, **options) as llm:
        assert "computed from the config" in llm.load_warnings[0]
    save_file({**tensors, "transformer.h.0.attn.extra": torch.ones(4)}, path)
    with pytest.raises(CheckpointError, match=r"found 'model.layers.0.attn.extra' unused"):
        LLM(tmp_path, **options)


def test_positions_end_with_their_table(tmp_path: Path) -> None:
    tiny("opt", ffn_dim=96, num_hidden_layers=1, max_position_embeddings=40).save_pretrained(
        tmp_path
    )
    with pytest.raises(sdk.RequestError, match="max_model_len: expected at most 40"):
        LLM(tmp_path, skip_tokenizer_init=True, max_model_len=41)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.decoder.embed_positions.weight"
    save_file({**tensors, name: tensors[name][:40].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"embed_positions: expected shape \[42, 64\]"):
        LLM(tmp_path, skip_tokenizer_init=True, max_model_len=40)


def test_given_embeddings_get_positions_too(load: Load) -> None:
    oracle, ids = tiny("gpt2"), prompt(9, 3)
    model = load(checkpoint_of(oracle))
    embedded = model.embed(torch.tensor(ids))
    assert torch.equal(embedded, oracle.get_input_embeddings()(torch.tensor(ids)))
    given = Paged(model).step({"a": embedded})["a"]
    assert torch.equal(given, Paged(model).run("a", ids))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("gpt_neox", {"use_parallel_residual": True}),
        ("falcon", GROUPED),
        ("falcon", {}),
        ("bloom", {}),
    ],
)
def test_ranks_have_the_slopes_and_rows_of_their_heads(
    name: str, options: dict[str, Any], load: Load
) -> None:
    oracle = tiny(name, **options)
    checkpoint, ids = checkpoint_of(oracle), prompt(30, 4)
    expected = expected_logits(oracle, ids)

    def work(mesh: Any) -> torch.Tensor:
        model = load(checkpoint, mesh=mesh)
        return Paged(model, kv_heads=max(1, model.config.num_kv_heads // 2)).run("a", ids, [11])

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


def test_slopes_are_those_of_transformers() -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in (1, 4, 6, 12, 16, 71):
        bias = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0]
        found = torch.from_numpy(alibi_slopes(Alibi(), heads, 0.5))
        torch.testing.assert_close(found, bias[:, 1] - bias[:, 0], rtol=1e-6, atol=0)
        scaled = torch.from_numpy(alibi_slopes(Alibi(scaled=True), heads, 0.5))
        assert torch.equal(scaled, found * 0.5)


@pytest.mark.parametrize("name", ["gpt_neox", "falcon"])
def test_packed_rows_are_put_in_order_as_they_are(name: str, tmp_path: Path, load: Load) -> None:
    """GPTQ of the joined projection in the order of its file: the values of a plain folder."""
    oracle = tiny(name, **{"use_parallel_residual": True, **(GROUPED if name == "falcon" else {})})
    stem = "self_attention" if name == "falcon" else "attention"
    packed: dict[str, torch.Tensor] = {}
    oracle.save_pretrained(tmp_path / "packed")
    with torch.no_grad():
        for module, layer in oracle.named_modules():
            if module.endswith(f"{stem}.query_key_value"):
                made = round_to_nearest(layer.weight, QuantSpec.parse("w4a16g32"))
                packed |= {module + end: tensor for end, tensor in gptq_tensors(made).items()}
                layer.weight.copy_(decode(made))
    oracle.save_pretrained(tmp_path / "plain")
    path = tmp_path / "packed" / "model.safetensors"
    left = {k: v for k, v in load_file(path).items() if not k.endswith("query_key_value.weight")}
    save_file(left | packed, path, metadata={"format": "pt"})
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    settings |= {"sym": False, "checkpoint_format": "gptq_v2"}
    config = json.loads((path.parent / "config.json").read_text())
    config["quantization_config"] = settings
    (path.parent / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(path.parent)
    key = "model.layers.1.self_attn.qkv_proj"
    weight = checkpoint.weight(key)
    assert weight.spec.bits == 4
    plain = open_checkpoint(tmp_path / "plain").weight(key).dequantize()
    torch.testing.assert_close(weight.dequantize(), plain, rtol=1e-3, atol=1e-5)  # scales: float16
    found = Paged(load(checkpoint)).run("a", prompt(20, 1))
    expected = expected_logits(oracle, prompt(20, 1))
    assert (found - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "falcon"])
def test_an_adapter_of_peft_has_the_names_and_rows_of_its_model(name: str, tmp_path: Path) -> None:
    oracle = tiny(name, **{"use_parallel_residual": True, **(GROUPED if name == "falcon" else {})})
    oracle.save_pretrained(tmp_path / "model")
    folder = random_adapter_for(tmp_path / "model", tmp_path / "adapter", 4, scale=0.5)
    tensors = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model."
    with torch.no_grad():
        for key, a in tensors.items():
            if key.endswith(".lora_A.weight"):
                module = oracle.get_submodule(key[len(prefix) :].removesuffix(".lora_A.weight"))
                change = tensors[key.replace("lora_A", "lora_B")] @ a
                module.weight += change.t() if name == "gpt2" else change
    assert len(tensors) == 2 * 4 * 3
    wanted = expected_logits(oracle, prompt(20, 1))[-1].log_softmax(-1)
    with LLM(
        tmp_path / "model",
        skip_tokenizer_init=True,
        enable_lora=True,
        max_model_len=64,
        compute="exact",
    ) as llm:
        parameters = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
        given = {"prompt_token_ids": prompt(20, 1)}
        request = LoRARequest("one", 1, str(folder))
        [output] = llm.generate([given], parameters, lora_request=request)
        found = output.outputs[0].logprobs[0]
    assert max(abs(found[i].logprob - float(wanted[i])) for i in range(96)) < 1e-3


def _xglm(path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A model and its checkpoint, which holds the changed table of sines, too."""
    oracle = tiny("xglm", ffn_dim=96)
    oracle.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_positions.weights"] = change(oracle.model.embed_positions.weights.clone())
    save_file(tensors, path / "model.safetensors")
    return oracle, open_checkpoint(path)


@pytest.mark.parametrize("change", [torch.clone, torch.Tensor.half], ids=["float32", "float16"])
def test_a_file_of_xglm_may_hold_its_sines(change: Any, tmp_path: Path, load: Load) -> None:
    oracle, checkpoint = _xglm(tmp_path, change)
    ids = prompt(40, 1)
    found = Paged(load(checkpoint)).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_other_sines_and_a_padding_among_them_are_refused(tmp_path: Path, load: Load) -> None:
    def changed(table: torch.Tensor) -> torch.Tensor:
        table[9, 5] = 2.0
        return table

    with pytest.raises(CheckpointError, match=r"embed_positions.*found 2 in row 9, column 5"):
        load(_xglm(tmp_path, changed)[1])
    config = {**tiny("xglm", ffn_dim=96).config.to_dict(), "pad_token_id": 2}
    with pytest.raises(CheckpointError, match="pad_token_id: expected at most 1, found 2"):
        ModelConfig.from_dict(config)
