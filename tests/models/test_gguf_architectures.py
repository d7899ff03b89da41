"""GGUF files of each architecture against transformers, and what llama.cpp refuses or changes.

The files are laid out as llama.cpp's converter of October 2026 writes them; its files of the same
models have the same logits here (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.gguf_metadata import model_metadata
from sdk.models.architecture import gguf_names
from sdk.quant.errors import UnsupportedError
from tests.gguf_models import F32, I32, U32, gguf_of, save_gguf
from tests.models.conftest import Paged, expected_logits, prompt, tiny

Load = Callable[..., Any]
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}
HALF = {"rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 0.5}}
PLAIN = {**ROPE, "tie_word_embeddings": False, "rms_norm_eps": 1e-4}
#: The name in the file: transformers' model, its options, and metadata besides the usual ones.
FILES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, Any]]]] = {
    "gemma": ("gemma", {"tie_word_embeddings": True}, {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}, {}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, {}),
    "chatglm": ("glm", HALF, {"rope.dimension_count": (U32, 8)}),
    "glm4": ("glm4", HALF, {"rope.dimension_count": (U32, 8)}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}, {}),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}, {}),
    "mistral3": ("mistral", {"sliding_window": None}, {}),
    "internlm2": ("llama", {}, {}),
    "xverse": ("llama", {}, {}),
    "exaone": ("llama", {}, {}),
    "pangu-embedded": ("llama", {"attention_bias": True}, {}),
    "command-r": (
        "cohere",
        {"logit_scale": 0.5, "tie_word_embeddings": True, "layer_norm_eps": 1e-4},
        {"logit_scale": (F32, 0.5)},
    ),
    "cohere2": (
        "cohere2",
        {
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-4,
            "sliding_window": 8,
            "num_hidden_layers": 5,
        },
        {"logit_scale": (F32, 0.5), "attention.sliding_window": (U32, 8)},
    ),
    "minicpm": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "attention_multiplier": 0.25,
        },
        {
            "embedding_scale": (F32, 3.0),
            "residual_scale": (F32, 0.5),
            "logit_scale": (F32, 4.0),
        },
    ),
}


def written(name: str) -> tuple[Any, Any]:
    """transformers' model, and the bytes of its file."""
    model_type, options, metadata = FILES[name]
    oracle = tiny(model_type, **{**PLAIN, **options})
    return oracle, gguf_of(oracle, metadata, arch=name)


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_logits_of_transformers(name: str, tmp_path: Path, load: Load) -> None:
    oracle, file = written(name)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    ids = prompt(41, 1)
    found = Paged(load(checkpoint)).run("a", ids, [7, 30])
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    assert checkpoint.unused() == []
    assert name in gguf_names()


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("glm4", {"rope.dimension_sections": (9, (I32, [4, 2, 2, 0]))}, "of a vision model"),
        ("mistral3", {"attention.temperature_scale": (F32, 0.1)}, "temperature_scale: expected 0"),
        ("minicpm", {"logit_scale": (F32, 0.0)}, "minicpm.logit_scale: expected a number"),
        ("smollm3", {"attention.sliding_window_pattern": (U32, 2)}, "pattern: expected 0, found 2"),
    ],
)
def test_what_a_file_asks_for_besides_is_refused_by_name(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, file = written(name)
    file.metadata |= {f"{name}.{key}": value for key, value in metadata.items()}
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_a_window_of_exaone4_is_that_of_64_layers_alone(tmp_path: Path, load: Load) -> None:
    """llama.cpp reads no window of other files, whatever they say."""
    oracle, file = written("exaone4")
    file.metadata["exaone4.attention.sliding_window"] = (U32, 4)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    found = Paged(load(checkpoint)).run("a", prompt(41, 1))
    assert (found - expected_logits(oracle, prompt(41, 1))).abs().max() <= 1e-4
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    options = {**PLAIN, "num_hidden_layers": 64, "layer_types": kinds * 16}
    slides = tiny("exaone4", **options, sliding_window=4)
    file = gguf_of(slides, {"attention.sliding_window": (U32, 4)})
    found = Paged(load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file)))).run(
        "a", prompt(21, 1)
    )
    assert (found - expected_logits(slides, prompt(21, 1))).abs().max() <= 1e-3


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("smollm3", {"no_rope_layers": [1, 1, 0]}),
        ("exaone4", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}),
        ("olmoe", {"norm_topk_prob": True, "num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_a_model_that_a_file_cannot_express_is_not_written(
    model_type: str, options: dict[str, Any]
) -> None:
    config = {**tiny(model_type, **options).config.to_dict(), **options}
    with pytest.raises(UnsupportedError, match=f"{model_type} is written as a GGUF file only"):
        model_metadata(config, "here")
