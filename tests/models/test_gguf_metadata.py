"""Metadata of GGUF files that change results: read as llama.cpp does, or refused by name.

The oracle is transformers' model with the rotation that the metadata describe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf.constants
import numpy as np
import pytest

import sdk
from sdk.loaders.gguf_files.keys import HARMLESS, NEUTRAL, READ, READ_FOR_EXPERTS, SAME
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.gguf_metadata import model_metadata
from sdk.models.architecture import architectures
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import BOOL, F32, STRING, U32, gguf_of, save_gguf
from tests.models.conftest import Paged, expected_logits, prompt, tiny

Load = Callable[..., Any]
PLAIN = {"rope_type": "default", "rope_theta": 3000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 3000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 3000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_KEYS = {
    "rope.scaling.type": (STRING, "yarn"),
    "rope.scaling.factor": (F32, 4.0),
    "rope.scaling.original_context_length": (U32, 32),
}
MSCALE = 0.1 * math.log(4) + 1
#: The metadata, transformers' parameters, and its factor of cos and sin if they cannot say it.
ROTATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], float | None]] = {
    "factor without a type": ({"rope.scaling.factor": (F32, 4.0)}, LINEAR, None),
    "first name of the factor": ({"rope.scale_linear": (F32, 4.0)}, LINEAR, None),
    "newer name wins": (
        {"rope.scale_linear": (F32, 9.0), "rope.scaling.factor": (F32, 4.0)},
        LINEAR,
        None,
    ),
    "type none": (
        {"rope.scaling.type": (STRING, "none"), "rope.scaling.factor": (F32, 4.0)},
        PLAIN,
        None,
    ),
    "attention factor alone": ({"rope.scaling.attn_factor": (F32, 1.25)}, PLAIN, 1.25),
    "attention factor, linear": (
        {"rope.scaling.factor": (F32, 4.0), "rope.scaling.attn_factor": (F32, 1.25)},
        LINEAR,
        1.25,
    ),
    "yarn": (YARN_KEYS, YARN, None),
    "yarn, attention factor": (
        {**YARN_KEYS, "rope.scaling.attn_factor": (F32, 1.25)},
        {**YARN, "attention_factor": 1.25 * MSCALE},
        None,
    ),
    "yarn, ends of the ramp": (
        {
            **YARN_KEYS,
            "rope.scaling.yarn_beta_fast": (F32, 6.0),
            "rope.scaling.yarn_beta_slow": (F32, 2.0),
            "rope.scaling.yarn_attn_factor": (F32, 1.0),
            "rope.scaling.yarn_ext_factor": (F32, 1.0),
        },
        {**YARN, "beta_fast": 6.0, "beta_slow": 2.0},
        None,
    ),
}


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_rotations_are_those_of_the_metadata(
    model_type: str, name: str, tmp_path: Path, load: Load
) -> None:
    metadata, parameters, factor = ROTATIONS[name]
    oracle = tiny(model_type, tie_word_embeddings=False, rope_parameters={**parameters})
    if factor is not None:
        oracle.model.rotary_emb.attention_scaling = factor
    ids = prompt(40, 1)
    path = save_gguf(tmp_path / "m.gguf", gguf_of(oracle, metadata))
    found = Paged(load(open_checkpoint(path))).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4


def test_factors_of_frequencies_have_linear_scaling_and_an_attention_factor_beside_them(
    tmp_path: Path, load: Load
) -> None:
    oracle = tiny("llama", tie_word_embeddings=False, rope_parameters={**PLAIN})
    factors = np.linspace(1, 3, 8, dtype="<f4")
    rope = oracle.model.rotary_emb
    rope.inv_freq = rope.inv_freq / (2.0 * np.float32(1)) / np.array(factors)
    rope.attention_scaling = 1.5
    file = gguf_of(
        oracle, {"rope.scaling.factor": (F32, 2.0), "rope.scaling.attn_factor": (F32, 1.5)}
    )
    file.tensors["rope_freqs.weight"] = ((8,), 0, factors.tobytes())
    ids = prompt(40, 1)
    found = Paged(load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file)))).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4


SLIDING = {
    "gemma2, own base": (
        "gemma2",
        {"rope.freq_base_swa": (F32, 77.0)},
        {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 77.0}},
    ),
    "olmo3, scaled full layers": (
        "olmo3",
        YARN_KEYS,
        {"full_attention": YARN, "sliding_attention": PLAIN},
    ),
    "olmo3, plain": ("olmo3", {}, {"full_attention": PLAIN, "sliding_attention": PLAIN}),
    "olmo3, own base": (
        "olmo3",
        {"rope.freq_base_swa": (F32, 77.0)},
        {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 77.0}},
    ),
    "gemma3, scaled full layers": (
        "gemma3_text",
        {"rope.scaling.factor": (F32, 4.0), "rope.freq_base_swa": (F32, 77.0)},
        {"full_attention": LINEAR, "sliding_attention": {**PLAIN, "rope_theta": 77.0}},
    ),
}


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_layers_rotate_as_the_metadata_say(name: str, tmp_path: Path, load: Load) -> None:
    model_type, metadata, parameters = SLIDING[name]
    options: dict[str, Any] = {"sliding_window": 8, "num_hidden_layers": 4}
    if model_type.startswith("gemma"):
        options["query_pre_attn_scalar"] = 16
    kinds = ["sliding_attention", "full_attention"] * 2
    own = parameters
    if model_type == "gemma2":  # transformers has one rotation; the other one is put in below
        own = parameters["full_attention"]
    oracle = tiny(
        model_type,
        tie_word_embeddings=False,
        layer_types=kinds,
        rope_parameters={key: dict(v) if isinstance(v, dict) else v for key, v in own.items()},
        **options,
    )
    file = gguf_of(
        oracle,
        {
            **metadata,
            "rope.freq_base": (F32, 3000.0),
            "attention.sliding_window": (U32, 8),
            "attention.sliding_window_pattern": (9, (BOOL, [True, False] * 2)),
        },
    )
    if model_type == "gemma2":
        with_local_rope(oracle, 77.0)
    ids = prompt(40, 1)
    found = Paged(load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file)))).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4


def with_local_rope(oracle: Any, theta: float) -> None:
    """Let the sliding layers of a Gemma 2 rotate with another base."""
    width = oracle.config.head_dim
    import torch

    inv_freq = 1.0 / theta ** (torch.arange(0, width, 2) / width)

    def local(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cos, _ = kwargs["position_embeddings"]
        angles = torch.arange(cos.shape[1])[:, None] * inv_freq
        both = torch.cat([angles, angles], -1)[None]
        return args, {**kwargs, "position_embeddings": (both.cos(), both.sin())}

    for layer, kind in zip(oracle.model.layers, oracle.config.layer_types, strict=True):
        if kind == "sliding_attention":
            layer.self_attn.register_forward_pre_hook(local, with_kwargs=True)


REFUSED = {
    "attention.clamp_kqv": ((F32, 8.0), "attention.clamp_kqv: expected 0, found 8.0"),
    "attention.scale": ((F32, 0.5), "attention.scale: expected 0, found 0.5"),
    "logit_scale": ((F32, 0.5), "logit_scale: expected 0, found 0.5"),
    "residual_scale": ((F32, 0.5), "residual_scale"),
    "embedding_scale": ((F32, 2.0), "embedding_scale"),
    "attn_logit_softcapping": ((F32, 30.0), "attn_logit_softcapping"),
    "router_logit_softcapping": ((F32, 30.0), "router_logit_softcapping"),
    "attention.max_alibi_bias": ((F32, 8.0), "attention.max_alibi_bias"),
    "nextn_predict_layers": ((U32, 1), "nextn_predict_layers"),
    "attention.key_length_swa": ((U32, 8), "key_length_swa: expected 16, found 8"),
    "rope.dimension_count_swa": ((U32, 8), "dimension_count_swa: expected 0, found 8"),
    "rope.freq_base_swa": ((F32, 9.0), "freq_base_swa: expected 10000.0, found 9.0"),
    "swiglu_clamp_exp": ((9, (F32, [0.0, 7.0])), "swiglu_clamp_exp: expected 0, found 7.0"),
    "rope.scaling.yarn_ext_factor": ((F32, 0.5), "yarn_ext_factor: expected 0, found 0.5"),
    "rope.scaling.yarn_attn_factor": ((F32, 1.1), "yarn_attn_factor: expected 1, found 1.1"),
    "rope.scaling.yarn_log_multiplier": ((F32, 0.1), "yarn_log_multiplier: expected 0"),
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama", tie_word_embeddings=False)


@pytest.mark.parametrize("key", REFUSED)
def test_metadata_that_ask_for_something_else_are_refused(
    key: str, llama: Any, tmp_path: Path
) -> None:
    value, message = REFUSED[key]
    path = save_gguf(tmp_path / "m.gguf", gguf_of(llama, {key: value}))
    with pytest.raises(UnsupportedError, match=rf"m.gguf: llama\..*{message}"):
        open_checkpoint(path)


def test_other_mistakes_of_rotations_are_named(llama: Any, tmp_path: Path) -> None:
    file = gguf_of(llama, YARN_KEYS)
    file.tensors["rope_freqs.weight"] = ((8,), 0, np.ones(8, "<f4").tobytes())
    with pytest.raises(UnsupportedError, match=r"type is yarn: .*'rope_freqs.weight' beside it"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    file = gguf_of(llama, {"rope.scaling.attn_factor": (F32, -1.0)})
    with pytest.raises(CheckpointError, match=r"attn_factor is -1.0, expected a positive number"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    file = gguf_of(tiny("granite"), {"rope.scaling.finetuned": (BOOL, False)})
    with pytest.raises(UnsupportedError, match=r"granite.rope.scaling.finetuned: expected true"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    file = gguf_of(tiny("granite"), {"rope.scaling.finetuned": (U32, 1)})
    with pytest.raises(CheckpointError, match=r"finetuned is 1, expected true or false"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_metadata_that_nothing_reads_are_reported(llama: Any, tmp_path: Path) -> None:
    file = gguf_of(llama, {"made.up": (U32, 3), "attention.causal": (BOOL, True)})
    with sdk.LLM(
        save_gguf(tmp_path / "m.gguf", file), skip_tokenizer_init=True, max_model_len=64
    ) as llm:
        [warning] = llm.load_warnings
    assert warning == "the metadata: keys that nothing reads have no effect: llama.made.up"


def test_every_key_that_llama_cpp_has_is_accounted_for() -> None:
    """gguf-py's list of keys; a newer release with a new key fails here."""
    source = Path(gguf.constants.__file__).read_text(encoding="utf-8")
    found = set(re.findall(r'"\{arch\}\.([a-z0-9_.]+)"', source))
    known = READ | READ_FOR_EXPERTS | NEUTRAL.keys() | SAME.keys()
    known |= frozenset().union(*HARMLESS.values())
    for own in architectures():
        known |= {*own.gguf.keys} if own.gguf is not None else set()
    assert found - known == set()
    assert len(found) > 100


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_factor": 1.5},
        {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0},
    ],
)
def test_a_written_file_has_the_yarn_of_its_config(
    more: dict[str, float], tmp_path: Path, load: Load
) -> None:
    oracle = tiny("qwen2", tie_word_embeddings=False, rope_parameters={**YARN, **more})
    own, config = "qwen2", oracle.config.to_dict()
    metadata = model_metadata({**config, "head_dim": 16}, "config.json")
    keys = {
        key.removeprefix(f"{own}."): (STRING if isinstance(value, str) else F32, value)
        for key, value in metadata.items()
        if "rope.scaling" in key and "context" not in key
    }
    keys["rope.scaling.original_context_length"] = (U32, 32)
    path = save_gguf(tmp_path / "m.gguf", gguf_of(oracle, keys))
    ids = prompt(40, 1)
    found = Paged(load(open_checkpoint(path))).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
