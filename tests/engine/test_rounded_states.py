"""Snapshots of recurrent states in 16 bits: what is lost, and what is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sdk.engine.plan import StateCopy
from sdk.engine.rank.kv_cache import KVCache
from sdk.quant.caches import StateCache, StatePart, rounded
from sdk.quant.spec import KVSpec

#: A convolution's tail, a head whose rows are long and one whose rows are short, 16 bits already.
PARTS = (
    StatePart("conv", (3, 10)),
    StatePart("delta", (4, 8, 16)),
    StatePart("ssm", (40, 6)),
    StatePart("half", (7,), "bfloat16"),
)


@pytest.fixture
def cache() -> KVCache:
    spec = KVSpec(2, 1, 4, 16, caches=(StateCache(PARTS),) * 2)
    cache = KVCache(spec, 1, num_states=4, num_rounded=3)
    torch.manual_seed(0)
    for layer in cache.layers:
        for part in PARTS:
            layer[part.name][1] = torch.randn(part.shape)
    return cache


def moved(cache: KVCache) -> list[dict[str, torch.Tensor]]:
    """Slot 2 after the state in slot 1 went there through a snapshot."""
    cache.copy([StateCopy(1, 2, out=True), StateCopy(2, 2, out=False)], None)
    return [{part.name: layer[part.name][2] for part in PARTS} for layer in cache.layers]


def test_every_number_keeps_eleven_bits_and_what_has_16_bits_stays(cache: KVCache) -> None:
    for layer, found in zip(cache.layers, moved(cache), strict=True):
        for name, values in found.items():
            exact = layer[name][1]
            assert (values == exact).all() == (name == "half")
            # numbers that are 2^29 times smaller than the largest would lose more
            assert ((values - exact).abs() <= exact.abs() * 2.0**-11).all()


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_a_head_of_any_size_keeps_its_bits(cache: KVCache, size: float) -> None:
    """float16 alone ends at 65504, and below 6e-5 it has fewer bits."""
    delta = cache.layers[0]["delta"][1]
    delta[1] *= size
    found = moved(cache)[0]["delta"]
    assert ((found - delta).abs() <= delta.abs() * 2.0**-11).all()


def test_zeros_stay_zeros_and_what_is_not_a_number_is_not_hidden(cache: KVCache) -> None:
    delta = cache.layers[0]["delta"][1]
    delta[0] = 0.0
    delta[2, 0, 0] = float("nan")
    found = moved(cache)[0]["delta"]
    assert (found[0] == 0).all() and found[2, 0, 0].isnan() and not found[3].isnan().any()


def test_a_snapshot_takes_half_the_bytes_and_its_scales() -> None:
    exact = StateCache((StatePart("delta", (16, 128, 128)),))
    own = rounded(exact)
    assert own.nbytes == exact.nbytes // 2 + 64  # 16 scales of 4 bytes
    assert rounded(StateCache((StatePart("ssm", (40, 6)),))).parts[1].shape == (1,)


@pytest.mark.parametrize("again", [False, True], ids=["left", "read again"])
def test_a_slot_that_is_left_goes_back_after_its_last_copy(
    cache: KVCache, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after all copies: the places of all rounded states would be written beside them."""
    done: list[tuple[str, int]] = []
    rounds, vacate = cache._rounded, cache.vacate
    assert rounds is not None
    save = rounds.save

    def saved(slot: int, place: int) -> None:
        done.append(("saved", slot))
        save(slot, place)

    def vacated(places: Sequence[int], region: int = 0) -> None:
        assert region == 1, "slots of states come after the pages"
        done.extend(("vacated", place) for place in places)
        vacate(places, region)

    monkeypatch.setattr(rounds, "save", saved)
    monkeypatch.setattr(cache, "vacate", vacated)
    copies = [StateCopy(1, 1, out=True), StateCopy(2, 2, out=True), StateCopy(3, 0, out=True)]
    copies = [*copies, StateCopy(1, 0, out=True)] if again else copies
    cache.copy(copies, None, leaving=(1, 2))
    first = [] if again else [("vacated", 1)]
    then = [("saved", 1), ("vacated", 1)] if again else []
    expected = [("saved", 1), *first, ("saved", 2), ("vacated", 2), ("saved", 3), *then]
    assert done == expected
