"""Models whose matrices have columns or rows in another order: the same logits either way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import Dense
from sdk.models.adapters import ModelAdapters
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.models.transformers_code.backend import HFModel
from sdk.quant.permuted import PermutedWeight
from sdk.quant.weight import DenseWeight, StackedWeight, Weight
from tests.models.conftest import (
    DictCheckpoint,
    Paged,
    checkpoint_of,
    expected_logits,
    prompt,
    tiny,
)
from tests.models.test_model_adapters import adapter_for, close, merged, with_slots
from tests.models.test_model_graph import MAX_LEN, Steps


class Shuffled(DictCheckpoint):
    """The columns of every matrix in a random order: one per width, or (``apart``) one each."""

    def __init__(self, model: Any, apart: bool = False) -> None:
        plain = checkpoint_of(model)
        super().__init__(plain.config, plain.tensors)
        self.apart = apart

    def weight(self, name: str) -> Weight:
        values = self._take(f"{name}.weight")
        seed = sum(name.encode()) if self.apart else 0
        random = torch.Generator().manual_seed(seed)
        order = torch.randperm(values.shape[1], generator=random)
        return PermutedWeight(DenseWeight(Dense(values[:, order])), order.int())


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "stablelm"])
def test_the_order_of_columns_changes_no_logits(
    name: str, apart: bool, load: Callable[..., Any]
) -> None:
    oracle = tiny(name)
    ids = prompt(20, 1)
    expected = Paged(load(checkpoint_of(oracle))).run("a", ids)
    model = load(Shuffled(oracle, apart))
    found = Paged(model).run("a", ids)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(Paged(model).run("a", ids, [3, 17]), found)
    if not isinstance(model, HFModel):
        fused = [linear.weight for path, linear in model.linears() if path.endswith("qkv_proj")]
        kind = StackedWeight if apart else PermutedWeight
        assert fused and all(isinstance(weight, kind) for weight in fused)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_replayed_step_has_the_bits_of_an_eager_one(apart: bool, tied: bool) -> None:
    ops = Ops("cpu", num_threads=2)
    model = build_model(
        Shuffled(tiny("llama", tie_word_embeddings=tied), apart), Mesh(), ops, max_model_len=MAX_LEN
    )
    with torch.inference_mode():
        eager, replayed = Steps(model, ops, False), Steps(model, ops, True)
        steps: list[tuple[dict[int, int], list[int]]] = [
            ({0: 40, 1: 20}, [39]),
            ({1: 29, 2: 30}, [28]),
            ({2: 28}, [27]),
        ]
        for counts, outputs in steps:
            expected, found = eager.run(counts, outputs), replayed.run(counts, outputs)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
            assert expected[1].isfinite().all()
    ops.close()


@pytest.mark.parametrize("moved", [True, False])
def test_adjacent_pairs_are_moved_apart_once_or_in_each_step(
    moved: bool, load: Callable[..., Any], ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the weights and biases, or the columns of every product where a layout forbids it."""
    oracle = tiny("glm4", head_dim=24, attention_bias=True)
    if not moved:
        monkeypatch.setattr(DenseWeight, "reordered", lambda self, order: None)
    model = load(checkpoint_of(oracle))
    fused = [linear for path, linear in model.linears() if path.endswith("qkv_proj")]
    assert len(fused) == 3 and all((linear.order is None) is moved for linear in fused)
    ids = prompt(20, 1)
    assert (Paged(model).run("a", ids) - expected_logits(oracle, ids)).abs().max() <= 1e-4
    adapters = ModelAdapters(model, ops, 1)
    names = [path for path in adapters.matrices if path.endswith((".q_proj", ".k_proj", ".v_proj"))]
    adapter = adapter_for(adapters.matrices, names, biased=("k_proj",))
    adapters.write(0, adapters.pack(adapter))
    found = with_slots(ops, Paged(model), ids, [0] * len(ids))
    ops.adapter_slots = None
    assert close(found, Paged(load(merged(checkpoint_of(oracle), adapter))).run("a", ids))


def test_layers_without_a_rotation_have_no_angles(load: Callable[..., Any], ops: Ops) -> None:
    model = load(checkpoint_of(tiny("smollm3", num_hidden_layers=4)))
    sizes = [rope.cos_sin(torch.arange(5), ops)[0].shape for rope in model.ropes]
    assert sizes == [(5, 8), (5, 0)] and [x.mixers[0].rope for x in model.layers] == [0, 0, 0, 1]
