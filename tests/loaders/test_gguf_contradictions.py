"""GGUF files that contradict themselves: named, never a failure of another kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdk.kernels.errors import SdkError
from sdk.loaders.gguf_files.checkpoint import GgufCheckpoint
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError

Save = Callable[..., Path]


# -- files that contradict themselves --------------------------------------------------------------

CONTRADICTIONS: list[tuple[dict[str, tuple[int, Any]], str]] = [
    ({"llama.block_count": (4, 0)}, "block_count is 0, expected an integer from 1 to 512"),
    ({"llama.block_count": (4, 2**31)}, "block_count is 2147483648, expected an integer"),
    ({"llama.block_count": (8, "1")}, "block_count is 1, expected an integer"),
    ({"llama.embedding_length": (10, 2**40)}, "embedding_length is 1099511627776"),
    ({"llama.attention.head_count": (4, 0)}, "head_count is 0"),
    ({"llama.attention.head_count": (4, 5)}, "head_count is 5, expected a divisor of 32"),
    ({"llama.attention.head_count": (9, (4, [4, 4]))}, "an array of 2, expected 1 integers"),
    ({"llama.attention.head_count": (9, (4, [0]))}, "head_count is 0, expected integers from 1"),
    ({"llama.attention.head_count_kv": (4, 3)}, "4 attention heads are not a multiple of 3"),
    ({"llama.attention.head_count_kv": (4, 8)}, "4 attention heads are not a multiple of 8"),
    ({"llama.attention.layer_norm_rms_epsilon": (6, 0.0)}, "rms_norm_eps is 0.0, expected a posi"),
    ({"llama.attention.layer_norm_rms_epsilon": (6, float("nan"))}, "expected a finite number"),
    ({"llama.rope.freq_base": (6, float("inf"))}, "freq_base is inf, expected a finite number"),
    ({"llama.rope.freq_base": (8, "1e4")}, "freq_base is 1e4, expected a finite number"),
    ({"llama.rope.dimension_count": (4, 64)}, "dimension_count is 64, expected an even number"),
    ({"llama.rope.freq_base": (12, 1e300)}, "freq_base is 1e.300, expected a finite number"),
    ({"llama.rope.scaling.type": (4, 1)}, "scaling.type is 1, expected a name"),
    ({"llama.expert_count": (4, 1025)}, "expert_count is 1025, expected an integer from 0 to 1024"),
    ({"llama.rope.scaling.type": (8, "magic")}, "scaling.type is magic, expected none, linear"),
    ({"llama.rope.scaling.type": (8, "longrope")}, "rope_factors_long.weight"),
    ({"llama.rope.scaling.factor": (6, -2.0)}, "factor is -2.0, expected a positive number"),
    ({"general.architecture": (4, 7)}, "general.architecture is 7, expected a name"),
    ({"tokenizer.ggml.eos_token_id": (4, 8)}, "eos_token_id is 8, expected 0 to 7"),
    ({"tokenizer.ggml.bos_token_id": (5, -1)}, "bos_token_id is -1, expected 0 to 7"),
    ({"tokenizer.ggml.tokens": (9, (8, ["a"]))}, "tokens has 1 entries.*has 8 rows"),
    ({"tokenizer.ggml.scores": (9, (6, [0.5] * 7))}, "scores has 7 entries"),
    ({"tokenizer.ggml.token_type": (9, (5, [1] * 9))}, "token_type has 9 entries"),
    ({"tokenizer.ggml.token_type": (4, 1)}, "token_type is not an array"),
]


@pytest.mark.parametrize(("metadata", "message"), CONTRADICTIONS)
def test_impossible_metadata_are_named(
    files: Any, save: Save, metadata: dict[str, tuple[int, Any]], message: str
) -> None:
    model = files.llama()
    model.metadata |= metadata
    path = save(model.build())
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "key", ["block_count", "context_length", "embedding_length", "feed_forward_length",
            "attention.head_count", "attention.layer_norm_rms_epsilon"]
)  # fmt: skip
def test_missing_metadata_are_named(files: Any, save: Save, key: str) -> None:
    model = files.llama()
    del model.metadata[f"llama.{key}"]
    with pytest.raises(CheckpointError, match=f"llama.{key} is missing"):
        open_checkpoint(save(model.build()))


def test_a_missing_architecture_is_named(files: Any, save: Save) -> None:
    model = files.llama()
    del model.metadata["general.architecture"]
    with pytest.raises(CheckpointError, match=r"general.architecture is None"):
        open_checkpoint(save(model.build()))


EXPERTS = {"llama.expert_count": (4, 8), "llama.expert_used_count": (4, 2)}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"general.architecture": (8, "rwkv6")},
            "rwkv6: a decoder with recurrent layers .*, which does not run: its mixers",
        ),
        (
            {"general.architecture": (8, "qwen2"), "qwen2.expert_count": (4, 8)},
            "qwen2 is not supported as a mixture of experts",
        ),
        ({**EXPERTS, "llama.expert_shared_count": (4, 1)}, "expert_shared_count is 1, expected 0"),
        ({**EXPERTS, "llama.expert_gating_func": (4, 2)}, "expert_gating_func is 2, expected 1"),
        (
            {**EXPERTS, "llama.expert_weights_scale": (6, 2.5)},
            r"expert_weights_scale is 2\.5, expected 1",
        ),
        (
            {"llama.attention.value_length": (4, 16)},
            "value_length is 16, expected attention.key_length 8",
        ),
        (
            {"llama.block_count": (4, 2), "llama.attention.head_count_kv": (9, (4, [2, 4]))},
            "head_count_kv differs from layer to layer",
        ),
    ],
)
def test_what_is_sound_but_not_run_is_told_apart(
    files: Any, save: Save, metadata: dict[str, Any], message: str
) -> None:
    model = files.llama()
    model.metadata |= metadata
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(save(model.build()))


def test_a_file_without_an_embedding_is_refused(files: Any, save: Save) -> None:
    model = files.llama()
    del model.tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"token_embd.weight is missing"):
        open_checkpoint(save(model.build()))


def test_shapes_that_disagree_with_the_metadata_are_named(files: Any, save: Save) -> None:
    model = files.llama()
    model.metadata["llama.feed_forward_length"] = (4, 128)
    checkpoint = open_checkpoint(save(model.build()))
    with pytest.raises(
        CheckpointError, match=r"blk.0.ffn_up.weight.*layers.0.mlp.up_proj.*\[128, 32\].*\[64, 32\]"
    ):
        checkpoint.weight("model.layers.0.mlp.up_proj")
    model.metadata["llama.embedding_length"] = (4, 64)
    checkpoint = open_checkpoint(save(model.build()))
    with pytest.raises(CheckpointError, match=r"output_norm.weight.*\[64\].*\[32\]"):
        checkpoint.tensor("model.norm.weight")


def test_rope_factors_must_be_positive_and_fit(files: Any, save: Save) -> None:
    model = files.llama()
    model.tensors["rope_freqs.weight"] = ((4,), 0, np.array([1, 1, 0, 1], "<f4").tobytes())
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight.*not positive"):
        open_checkpoint(save(model.build()))
    model.tensors["rope_freqs.weight"] = ((3,), 0, np.ones(3, "<f4").tobytes())
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight.*\[3\], expected F32 \[4\]"):
        open_checkpoint(save(model.build()))


def test_rows_that_do_not_divide_into_pairs_are_refused(files: Any, save: Save) -> None:
    model = files.llama()
    model.metadata |= {
        "llama.attention.key_length": (4, 9),
        "llama.rope.dimension_count": (4, 8),
    }
    model.tensors["blk.0.attn_q.weight"] = ((32, 36), 0, files.f32(36, 32))
    checkpoint = open_checkpoint(save(model.build()))
    with pytest.raises(
        CheckpointError, match=r"expected a multiple of 8 rows \(4 heads\), found 36"
    ):
        checkpoint.weight("model.layers.0.self_attn.q_proj")


OTHER_TYPES: list[tuple[int, Any]] = [
    (4, 0), (5, -1), (10, 2**64 - 1), (11, -(2**63)), (6, float("nan")), (6, -0.0), (12, 1e300),
    (7, True), (8, ""), (8, "x" * 1000), (9, (4, [])), (9, (4, [1, 2])), (9, (8, ["a", "b"])),
    (9, (9, [(4, [1]), (8, ["a"])])), (9, (6, [0.5] * 8)), (9, (7, [True] * 8)),
]  # fmt: skip
OPTIONAL_KEYS = [
    "split.count", "split.no", "split.tensors.count", "general.alignment", "general.sampling.temp",
    "tokenizer.ggml.scores", "llama.vocab_size", "llama.expert_count", "llama.attention.key_length",
    "llama.attention.value_length", "llama.attention.sliding_window", "llama.rope.freq_base",
    "llama.rope.dimension_count", "llama.rope.scaling.type", "llama.rope.scaling.factor",
    "llama.rope.scaling.original_context_length", "llama.rope.scaling.yarn_beta_fast",
]  # fmt: skip


def test_no_value_of_another_type_fails_in_another_way_than_by_an_error(
    files: Any, save: Save
) -> None:
    keys = [*files.llama().metadata, *OPTIONAL_KEYS]
    read = 0
    for key in keys:
        for value in OTHER_TYPES:
            model = files.llama()
            model.metadata[key] = value
            try:
                files.pull_all(open_checkpoint(save(model.build())))
                read += 1
            except SdkError:
                pass
    assert 0 < read < len(keys) * len(OTHER_TYPES) / 2


def test_no_mutated_file_fails_in_another_way_than_by_an_error(files: Any, save: Save) -> None:
    model = files.llama()
    raw = model.build()
    rng = random.Random(7)
    read = 0
    for _ in range(500):
        mutant = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            mutant[rng.randrange(model.header_size)] = rng.choice(
                (0, 1, 0x7F, 0xFF, rng.randrange(256))
            )
        try:
            checkpoint = GgufCheckpoint(save(bytes(mutant)))
            files.pull_all(checkpoint)
            read += 1
        except SdkError:
            pass
    assert 0 < read < 450
