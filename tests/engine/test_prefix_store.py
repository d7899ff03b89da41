"""Pins count their pages, and what had NaN is kept nowhere."""

from __future__ import annotations

import pytest

from sdk.api.errors import OutOfMemoryError, RequestError
from sdk.engine.pages.prefix_store import PrefixStore
from sdk.engine.rank.kv_transfer import StoredKV
from sdk.quant.spec import KVSpec

SPEC = KVSpec(num_layers=1, kv_heads=1, head_dim=8, page_size=4)  # pins do not look into pages
PREFIX = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def small(rig):
    """Six pages of four tokens, and what keeps prefixes in them."""
    built = rig(num_pages=7)
    return built, PrefixStore(built.scheduler, built.runner, SPEC)


def test_a_prefix_that_is_not_there_is_not_pinned(small) -> None:
    rig, kept = small
    assert kept.pin(PREFIX, None) is None
    rig.add("a", [*PREFIX, 9])
    rig.run()
    assert kept.pin(PREFIX, "another salt") is None
    assert kept.pin(PREFIX, None) == kept.pin([*PREFIX, 9], None) == 8
    assert rig.scheduler.prefixes.num_pinned == 2
    rig.scheduler.check()


def test_pins_of_a_prefix_and_of_its_beginning_share_pages(small) -> None:
    rig, kept = small
    rig.add("a", [*PREFIX, 9])
    rig.run()
    assert kept.pin(PREFIX, None) == 8 and kept.pin(PREFIX[:4], None) == 4
    assert rig.scheduler.prefixes.num_pinned == 2
    assert kept.unpin(PREFIX, None) and rig.scheduler.prefixes.num_pinned == 1
    assert kept.unpin(PREFIX[:5], None) and rig.scheduler.prefixes.num_pinned == 0
    rig.scheduler.check()


def test_a_request_counts_the_pinned_pages_it_uses_as_its_own(small) -> None:
    rig, kept = small
    rig.add("a", [*PREFIX, 9])
    rig.run()
    kept.pin(PREFIX, None)
    assert rig.add("b", [*PREFIX, 10], max_tokens=None).max_len == 6 * 4 + 1
    assert rig.add("c", [11] * 9, max_tokens=None).max_len == 4 * 4 + 1
    with pytest.raises(RequestError, match=r"needs 5 KV pages .* 4 are .*: 2 of 6 are pinned"):
        rig.add("d", [12] * 17)
    rig.run()
    rig.assert_answers()


def test_a_pin_is_refused_where_a_running_request_has_pages_of_its_own_for_the_prefix(small):
    """It computed them itself, to score its prompt: the pinned ones are of no use to it."""
    rig, kept = small
    rig.add("a", [*PREFIX, 9], max_tokens=1)
    rig.run()
    scorer = rig.add("b", [*PREFIX, 10], prompt_logprobs=0, max_tokens=12)
    rig.step()
    rig.step()
    assert scorer.uses_prefix_cache  # its prompt has been scored
    with pytest.raises(OutOfMemoryError, match=r"2 of 6 .* request b may need 5 and could get 4"):
        kept.pin(PREFIX, None)
    assert rig.scheduler.prefixes.num_pinned == 0
    rig.run()
    rig.assert_answers()


def test_a_prefix_with_nan_is_forgotten_in_every_tier_and_unpinned(rig) -> None:
    built = rig(num_pages=7, num_swap_pages=8)
    kept = PrefixStore(built.scheduler, built.runner, SPEC)
    swap = built.scheduler.prefixes.swap
    built.add("a", [*PREFIX, 9], max_tokens=1)
    built.run()
    built.add("b", [20 + i for i in range(23)], max_tokens=1)
    built.run()  # threw the prefix out
    failing = built.add("c", [*PREFIX, 10])
    built.step()
    assert failing.num_cached == 8 and swap.loaded == 2
    assert kept.pin(PREFIX, None) == 8
    built.runner.errors = {"c": "NaN"}
    built.step()
    assert failing.finish_reason == "error"
    assert built.scheduler.prefixes.num_pinned == 0
    again = built.add("d", [*PREFIX, 11])
    built.run()
    assert again.num_cached == 0


class _Broken:
    """Ranks that die of the first step."""

    def launch(self, plan):
        raise RuntimeError(f"{len(plan.copies)} copies")


def test_an_interrupted_restore_costs_requests_a_restart_and_no_answer(rig) -> None:
    """Pages were to go down for it; whether they did is not known."""
    built = rig(num_pages=9, kv_bits=(16, 8))
    one = built.add("one", [*range(20, 45)], max_tokens=6)
    built.step()
    kept = PrefixStore(built.scheduler, _Broken(), SPEC)
    with pytest.raises(RuntimeError, match=r"[1-9] copies"):
        kept.restore([*PREFIX, *PREFIX], None, StoredKV(SPEC, (), 2 * len(PREFIX)), pin=False)
    assert one.num_preemptions == 1 and built.pool.match(kept.keys(PREFIX, None)) == []
    built.scheduler.check()
    built.run()
    built.assert_answers()


@pytest.mark.parametrize("swap", [0, 8])
def test_a_pin_of_lowered_pages_outlives_better_ones_that_a_floor_asked_for(rig, swap) -> None:
    """Computed again, or from the swap space: they are that request's alone."""
    built = rig(num_pages=9, kv_bits=(16, 8), num_swap_pages=swap, max_num_seqs=2)
    kept = PrefixStore(built.scheduler, built.runner, SPEC)
    keys, pool = kept.keys(PREFIX, None), built.pool
    built.add("warm", [*PREFIX, 9], max_tokens=1)
    built.run()
    if swap:
        pool.drop_cached()  # as they are
        pool.reset_prefix_cache()
        built.add("again", [*PREFIX, 10], max_tokens=1)
        built.run()
    built.add("other", [20 + i for i in range(26)], max_tokens=1)
    built.run()
    assert [pool.tier(page) for page in pool.match(keys)] == [1, 1]
    assert kept.pin(PREFIX, None) == 8
    for name in ("exact", "as exact"):
        exact = built.add(name, [*PREFIX, 11], max_tokens=1, kv_min_bits=16)
        built.run()
        assert exact.num_cached == swap
        assert [pool.tier(page) for page in pool.match(keys)] == [1, 1]
    built.add("last", [50 + i for i in range(23)], max_tokens=1)
    built.run()
    pool.drop_cached()
    assert len(pool.match(keys)) == 2 and built.scheduler.prefixes.num_pinned == 2
    built.scheduler.check()
    assert kept.unpin(PREFIX, None)
    built.scheduler.check()
    built.assert_answers()
