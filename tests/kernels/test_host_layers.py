"""Layers whose weights lie in the host's memory: two streams in order, and the same answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk import LLM, SamplingParams
from sdk.kernels import registry
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights import host_layers
from sdk.kernels.weights.host_layers import HostLayers
from sdk.kernels.weights.offload import OnHost
from sdk.loading import load as loading
from tests.fake_streams import Streams


@dataclass(frozen=True)
class Packed:
    """Tensors of several types, and what is not moved: small ones, other values."""

    planes: tuple[Tensor, ...]
    scale: Tensor
    table: Tensor
    name: str = "w"


def _weight(seed: int) -> Packed:
    random = torch.Generator().manual_seed(seed)
    planes = (
        torch.randint(0, 2**31, (40, 64), generator=random).int(),
        torch.randint(0, 255, (40 + seed, 128), generator=random).byte(),
    )
    scale = torch.rand(64, 50, generator=random).half().t()
    return Packed(planes, scale, torch.rand(16, generator=random))


def _values(packed: Packed) -> list[Tensor]:
    return [tensor.clone() for tensor in (*packed.planes, packed.scale, packed.table)]


def _loaded(first: int, count: int) -> tuple[HostLayers, Streams, list[Packed], list[Any]]:
    streams = Streams()
    layers = HostLayers(first, torch.device("cpu"), streams)
    weights, values = [], []
    for index in range(count):
        with layers.load(index):
            for part in range(2):
                weights.append(_weight(10 * index + part))
                values.append(_values(weights[-1]))
                layers.keep(weights[-1])
    return layers, streams, weights, values


def _same(packed: Packed, values: list[Tensor]) -> bool:
    return all(map(torch.equal, (*packed.planes, packed.scale, packed.table), values))


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 5), (2, 3), (2, 7), (4, 6)])
def test_every_layer_has_its_weights_while_it_runs(first: int, count: int) -> None:
    layers, streams, weights, values = _loaded(first, count)
    for step in range(3):
        for index in range(count):
            with layers.run(index):
                assert _same(weights[2 * index], values[2 * index]), (step, index)
                assert _same(weights[2 * index + 1], values[2 * index + 1])
    assert streams.copied == 3 * (count - first)
    assert not streams.waiting


def test_the_next_layer_is_on_its_way_while_one_runs() -> None:
    layers, streams, _, _ = _loaded(1, 6)
    with layers.run(0):
        assert len(streams.waiting) == 2
    with layers.run(1):
        assert len(streams.waiting) == 1
    assert len(streams.waiting) == 2


def test_two_places_are_all_the_memory_on_the_card() -> None:
    _, _, weights, _ = _loaded(2, 8)
    places = {w.planes[0].untyped_storage().data_ptr() for w in weights[4:]}
    assert len(places) == 2
    sizes = {w.planes[0].untyped_storage().nbytes() for w in weights[4:]}
    layer = sum(t.nbytes for w in weights[-2:] for t in (*w.planes, w.scale))
    assert max(sizes) < 1.5 * layer


def test_a_weight_can_be_read_between_steps() -> None:
    layers, _, weights, values = _loaded(1, 6)
    for index in (11, 2, 0, 5):
        with layers.fetched(weights[index]):
            assert _same(weights[index], values[index])


def test_layers_out_of_order_are_refused() -> None:
    layers, _, _, _ = _loaded(1, 3)
    with pytest.raises(KernelError, match="expected layer 3 next, found 5"), layers.load(5):
        pass


def test_products_and_experts_are_the_same_numbers(cases: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(host_layers, "CardCopies", Streams)
    layouts = [cases.blocks(96, 256, "q4_0", seed) for seed in range(8)]
    x, logits = cases.activations(5, 256), cases.activations(5, 4)
    plain = Ops("cpu", backends=["reference"])
    moved = Ops("cpu", backends=["reference"], offload=OnHost(0))
    bound = []
    for index in range(2):
        with moved.layers.load(index):
            bound.append([moved.linear(layout) for layout in layouts[4 * index : 4 * index + 4]])
    assert moved.context.offloaded > sum(layout.nbytes for layout in layouts) * 0.99
    for index in range(2):
        own = layouts[4 * index : 4 * index + 4]
        with moved.layers.run(index):
            for one, layout in zip(bound[index], own, strict=True):
                assert torch.equal(one.matmul(x), plain.linear(layout).matmul(x))
            routes = moved.moe.route(logits, 2)
            assert routes.tokens.numel() == 10
    for index, one in enumerate(bound[1]):
        assert cases.same(one.layout(), layouts[4 + index])


def test_an_engine_with_layers_on_the_host_answers_the_same(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BACKENDS", ("reference",))
    path = golden / "gguf-Q8_0" / "model.gguf"
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "enforce_eager": True}
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5, 9, 30, 31]}, {"prompt_token_ids": [44, 8, 200]}]
    with LLM(path, **options) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    monkeypatch.setattr(host_layers, "CardCopies", Streams)
    monkeypatch.setattr(loading, "_offload_options", lambda *_: {"host_from": 1})
    with LLM(path, **options) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert "offloaded from their device" in llm.load_warnings[-1]
        report = llm.quant_report()
    assert found == wanted
    assert report.layers
