"""Models whose tokens see both ways, against transformers: states in float32, to 1e-4."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdk.loaders.open import open_checkpoint
from sdk.models.configs.config import ModelConfig
from sdk.models.configs.score_biases import DistanceBuckets
from sdk.models.distance_buckets import bucket_of_distances
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_encoders import FILES, gguf_of_encoder
from tests.gguf_models import BOOL, F32, STRING, U32, gguf_of, save_gguf
from tests.models.conftest import (
    DictCheckpoint,
    Paged,
    checkpoint_of,
    expected_states,
    prompt,
    tiny,
    tiny_encoder,
)

Load = Callable[..., Any]
#: Decoders that a config makes encoders: their name and options.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"is_causal": False, "attention_bias": True}),
    "qwen2": ("qwen2", {"is_causal": False}),
    "qwen3": ("qwen3", {"is_causal": False, "head_dim": 24}),
    "mistral with a window": ("mistral", {"is_causal": False, "sliding_window": 12}),
    "gemma3_text": (
        "gemma3_text",
        {
            "use_bidirectional_attention": True,
            "sliding_window": 19,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3_text by the other key": (
        "gemma3_text",
        {"is_causal": False, "sliding_window": 11, "num_hidden_layers": 7},
    ),
}
#: Encoders: transformers' name and options.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"hidden_act": "gelu"}),
    "bert with another activation": ("bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "roberta": ("roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", {"pad_token_id": 2}),
    "camembert": ("camembert", {"pad_token_id": 1}),
    "data2vec-text": ("data2vec-text", {"pad_token_id": 1}),
    "ernie": ("ernie", {"hidden_act": "relu"}),
    "ernie with the embedding of a task": (
        "ernie",
        {"use_task_id": True, "task_type_vocab_size": 3, "type_vocab_size": 4},
    ),
    "roberta-prelayernorm": ("roberta-prelayernorm", {"pad_token_id": 1}),
    "xlm-roberta-xl": ("xlm-roberta-xl", {"pad_token_id": 1, "type_vocab_size": 1}),
    "roformer": ("roformer", {"embedding_size": 64}),
    "roformer with narrow embeddings": ("roformer", {"embedding_size": 24}),
    "electra": ("electra", {"embedding_size": 64}),
    "electra with narrow embeddings": ("electra", {"embedding_size": 24}),
    "distilbert": ("distilbert", {"hidden_dim": 128}),
    "mpnet": ("mpnet", {"pad_token_id": 1}),
    "modernbert": ("modernbert", {"local_attention": 26, "num_hidden_layers": 7}),
    "modernbert with biases": (
        "modernbert",
        {"local_attention": 12, "attention_bias": True, "mlp_bias": True},
    ),
    "nomic_bert": ("nomic_bert", {}),
    "eurobert": ("eurobert", {"num_key_value_heads": 2}),
    "gte": ("gte", {"type_vocab_size": 1}),
    "gte without token types": (
        "gte",
        {"type_vocab_size": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "jina_embeddings_v3": ("jina_embeddings_v3", {"type_vocab_size": 1}),
}
MODELS = {**DECODERS, **ENCODERS}


def oracle_of(name: str) -> Any:
    kind, options = MODELS[name]
    return tiny(kind, **options) if name in DECODERS else tiny_encoder(kind, **options)


LENGTHS = {"a": 75, "b": 40, "c": 1, "d": 21}


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("name", MODELS)
def test_states_match_transformers_alone_and_in_a_batch(name: str, load: Load) -> None:
    oracle = oracle_of(name)
    model = load(checkpoint_of(oracle))
    ids = {one: prompt(length, length) for one, length in LENGTHS.items()}
    alone = {one: Paged(model).run(one, tokens) for one, tokens in ids.items()}
    for one, tokens in ids.items():
        expected = expected_states(oracle, tokens)
        assert 0.5 < expected.std() < 20, "states must be O(1) for 1e-4 to mean something"
        assert (alone[one] - expected).abs().max() <= 1e-4
    together = Paged(model).step(ids)
    assert all(torch.equal(together[one], alone[one]) for one in ids)


def test_the_biases_of_mpnet_reach_as_far_as_transformers(load: Load) -> None:
    oracle = tiny_encoder("mpnet", pad_token_id=1, num_hidden_layers=2)
    ids = prompt(250, 4)
    found = Paged(load(oracle)).run("a", ids)
    assert (found - expected_states(oracle, ids)).abs().max() <= 1e-4
    distance = torch.arange(-600, 601)
    expected = type(oracle.encoder).relative_position_bucket(distance)
    buckets = torch.from_numpy(bucket_of_distances(DistanceBuckets(32, 128)))
    assert torch.equal(buckets[distance.clamp(-128, 128) + 128], expected)


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_has_the_states_of_transformers(name: str, tmp_path: Path, load: Load) -> None:
    oracle = tiny_encoder(*ENCODERS[name][:1], **ENCODERS[name][1])
    path = save_gguf(tmp_path / "m.gguf", gguf_of_encoder(oracle))
    checkpoint = open_checkpoint(path)
    found = Paged(load(checkpoint)).run("a", prompt(75, 1))
    assert (found - expected_states(oracle, prompt(75, 1))).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_a_head_of_a_gguf_file_whose_activation_is_not_known_is_refused(tmp_path: Path) -> None:
    kind, options = ENCODERS["modernbert"]
    for activation, wanted in (("gelu", None), ("silu", "found silu: the file does not say")):
        file = gguf_of_encoder(tiny_encoder(kind, **options, hidden_activation=activation))
        file.metadata["modern-bert.hidden_activation"] = (STRING, activation)
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file)).close()
        for name, rows in (("cls", 64), ("cls.output", 1)):
            file.tensors[f"{name}.weight"] = ((64, rows), 0, bytes(4 * 64 * rows))
        path = save_gguf(tmp_path / "m.gguf", file)
        if wanted is None:
            open_checkpoint(path).close()
        else:
            with pytest.raises(UnsupportedError, match=wanted):
                open_checkpoint(path)


def test_a_file_of_a_decoder_may_say_that_tokens_see_both_ways(tmp_path: Path, load: Load) -> None:
    oracle = tiny("qwen3", is_causal=False, head_dim=24)
    file = gguf_of(oracle, {"attention.causal": (BOOL, False)})
    found = Paged(load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file)))).run(
        "a", prompt(41, 1)
    )
    assert (found - expected_states(oracle, prompt(41, 1))).abs().max() <= 1e-4


def test_llamas_that_were_trained_to_see_both_ways_have_a_name_of_their_own(
    tmp_path: Path, load: Load
) -> None:
    """NVIDIA's llama-nemotron-embed, whose code changes the mask of a Llama."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    oracle = tiny("llama", is_causal=False, rope_parameters=rope)
    expected = expected_states(oracle, prompt(75, 1))
    checkpoint = checkpoint_of(oracle.model)
    named = {**checkpoint.config, "model_type": "llama_bidirec", "pooling": "avg"}
    found = Paged(load(DictCheckpoint(named, checkpoint.tensors))).run("a", prompt(75, 1))
    assert (found - expected).abs().max() <= 1e-4
    plain = tiny("llama", is_causal=False)
    file = gguf_of(plain, {"attention.causal": (BOOL, False)}, arch="llama-embed")
    found = Paged(load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file)))).run(
        "a", prompt(75, 1)
    )
    assert (found - expected_states(plain, prompt(75, 1))).abs().max() <= 1e-4


def test_a_file_of_embedding_gemma_has_the_window_of_its_config(tmp_path: Path, load: Load) -> None:
    oracle = oracle_of("gemma3_text")
    window = oracle.config.to_dict()["sliding_window"]
    more = {"attention.sliding_window": (U32, window), "rope.freq_base_swa": (F32, 10000.0)}
    file = gguf_of(oracle, more, arch="gemma-embedding")
    found = Paged(load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file)))).run(
        "a", prompt(75, 1)
    )
    assert (found - expected_states(oracle, prompt(75, 1))).abs().max() <= 1e-4


def test_what_a_file_says_of_directions_is_refused_where_it_is_another_model(
    tmp_path: Path,
) -> None:
    file = gguf_of_encoder(tiny_encoder("bert"))
    file.metadata["bert.attention.causal"] = (BOOL, True)
    with pytest.raises(
        UnsupportedError, match=r"bert.attention.causal: expected false, found true"
    ):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    slides = tiny("gemma2", sliding_window=10)
    more = {"attention.sliding_window": (U32, 10), "attention.causal": (BOOL, False)}
    with pytest.raises(
        UnsupportedError, match=r"gemma2.attention.causal: .* with a sliding window"
    ):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", gguf_of(slides, more)))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("electra", {"embedding_size": 0}, "embedding_size: expected an integer in 1"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type: expected"),
        (
            "mpnet",
            {"relative_attention_num_buckets": 64},
            "relative_attention_num_buckets: expected 32, found 64",
        ),
        ("bert", {"is_decoder": True}, "is_decoder: expected False, found True"),
        (
            "xlm-roberta",
            {"lora_adaptations": ["retrieval.query"], "position_embedding_type": "rotary"},
            r"lora_adaptations: expected none, found \['retrieval.query'\]: .*lora_request",
        ),
        ("xlm-roberta", {"pad_token_id": 300}, r"pad_token_id: expected an integer in 0\.\.254"),
        ("modernbert", {"norm_bias": True}, "norm_bias: expected False, found True"),
        ("distilbert", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds: expected False"),
        ("nomic_bert", {"prenorm": True}, "prenorm: expected False, found True"),
        ("nomic_bert", {"moe_every_n_layers": 2}, "moe_every_n_layers: expected 0, found 2"),
        ("bert", {"type_vocab_size": -1}, "type_vocab_size: expected an integer"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    name: str, changes: dict[str, Any], words: str
) -> None:
    config = {**tiny_encoder(*ENCODERS[name][:1], **ENCODERS[name][1]).config.to_dict(), **changes}
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict(config)


def _roformer(path: Path, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """A model and a checkpoint whose table of rotations is changed; ``None``: left out."""
    oracle = oracle_of("roformer")
    oracle.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    [name] = [name for name in tensors if name.endswith("encoder.embed_positions.weight")]
    table = change(tensors.pop(name))
    if table is not None:
        tensors[name] = table.contiguous()
    save_file(tensors, path / "model.safetensors")
    return oracle, open_checkpoint(path)


def _a_little(table: torch.Tensor) -> torch.Tensor:
    table[7, 3] += 0.01
    return table


@pytest.mark.parametrize(
    "change",
    [lambda table: table, lambda table: None, torch.Tensor.half, torch.Tensor.bfloat16],
    ids=["as-saved", "without", "float16", "bfloat16"],
)
def test_a_table_of_the_angles_of_roformer_is_what_is_computed(
    change: Any, tmp_path: Path, load: Load
) -> None:
    oracle, checkpoint = _roformer(tmp_path, change)
    ids = prompt(30, 1)
    found = Paged(load(checkpoint)).run("a", ids)
    assert (found - expected_states(oracle, ids)).abs().max() <= 1e-4
    assert not [name for name in checkpoint.unused() if "embed_positions" in name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_a_little, "expected the sines and cosines .* in row 7, column 3"),
        (torch.zeros_like, "found 0 in row 0"),
        (lambda table: table * torch.nan, "found nan in row 0, column 0"),
        (lambda table: table[:-1], r"expected shape \[256, 16\], found \[255, 16\]"),
    ],
)
def test_another_table_of_angles_is_refused(
    change: Any, words: str, tmp_path: Path, load: Load
) -> None:
    with pytest.raises(CheckpointError, match=f"model.embed_rotations.weight: .*{words}"):
        load(_roformer(tmp_path, change)[1])


def test_a_published_config_of_nomic_has_gpt_2_s_names_for_sizes() -> None:
    published = {
        "model_type": "nomic_bert",
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "n_embd": 64,
        "n_head": 4,
        "n_inner": 128,
        "n_layer": 4,
        "n_positions": 8192,
        "rotary_emb_base": 1000,
        "type_vocab_size": 2,
        "vocab_size": 96,
    }
    found = ModelConfig.from_dict(published)
    sizes = found.hidden_size, found.num_heads, found.intermediate_size, found.num_layers
    assert sizes == (64, 4, 128, 4) and found.max_position == 8192 and found.activation == "silu"
    assert found.ropes[0].theta == 1000.0 and not found.causal
