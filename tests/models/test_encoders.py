"""Models whose tokens see both ways, against transformers: states in float32, to 1e-4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models.conftest import (
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
    "electra": ("electra", {"embedding_size": 64}),
    "distilbert": ("distilbert", {"hidden_dim": 128}),
    "modernbert": ("modernbert", {"local_attention": 26, "num_hidden_layers": 7}),
    "modernbert with biases": (
        "modernbert",
        {"local_attention": 12, "attention_bias": True, "mlp_bias": True},
    ),
    "nomic_bert": ("nomic_bert", {}),
    "eurobert": ("eurobert", {"num_key_value_heads": 2}),
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
