"""Layers on the host under the kernels of a GPU, interpreted: each of its layouts is moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdk.kernels.gpu.linear import product_one
from sdk.kernels.gpu.shares import Sharing
from sdk.kernels.gpu.tuning import Tuning
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights import host_layers
from sdk.kernels.weights.layouts import Layout
from sdk.kernels.weights.offload import OnHost
from tests.fake_streams import Streams


def _layer(cases: Any, seed: int) -> list[Layout]:
    return [
        cases.blocks(96, 256, "q4_k", seed),
        cases.affine(96, 256, 4, 32, "zeros", seed=seed),
        cases.table(96, 256, 4, 32, seed=seed),
        cases.dense(96, 256, torch.float16, seed=seed),
    ]


@pytest.mark.slow
def test_products_of_every_layout_are_the_same_numbers(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_layers, "CardCopies", Streams)
    layers = [_layer(cases, seed) for seed in range(3)]
    x = cases.activations(2, 256)
    plain = Ops("cpu", backends=["gpu"])
    moved = Ops("cpu", backends=["gpu"], offload=OnHost(1))
    bound = []
    for index, layouts in enumerate(layers):
        with moved.layers.load(index):
            bound.append([moved.linear(layout) for layout in layouts])
    for index, layouts in enumerate(layers):
        with moved.layers.run(index):
            for one, layout in zip(bound[index], layouts, strict=True):
                assert torch.equal(one.matmul(x), plain.linear(layout).matmul(x)), layout
    assert cases.same(bound[1][0].layout(), layers[1][0])
    assert moved.context.offloaded > 2 * 96 * 256


@pytest.mark.slow
def test_the_experts_of_a_layer_are_found_where_they_were_moved(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_layers, "CardCopies", Streams)
    experts = [[cases.blocks(96, 256, "q4_0", 4 * i + j) for j in range(4)] for i in range(3)]
    x, logits = cases.activations(3, 256), cases.activations(3, 4)
    found: list[Any] = []
    wanted: list[Any] = []
    for ops, results in (
        (Ops("cpu", backends=["gpu"], offload=OnHost(0)), found),
        (Ops("cpu", backends=["gpu"]), wanted),
    ):
        groups = []
        for index, layouts in enumerate(experts):
            with ops.layers.load(index):
                groups.append(ops.moe.group([ops.linear(layout) for layout in layouts]))
        routes = ops.moe.route(logits, 2)
        for index, group in enumerate(groups):
            assert group is not None
            with ops.layers.run(index):
                results.append(group.matmul(x, routes, by_token=True))
    assert all(map(torch.equal, found, wanted))


def test_the_first_words_of_weights_that_steps_copy_are_not_loaded_early(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_layers, "CardCopies", Streams)
    layout, x, out = cases.affine(96, 256, 4, 32, "zeros"), torch.zeros(1, 256), torch.zeros(1, 96)
    ops = Ops("cpu", backends=["gpu"], offload=OnHost(1))
    early = []
    for index in range(2):
        with ops.layers.load(index):
            packed = ops.linear(layout).packed
        launch = product_one(packed, x, out, Sharing(), Tuning(programs=4).tiles(packed, 1))
        early.append(launch.constants["EARLY"])
    assert early == [True, False]  # of the layer on the card, of that on the host
