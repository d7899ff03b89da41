"""Rotary embeddings: every scaling transformers knows, inside a Llama and as plain frequencies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdk.kernels.operators.ops import Ops
from sdk.models.configs.config import ModelConfig
from sdk.models.rope import Rope, RopeSpec, inverse_frequencies
from tests.models.conftest import Paged, checkpoint_of, expected_logits, prompt, tiny

CPU = torch.device("cpu")
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.4,
        "truncate": False,
    },
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5},
}


def llama(name: str, **options: Any) -> Any:
    parameters = {"rope_theta": 500.0, **SCALINGS[name]}
    return tiny("llama", rope_parameters=parameters, **options)


@pytest.mark.parametrize("name", SCALINGS)
def test_llama_matches_transformers_with_every_scaling(name: str, load: Callable[..., Any]) -> None:
    oracle = llama(name)
    ids = prompt(61, 4)
    expected = expected_logits(oracle, ids)
    model = load(oracle, max_model_len=64)
    assert (Paged(model).run("a", ids) - expected).abs().max() <= 1e-4
    if name not in ("default", "dynamic"):  # dynamic starts beyond 256 tokens
        checkpoint = checkpoint_of(oracle)
        checkpoint.config["rope_parameters"] = {"rope_theta": 500.0}
        plain = load(checkpoint)
        assert (Paged(plain).run("a", ids) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_far_beyond_the_original_context_are_those_of_transformers(name: str) -> None:
    """Up to position 131,071. Frequencies may differ by one unit of the last place, 2^-24 of them,
    which an angle repeats ``position`` times."""
    oracle = llama(name, max_position_embeddings=2**17)
    ops, positions = Ops(num_threads=1), torch.tensor([0, 33, 4095, 32767, 65536, 2**17 - 1])
    spec = ModelConfig.from_dict(checkpoint_of(oracle).config).ropes[0]
    cos, sin = Rope(spec, 2**17, CPU).cos_sin(positions, ops)
    x = torch.zeros(1, len(positions), oracle.config.hidden_size)
    for found, theirs in zip((cos, sin), oracle.model.rotary_emb(x, positions[None]), strict=True):
        difference = (found - theirs[0, :, : found.shape[1]]).abs()
        assert (difference <= 1e-6 + 2.0**-23 * positions[:, None]).all()


#: The context that each scaling stretches, in tokens, and how far: to the length of the prompt.
ORIGINAL, STRETCH = 32, 32.0
STRETCHED: dict[str, dict[str, Any]] = {
    "linear": {"factor": STRETCH},
    "dynamic": {"factor": STRETCH},
    "yarn": {"factor": STRETCH, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"factor": STRETCH, "original_max_position_embeddings": ORIGINAL},
    "llama3": {"factor": STRETCH, "original_max_position_embeddings": ORIGINAL},
}


@pytest.mark.parametrize("name", STRETCHED)
def test_a_prompt_far_beyond_the_original_context_matches_transformers(
    name: str, load: Callable[..., Any]
) -> None:
    """1,024 tokens where the model knew 32, in chunks; without the scaling they differ."""
    length = ORIGINAL if name == "dynamic" else int(ORIGINAL * STRETCH)
    parameters = {"rope_theta": 500.0, **SCALINGS[name], **STRETCHED[name]}
    oracle = tiny("llama", rope_parameters=parameters, max_position_embeddings=length)
    ids = prompt(int(ORIGINAL * STRETCH), 8)
    expected = expected_logits(oracle, ids)
    model = load(oracle, max_model_len=len(ids))
    found = Paged(model).run("a", ids, [7, 57, 700])
    assert (found - expected).abs().max() <= 1e-4
    checkpoint = checkpoint_of(oracle)
    checkpoint.config["rope_parameters"] = {"rope_theta": 500.0}
    plain = Paged(load(checkpoint, max_model_len=len(ids))).run("a", ids)
    assert (plain - expected)[ORIGINAL:].abs().mean() > 0.1


def test_dynamic_scaling_follows_max_model_len(load: Callable[..., Any]) -> None:
    """transformers rescales at the length of the prompt; we at the length the engine allows."""
    oracle = llama("dynamic", max_position_embeddings=32)
    ids = prompt(60, 5)
    model = load(oracle, max_model_len=60)
    found = Paged(model).run("a", ids, [7, 31, 40])
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4


def test_longrope_takes_the_long_factors_when_the_engine_allows_long_requests(
    load: Callable[..., Any],
) -> None:
    oracle = llama("longrope")
    ids = prompt(90, 6)  # beyond the original 64, where transformers changes over
    expected = expected_logits(oracle, ids)
    found = Paged(load(oracle, max_model_len=256)).run("a", ids, [7, 31, 70])
    assert (found - expected).abs().max() <= 1e-4
    short = Paged(load(oracle, max_model_len=64)).run("a", ids)
    assert (short - expected).abs().max() > 1e-2


def test_phi3_reads_longrope_and_partial_rotation_from_an_old_config(
    load: Callable[..., Any],
) -> None:
    """transformers 4 style: the original length beside the scaling, which is called ``su``."""
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    oracle = tiny(
        "phi3",
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
            **factors,
        },
        original_max_position_embeddings=64,
    )
    checkpoint = checkpoint_of(oracle)
    config = checkpoint.config
    del config["rope_parameters"]
    config.update(
        rope_theta=500.0,
        rope_scaling={"type": "su", **factors},
        partial_rotary_factor=0.5,
        original_max_position_embeddings=64,
    )
    ids = prompt(80, 7)
    found = Paged(load(checkpoint)).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4


def test_freq_factors_divide_the_frequencies() -> None:
    factors = [1.0, 2.0, 4.0, 8.0]
    config = {
        **checkpoint_of(tiny("llama", head_dim=8)).config,
        "rope_parameters": None,
        "rope_theta": 100.0,
        "rope_scaling": {"rope_type": "freq_factors", "factors": factors},
    }
    spec = ModelConfig.from_dict(config).ropes[0]
    plain, _ = inverse_frequencies(RopeSpec(100.0, 8, 64), 64)
    found, scale = inverse_frequencies(spec, 64)
    assert torch.equal(found, plain / torch.tensor(factors))
    assert scale == 1.0


def test_llama3_as_freq_factors_gives_the_same_angles() -> None:
    """What a GGUF file stores of llama-3's scaling is the ratio of the frequencies."""
    scaled = ModelConfig.from_dict(checkpoint_of(llama("llama3")).config).ropes[0]
    plain, _ = inverse_frequencies(RopeSpec(500.0, 16, 256), 256)
    factors = tuple((plain / inverse_frequencies(scaled, 256)[0]).tolist())
    spec = RopeSpec(500.0, 16, 256, type="freq_factors", freq_factors=factors)
    positions = torch.arange(200)
    ops = Ops("cpu", num_threads=1)
    for a, b in zip(
        Rope(spec, 256, CPU).cos_sin(positions, ops),
        Rope(scaled, 256, CPU).cos_sin(positions, ops),
        strict=True,
    ):
        assert (a - b).abs().max() < 1e-4


def test_angles_do_not_depend_on_the_other_positions() -> None:
    """Bitwise: a vectorized cosine must not treat the end of a tensor differently."""
    rope = Rope(RopeSpec(10000.0, 26, 4096), 4096, CPU)
    ops = Ops("cpu", num_threads=1)
    positions = torch.randperm(3000)
    whole = rope.cos_sin(positions, ops)
    for begin, end in [(0, 1), (1, 8), (500, 533), (2999, 3000)]:
        part = rope.cos_sin(positions[begin:end], ops)
        assert torch.equal(part[0], whole[0][begin:end])
        assert torch.equal(part[1], whole[1][begin:end])


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of .*found 'spiral'"):
        inverse_frequencies(RopeSpec(100.0, 8, 64, type="spiral"), 64)
