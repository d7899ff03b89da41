"""Encoders whose code is beside their weights, against a reference of their formulae in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM
from sdk.loaders.folders.hf_folder import complete_config
from sdk.loaders.open import open_checkpoint
from sdk.models.classifier import classifier_of
from sdk.models.configs.config import ModelConfig
from sdk.models.configs.keys import unknown_keys
from sdk.models.parallel import Mesh
from sdk.quant.errors import AlignmentError, CheckpointError, UnsupportedError
from tests.gguf_encoders import gguf_of_neobert, gguf_of_reference
from tests.gguf_models import save_gguf
from tests.models import reference_encoders as reference
from tests.models.conftest import Paged, Ranks, expected_states, prompt, tiny_encoder

Load = Callable[..., Any]
LENGTHS = {"a": 75, "b": 40, "c": 1, "d": 21}
JINA: dict[str, dict[str, Any]] = {
    "jina v2": {},
    "jina v2 with 6 heads and ReLU": {
        "num_attention_heads": 6,
        "hidden_size": 96,
        "feed_forward_type": "reglu",
    },
    "jina v2 code": {"code": True},
}


def check(model: Any, expected: Callable[[list[int]], torch.Tensor]) -> None:
    """States of texts of several lengths, alone and together."""
    ids = {one: prompt(length, length) for one, length in LENGTHS.items()}
    alone = {one: Paged(model).run(one, tokens) for one, tokens in ids.items()}
    for one, tokens in ids.items():
        wanted = expected(tokens)
        assert 0.5 < wanted.std() < 20, "states must be O(1) for 1e-4 to mean something"
        assert (alone[one] - wanted).abs().max() <= 1e-4
    together = Paged(model).step(ids)
    assert all(torch.equal(together[one], alone[one]) for one in ids)


@pytest.mark.parametrize("name", JINA)
def test_jina_v2_has_the_states_of_its_formulae(name: str, tmp_path: Path, load: Load) -> None:
    config = reference.jina_config(**JINA[name])
    state = reference.jina_state(config)
    checkpoint = open_checkpoint(reference.save(tmp_path / "m", config, state))
    check(load(checkpoint), lambda ids: reference.jina_states(config, state, ids))
    assert checkpoint.unused() == []


@pytest.mark.parametrize("every", [2, 3])
def test_nomic_v2_has_the_states_of_its_formulae(every: int, tmp_path: Path, load: Load) -> None:
    config = reference.nomic_config(moe_every_n_layers=every)
    state = reference.nomic_state(config)
    checkpoint = open_checkpoint(reference.save(tmp_path / "m", config, state))
    check(load(checkpoint), lambda ids: reference.nomic_states(config, state, ids))
    assert checkpoint.unused() == []


def test_neobert_has_the_states_of_its_formulae(tmp_path: Path, load: Load) -> None:
    config = reference.neobert_config()
    state = reference.neobert_state(config)
    checkpoint = open_checkpoint(reference.save(tmp_path / "m", config, state))
    check(load(checkpoint), lambda ids: reference.neobert_states(config, state, ids))
    assert sorted(checkpoint.unused()) == ["decoder.bias", "decoder.weight"]
    with LLM(checkpoint.path, num_threads=1, skip_tokenizer_init=True) as llm:
        assert llm.load_warnings == () and llm.max_model_len == 256


def test_a_neobert_without_its_head_and_with_gate_and_up_apart(tmp_path: Path, load: Load) -> None:
    config = reference.neobert_config()
    state = reference.neobert_state(config)
    stored = {}
    for name, values in state.items():
        own = name.removeprefix("model.")
        if own.endswith("w12.weight"):
            gate, up = values.chunk(2)
            stored[own.replace("w12", "w1")] = gate.contiguous()
            stored[own.replace("w12", "w2")] = up.contiguous()
        elif own != name:
            stored[own] = values
    checkpoint = open_checkpoint(reference.save(tmp_path / "m", config, stored))
    check(load(checkpoint), lambda ids: reference.neobert_states(config, state, ids))
    assert checkpoint.unused() == []


def test_rows_of_a_gguf_file_of_neobert_are_those_of_one_head_after_the_other(
    tmp_path: Path, load: Load
) -> None:
    config = reference.neobert_config()
    state = reference.neobert_state(config)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", gguf_of_neobert(config, state)))
    found = Paged(load(checkpoint)).run("a", prompt(75, 1))
    assert (found - reference.neobert_states(config, state, prompt(75, 1))).abs().max() <= 1e-4
    assert checkpoint.unused() == []
    with LLM(checkpoint.path, num_threads=1, skip_tokenizer_init=True) as llm:
        [warning] = llm.load_warnings
        assert "one head after the other" in warning and "differ from llama.cpp's" in warning


@pytest.mark.parametrize(
    ("code", "apart"),
    [(False, False), (False, True), (True, True)],
    ids=["joined", "apart", "code"],
)
def test_a_gguf_file_of_jina_v2(code: bool, apart: bool, tmp_path: Path, load: Load) -> None:
    config = reference.jina_config(code=code)
    state = reference.jina_state(config)
    file = gguf_of_reference(config, state, apart=apart)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    found = Paged(load(checkpoint)).run("a", prompt(75, 1))
    wanted = reference.jina_states(config, state, prompt(75, 1))
    assert (found - wanted).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_a_gguf_file_of_jina_s_code_model_says_where_gate_is(tmp_path: Path) -> None:
    config = reference.jina_config(code=True)
    file = gguf_of_reference(config, reference.jina_state(config))
    with pytest.raises(UnsupportedError, match=r"ffn_up.weight: expected one tensor for gate and"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_a_gguf_file_of_nomic_v2_lacks_the_bias_of_experts(tmp_path: Path, load: Load) -> None:
    config = reference.nomic_config()
    state = reference.nomic_state(config)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", gguf_of_reference(config, state)))
    found = Paged(load(checkpoint)).run("a", prompt(75, 1))
    biases = [name for name in state if name.endswith("experts.bias")]
    without = {**state, **{name: torch.zeros_like(state[name]) for name in biases}}
    wanted = reference.nomic_states(config, without, prompt(75, 1))
    assert biases and (found - wanted).abs().max() <= 1e-4
    assert checkpoint.unused() == []
    with LLM(tmp_path / "m.gguf", num_threads=1, skip_tokenizer_init=True) as llm:
        [warning] = llm.load_warnings
        assert warning.startswith("the file lacks the bias of each layer's experts")


def test_published_gte_scales_its_angles_by_ntk(tmp_path: Path, load: Load) -> None:
    """As gte-multilingual-base: a base of 20,000 and a factor of 8."""
    oracle = tiny_encoder("gte", type_vocab_size=1)
    oracle.save_pretrained(tmp_path)
    head, theta, factor = 16, 20000.0, 8.0
    powers = torch.arange(0, head, 2).float() / head
    frequencies = 1.0 / (theta * factor) ** powers / factor ** (2 / head)
    oracle.rotary_emb.register_buffer("inv_freq", frequencies, persistent=False)
    config = oracle.config.to_dict()
    del config["rope_parameters"]
    published = {
        **config,
        "architectures": ["NewModel", "NewForTokenClassification"],
        "model_type": "new",
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "pack_qkv": True,
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
        "logn_attention_scale": False,
        "logn_attention_clip1": False,
        "rope_theta": theta,
        "rope_scaling": {"type": "ntk", "factor": factor},
    }
    state = {k: v.contiguous() for k, v in _files(tmp_path).items()}
    folder = reference.save(tmp_path / "m", published, state)
    checkpoint = open_checkpoint(folder)
    assert classifier_of(checkpoint.config) is None  # its first architecture has no head
    check(load(checkpoint), lambda ids: expected_states(oracle, ids))
    unpacked = {}
    for key, values in state.items():
        parts = zip("qkv", values.chunk(3), strict=True) if ".qkv_proj." in key else ()
        split = {key.replace("qkv_proj", f"{n}_proj"): part.contiguous() for n, part in parts}
        unpacked.update(split or {key: values})
    folder = reference.save(tmp_path / "u", {**published, "pack_qkv": False}, unpacked)
    check(load(open_checkpoint(folder)), lambda ids: expected_states(oracle, ids))


def _files(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


GTE = {
    **reference.SIZES,
    "model_type": "new",
    "rope_scaling": {"type": "ntk", "factor": 2.0},
    "num_hidden_layers": 1,
}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GTE, "logn_attention_scale": True}, "logn_attention_scale: expected False, found True"),
        ({**GTE, "layer_norm_type": "rms_norm"}, "layer_norm_type: expected layer_norm, found rms"),
        (
            {**GTE, "position_embedding_type": "absolute"},
            "position_embedding_type: expected rope, found absolute",
        ),
        (
            {**GTE, "rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}},
            "rope_scaling: expected type ntk with a factor above 1 and no mixed_b, found .*0.6",
        ),
        (
            {**GTE, "rope_scaling": {"type": "ntk", "factor": "8"}},
            "rope_scaling: expected type ntk with a factor above 1",
        ),
        (
            {**reference.jina_config(feed_forward_type="original"), "model_type": "jina_bert"},
            "feed_forward_type: expected geglu or reglu, found 'original'",
        ),
        (
            {**reference.jina_config(), "model_type": "jina_bert", "is_decoder": True},
            "is_decoder: expected False, found True",
        ),
        (
            reference.neobert_config(rms_norm=False),
            "rms_norm: expected True, found False: .*neobert",
        ),
        (reference.neobert_config(ngpt=True), "ngpt: expected False, found True"),
        (reference.neobert_config(hidden_act="gelu"), "hidden_act: expected SwiGLU, found gelu"),
        (
            reference.nomic_config(model_type="nomic_bert_moe", num_shared_experts=1),
            "num_shared_experts: expected 0, found 1",
        ),
        (
            reference.nomic_config(model_type="nomic_bert_moe", moe_normalize_expert_weights=True),
            "moe_normalize_expert_weights: expected False, found True",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict(config)


def test_norms_over_all_heads_with_a_mean_are_not_split_over_ranks(
    tmp_path: Path, load: Load
) -> None:
    config = reference.jina_config(code=True)
    folder = reference.save(tmp_path / "m", config, reference.jina_state(config))
    with pytest.raises(
        AlignmentError, match=r"layers.0.self_attn.q_norm: cannot split a LayerNorm"
    ):
        load(open_checkpoint(folder), mesh=Mesh(0, 2, object()))


def _mpnet(folder: Path) -> Path:
    tiny_encoder("mpnet", pad_token_id=1).save_pretrained(folder)
    return folder


def _gte(folder: Path) -> Path:
    tiny_encoder("gte", type_vocab_size=1).save_pretrained(folder)
    return folder


def _jina(folder: Path) -> Path:
    config = reference.jina_config()
    return reference.save(folder, config, reference.jina_state(config))


def _nomic(folder: Path) -> Path:
    config = reference.nomic_config()
    return reference.save(folder, config, reference.nomic_state(config))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("make", [_mpnet, _nomic, _gte, _jina])
def test_two_ranks_have_the_states_of_one(
    make: Callable[[Path], Path], tmp_path: Path, load: Load
) -> None:
    """Biases of heads, of the sum of experts, rows of up before those of gate, slopes."""
    folder, ids = make(tmp_path / "m"), prompt(50, 2)
    alone = load(open_checkpoint(folder))
    expected = Paged(alone).run("a", ids)
    ranks = Ranks(2)

    def work(mesh: Mesh) -> torch.Tensor:
        model = load(open_checkpoint(folder), mesh=mesh)
        kv_heads = mesh.heads(4, 4).kv_count
        return Paged(model, kv_heads=kv_heads).run("a", ids)

    for found in ranks.run(work):
        assert (found - expected).abs().max() <= 2e-5


#: The keys of published configs that matter, or that no other model has.
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[str, int, float, int]]] = {
    "gte-multilingual-base": (
        {
            **reference.SIZES,
            "architectures": ["NewModel", "NewForTokenClassification"],
            "max_position_embeddings": 8192,
            "model_type": "new",
            "pack_qkv": True,
            "position_embedding_type": "rope",
            "rope_scaling": {"factor": 8.0, "type": "ntk"},
            "rope_theta": 20000,
            "layer_norm_type": "layer_norm",
            "logn_attention_clip1": False,
            "logn_attention_scale": False,
            "unpad_inputs": False,
            "use_memory_efficient_attention": False,
            "type_vocab_size": 1,
        },
        ("gte", 8192, 160000.0, 1),
    ),
    "jina-embeddings-v2-base-en": (
        reference.jina_config(model_max_length=8192, attn_implementation="torch"),
        ("jina_bert", 256, 10000.0, 2),
    ),
    "nomic-embed-text-v2-moe": (
        reference.nomic_config(
            add_pooling_layer=False,
            dense_seq_output=True,
            ffn_div=1,
            fused_bias_fc=True,
            parallel_block=False,
            parallel_block_tied_norm=False,
            rotary_scaling_factor=None,
            scale_attn_weights=True,
            use_xentropy=True,
        ),
        ("nomic_bert_moe", 256, 10000.0, 1),
    ),
    "jina-reranker-v2-base-multilingual": (
        {
            **reference.SIZES,
            "architectures": ["XLMRobertaForSequenceClassification"],
            "auto_map": {"AutoConfig": "jinaai/x--configuration.XLMRobertaFlashConfig"},
            "max_position_embeddings": 1026,
            "model_type": "xlm-roberta",
            "pad_token_id": 1,
            "truncation": True,
            "type_vocab_size": 1,
            "use_flash_attn": True,
        },
        ("xlm_roberta_flash", 1024, 10000.0, 1),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_no_key_that_nothing_reads(name: str) -> None:
    published, expected = PUBLISHED[name]
    config = complete_config(dict(published), "config.json")
    assert unknown_keys(config) == []
    found = ModelConfig.from_dict(config)
    theta = found.ropes[0].theta
    assert (found.model_type, found.max_position, theta, found.token_types) == expected
