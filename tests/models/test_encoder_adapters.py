"""Adapters of encoders: the same as adapters merged into the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sdk.kernels.operators.ops import Ops
from sdk.models.adapters import ModelAdapters
from tests.models.conftest import Paged, checkpoint_of, prompt, tiny_encoder
from tests.models.test_model_adapters import adapter_for, close, merged, with_slots

#: Every kind of names and of joined projections.
MODELS: dict[str, dict[str, Any]] = {
    "bert": {},
    "xlm-roberta": {"pad_token_id": 1},
    "electra": {"embedding_size": 24},
    "mpnet": {"pad_token_id": 1},
    "modernbert": {"local_attention": 12},
    "gte": {"type_vocab_size": 1},
    "jina_embeddings_v3": {"type_vocab_size": 1},
    "eurobert": {"num_key_value_heads": 2},
}


@pytest.fixture(autouse=True)
def _no_slots_left(ops: Ops) -> Iterator[None]:
    yield
    ops.adapter_slots = None


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_is_the_same_as_merged_weights(
    name: str, ops: Ops, load: Callable[..., Any]
) -> None:
    checkpoint = checkpoint_of(tiny_encoder(name, **MODELS[name]))
    model = load(checkpoint)
    adapters = ModelAdapters(model, ops, 1)
    names = [path for path in adapters.matrices if f"{path}.weight" in checkpoint.tensors]
    assert "model.embed_tokens" in names and len(names) > 8
    biases = [path for path in names if f"{path}.bias" in checkpoint.tensors]
    adapter = adapter_for(adapters.matrices, names, biased=biases)
    ids = prompt(41, 3)
    plain = Paged(model).run("a", ids)
    adapters.write(0, adapters.pack(adapter))
    found = with_slots(ops, Paged(model), ids, [0] * 41)
    wanted = Paged(load(merged(checkpoint, adapter))).run("a", ids)
    assert close(found, wanted) and not close(found, plain)
    assert torch.equal(with_slots(ops, Paged(model), ids, [-1] * 41), plain)
