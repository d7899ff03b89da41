"""An adapter on its way to the ranks, while another one leaves its slot."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch

from sdk.engine.adapter_loader import AdapterLoader
from sdk.engine.executor import Executor
from sdk.engine.rank.adapters import RankAdapters
from sdk.engine.scheduling.adapter_slots import AdapterSlots
from sdk.quant.adapter import Adapter, LowRank


class Model:
    """Instead of :class:`sdk.models.adapters.ModelAdapters`: what is in each slot, by paths."""

    def __init__(self) -> None:
        self.slots: dict[int, list[str]] = {}

    def pack(self, adapter: Adapter) -> list[str]:
        return sorted(adapter.matrices)

    def write(self, slot: int, packed: list[str]) -> None:
        self.slots[slot] = packed

    def clear(self, slot: int) -> None:
        self.slots.pop(slot, None)


class Ranks:
    """An executor of two ranks that only calls functions on them."""

    def __init__(self) -> None:
        self.models = [Model(), Model()]
        self.ranks = [
            SimpleNamespace(rank=index, adapters=RankAdapters(cast(Any, model)))
            for index, model in enumerate(self.models)
        ]

    def on_ranks(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [function(rank, *arguments) for rank in self.ranks]


def source(name: str) -> Any:
    matrix = LowRank(torch.zeros(1, 4), torch.zeros(4, 1))
    read = lambda: Adapter(name, {f"{name}.{part}": matrix for part in "xyz"})  # noqa: E731
    return SimpleNamespace(
        name=name, key=name, nbytes=10, read_bytes=5, lora_request=None, read=read
    )


def test_an_adapter_that_leaves_takes_nothing_from_one_that_is_being_delivered() -> None:
    slots, ranks = AdapterSlots(2, 1000, patience=4), Ranks()
    loader = AdapterLoader(slots, cast(Executor, ranks), lambda: ranks.ranks[0].adapters, 2)

    def load(name: str) -> None:
        slots.load(source(name), pin=False)
        while loader.busy:
            assert loader.advance() == []
            loader.wait(10)

    load("a")
    b = slots.load(source("b"), pin=False)
    assert b is not None
    while not ranks.ranks[1].adapters._parts:  # b's matrices are on rank 1, not yet packed
        assert loader.advance() == []
        loader.wait(10)
    slots.remove("a")
    while loader.busy:
        assert loader.advance() == []
        loader.wait(10)
    assert b.ready
    assert [model.slots for model in ranks.models] == [{b.slot: ["b.x", "b.y", "b.z"]}] * 2
