"""Adapters on one rank: packed beside the steps, and exchanged between two of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from sdk.api.errors import OutOfMemoryError, RequestError, SdkError
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.ops import Ops
from sdk.models.adapters import ModelAdapters, PackedAdapter
from sdk.models.decoder import CausalLM
from sdk.quant.adapter import Adapter, LowRank


def rank_adapters(model: CausalLM, ops: Ops, config: RunnerConfig) -> RankAdapters:
    """The slots that the options ask for."""
    name = config.adapter_dtype
    dtype = None if name is None else getattr(torch, name)
    slots = ModelAdapters(model, ops, config.adapter_slots, config.max_adapter_rank, dtype)
    return RankAdapters(slots)


class RankAdapters:
    """The slots of one rank, and an adapter on its way into one."""

    def __init__(self, model: ModelAdapters) -> None:
        self.model = model
        self._parts: dict[str, LowRank] = {}
        self._packed: PackedAdapter | None = None

    def pack(self, adapter: Adapter) -> None:
        """Convert an adapter. May run in a thread, while the model runs steps."""
        self._packed = self.model.pack(adapter)

    def add_parts(self, matrices: Mapping[str, LowRank]) -> None:
        """Matrices of the adapter that :meth:`pack_parts` packs."""
        self._parts |= matrices

    def pack_parts(self, name: str) -> None:
        """Pack the matrices that came so far."""
        parts, self._parts = self._parts, {}
        self.pack(Adapter(name, parts))

    def write(self, slot: int) -> None:
        """Put the packed adapter into a slot, between two steps."""
        packed, self._packed = self._packed, None
        assert packed is not None
        self.model.write(slot, packed)

    def drop(self) -> None:
        """Forget an adapter on its way."""
        self._parts.clear()
        self._packed = None


class AdaptedRank(Protocol):
    """A rank: :class:`sdk.engine.rank.runner.ModelRunner`."""

    @property
    def rank(self) -> int: ...

    adapters: RankAdapters | None


# What executors call on every rank. An exception would end the ranks, so errors are returned.


def features(runner: AdaptedRank) -> dict[str, tuple[tuple[int, int], int]]:
    """See :attr:`sdk.models.adapters.ModelAdapters.features`."""
    return _of(runner).model.features


def learn_elsewhere(
    runner: AdaptedRank, features: Mapping[str, tuple[tuple[int, int], int]]
) -> None:
    """Tell a rank the matrices of all stages."""
    model = _of(runner).model
    own = model.features
    model.elsewhere = {path: found for path, found in features.items() if path not in own}


def clear_slots(runner: AdaptedRank, slots: Iterable[int]) -> None:
    """Empty slots. An adapter on its way to another slot stays."""
    model = _of(runner).model
    for slot in slots:
        model.clear(slot)


def drop_parts(runner: AdaptedRank) -> None:
    """See :meth:`RankAdapters.drop`."""
    _of(runner).drop()


def add_parts(runner: AdaptedRank, matrices: Mapping[str, LowRank]) -> None:
    """See :meth:`RankAdapters.add_parts`. Rank 0 has the whole adapter already."""
    if runner.rank:
        _of(runner).add_parts(matrices)


def pack_parts(runner: AdaptedRank, name: str) -> Exception | None:
    """See :meth:`RankAdapters.pack_parts`; why it failed."""
    if not runner.rank:
        return None
    try:
        _of(runner).pack_parts(name)
    except (SdkError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError
        return error if isinstance(error, SdkError) else OutOfMemoryError(str(error))
    return None


def write_slot(runner: AdaptedRank, slot: int) -> None:
    """See :meth:`RankAdapters.write`."""
    _of(runner).write(slot)


def _of(runner: AdaptedRank) -> RankAdapters:
    if runner.adapters is None:
        raise RequestError("this rank has no adapter slots")
    return runner.adapters
