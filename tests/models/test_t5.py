"""The encoders of T5, T5 1.1, mT5 and UMT5, against transformers: states in float32, to 1e-4."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sdk import LLM, RequestError
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import quantized_online
from sdk.models.configs.config import ModelConfig
from sdk.models.configs.score_biases import DistanceBuckets
from sdk.models.distance_buckets import bucket_of_distances
from sdk.quant.errors import CheckpointError
from tests.gguf_encoders import gguf_of_t5
from tests.gguf_models import U32, save_gguf
from tests.models.conftest import Paged, Ranks, expected_states, prompt, seeded

Load = Callable[..., Any]
SIZES = {
    "vocab_size": 96,
    "d_model": 64,
    "d_kv": 24,
    "d_ff": 128,
    "num_layers": 3,
    "num_heads": 4,
}
#: transformers' class of an encoder and options of its config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {}),
    "t5 with other buckets": (
        "T5",
        {"relative_attention_num_buckets": 12, "relative_attention_max_distance": 40},
    ),
    "t5 1.1": ("T5", {"feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 1e-3}),
    "t5 with gated silu": ("T5", {"feed_forward_proj": "gated-silu"}),
    "mt5": ("MT5", {}),
    "umt5": ("UMT5", {}),
}
LENGTHS = {"a": 75, "b": 40, "c": 1, "d": 21}
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "compute": "exact"}


def t5(name: str, kind: str = "EncoderModel", **options: Any) -> Any:
    family, more = MODELS[name]
    found = getattr(transformers, f"{family}{kind}")
    config = found.config_class(**{**SIZES, **more, **options})
    model = seeded(config, SimpleNamespace(from_config=found._from_config))
    with torch.no_grad():  # scores are not scaled: trained queries are that much smaller
        for path, parameter in model.named_parameters():
            if path.endswith("SelfAttention.q.weight"):
                parameter *= SIZES["d_kv"] ** -0.5
    return model


def folder_of(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_states_match_transformers_alone_and_in_a_batch(
    name: str, tmp_path: Path, load: Load
) -> None:
    oracle = t5(name)
    checkpoint = open_checkpoint(folder_of(oracle, tmp_path))
    model = load(checkpoint)
    ids = {one: prompt(length, length) for one, length in LENGTHS.items()}
    alone = {one: Paged(model).run(one, tokens) for one, tokens in ids.items()}
    for one, tokens in ids.items():
        expected = expected_states(oracle, tokens)
        assert 0.5 < expected.std() < 20, "states must be O(1) for 1e-4 to mean something"
        assert (alone[one] - expected).abs().max() <= 1e-4
    together = Paged(model).step(ids)
    assert all(torch.equal(together[one], alone[one]) for one in ids)
    assert checkpoint.unused() == []


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_biases_reach_as_far_as_those_of_transformers(
    name: str, tmp_path: Path, load: Load
) -> None:
    oracle, ids = t5(name, num_layers=2), prompt(250, 4)
    found = Paged(load(open_checkpoint(folder_of(oracle, tmp_path)))).run("a", ids)
    assert (found - expected_states(oracle, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize(("number", "farthest"), [(32, 128), (12, 40), (64, 20), (8, 1000)])
def test_buckets_are_those_of_transformers(number: int, farthest: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-1200, 1201)
    expected = T5Attention._relative_position_bucket(
        distance, bidirectional=True, num_buckets=number, max_distance=farthest
    )
    buckets = torch.from_numpy(bucket_of_distances(DistanceBuckets(number, farthest)))
    assert torch.equal(buckets[distance.clamp(-farthest, farthest) + farthest], expected)


@pytest.mark.parametrize("name", ["t5", "t5 1.1", "umt5"])
def test_a_gguf_file_has_the_states_of_transformers(name: str, tmp_path: Path, load: Load) -> None:
    oracle = t5(name)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", gguf_of_t5(oracle)))
    found = Paged(load(checkpoint)).run("a", prompt(75, 1))
    assert (found - expected_states(oracle, prompt(75, 1))).abs().max() <= 1e-4
    assert checkpoint.unused() == []


@pytest.mark.parametrize("name", ["t5", "t5 1.1", "umt5"])
def test_a_gguf_file_of_a_whole_t5_has_the_states_of_its_encoder(
    name: str, tmp_path: Path, load: Load
) -> None:
    oracle = t5(name, "ForConditionalGeneration")
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", gguf_of_t5(oracle)))
    found = Paged(load(checkpoint)).run("a", prompt(75, 1))
    assert (found - expected_states(oracle.encoder, prompt(75, 1))).abs().max() <= 1e-4
    assert checkpoint.unused() and all(own.startswith("dec.") for own in checkpoint.unused())
    with LLM(checkpoint.path, **OPTIONS) as llm:
        [warning] = llm.load_warnings
        assert "dec.blk.0" in warning and "the encoder makes vectors" in warning


def test_the_plan_knows_that_biases_stay_in_float(tmp_path: Path) -> None:
    """With 32 heads, as in the 3B, a table has rows as wide as those of a matrix that is packed."""
    folder = folder_of(t5("umt5", num_heads=32, d_kv=8), tmp_path)
    entries = quantized_online(open_checkpoint(folder), "int8").entries()
    packed = {one.name for one in entries if one.packed is not None}
    assert len(packed) > 20 and not any("distance_biases" in one for one in packed)


@pytest.mark.parametrize("name", ["t5", "umt5"])
def test_two_ranks_have_the_biases_of_their_heads(name: str, tmp_path: Path, load: Load) -> None:
    oracle, ids = t5(name), prompt(50, 2)
    folder, expected = folder_of(oracle, tmp_path), expected_states(oracle, ids)

    def work(mesh: Any) -> torch.Tensor:
        model = load(open_checkpoint(folder), mesh=mesh)
        return Paged(model, kv_heads=mesh.heads(4, 4).kv_count).run("a", ids)

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["t5 1.1", "umt5"])
def test_vectors_are_the_pooled_states_whatever_the_batch(name: str, tmp_path: Path) -> None:
    oracle = t5(name)
    ids = [prompt(length, length) for length in (3, 30, 77)]
    given = [{"prompt_token_ids": one} for one in ids]
    with LLM(folder_of(oracle, tmp_path), **OPTIONS) as llm:
        assert llm.load_warnings == ()
        found = [one.outputs.data.numpy() for one in llm.encode(given, pooling="mean")]
        alone = [llm.encode(one, pooling="mean")[0].outputs.data.numpy() for one in given]
    for one, own, tokens in zip(found, alone, ids, strict=True):
        wanted = expected_states(oracle, tokens).mean(0).numpy()
        assert np.abs(one - wanted / np.linalg.norm(wanted)).max() <= 1e-5
        assert np.array_equal(one, own)


def test_of_a_whole_t5_the_encoder_runs_and_a_load_says_so(tmp_path: Path) -> None:
    """google/flan-t5-base, for example."""
    oracle, ids = t5("t5 1.1", "ForConditionalGeneration"), prompt(20, 1)
    with LLM(folder_of(oracle, tmp_path), **OPTIONS) as llm:
        [warning] = llm.load_warnings
        assert "decoder.block.0" in warning and "the encoder makes vectors" in warning
        [found] = llm.encode({"prompt_token_ids": ids}, pooling="mean")
        with pytest.raises(RequestError, match="is an encoder"):
            llm.generate({"prompt_token_ids": ids})
    wanted = expected_states(oracle.encoder, ids).mean(0).numpy()
    wanted /= np.linalg.norm(wanted)
    assert np.abs(found.outputs.data.numpy() - wanted).max() <= 1e-5


@pytest.mark.parametrize("name", ["encoder.embed_tokens", "decoder.embed_tokens"])
def test_the_embedding_has_one_of_three_names(name: str, tmp_path: Path, load: Load) -> None:
    oracle, ids = t5("t5"), prompt(20, 1)
    path = folder_of(oracle, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{name}.weight"] = tensors.pop("shared.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    found = Paged(load(open_checkpoint(tmp_path))).run("a", ids)
    assert (found - expected_states(oracle, ids)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"relative_attention_num_buckets": 30}, "num_buckets: expected a multiple of 4, found 30"),
        ({"relative_attention_max_distance": 8}, "max_distance: expected more than 8, a quarter"),
        ({"feed_forward_proj": "swiglu"}, "feed_forward_proj: expected one of .*found 'swiglu'"),
        ({"num_heads": 0}, "num_attention_heads: expected an integer"),
        ({"architectures": ["T5ForTokenClassification"]}, "architectures: expected T5EncoderModel"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    config = {**t5("t5").config.to_dict(), **changes}
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize("found", ["relu", None])
def test_a_umt5_without_a_gate_is_refused(found: str | None) -> None:
    config = {**t5("umt5").config.to_dict(), "feed_forward_proj": found}
    words = rf"feed_forward_proj: expected gated-gelu or another .*found {found!r}"
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict(config)


def test_a_gguf_file_says_how_many_buckets_there_are(tmp_path: Path) -> None:
    file = gguf_of_t5(t5("t5"))
    del file.metadata["t5encoder.attention.relative_buckets_count"]
    with pytest.raises(CheckpointError, match="relative_buckets_count"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    file.metadata["t5encoder.attention.relative_buckets_count"] = (U32, 16)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    with pytest.raises(CheckpointError, match=r"distance_biases.*expected shape \[16, 4\]"):
        LLM(checkpoint.path, **OPTIONS)
