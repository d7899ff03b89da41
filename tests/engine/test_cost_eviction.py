"""Cached pages are evicted by what it saves to keep them, and prefixes lose their ends first."""

from __future__ import annotations

import random

import pytest

from sdk.engine.pages.cost_eviction import CostOrder
from sdk.engine.pages.page_pool import PagePool, page_key, root_digest

SIZE = 4


def keys(tokens: list[int]):
    parent, found = root_digest(None, "auto", None), []
    for start in range(0, len(tokens) - len(tokens) % SIZE, SIZE):
        found.append(page_key(parent, tokens[start : start + SIZE]))
        parent = found[-1].digest
    return found


def run(pool: PagePool, tokens: list[int]) -> int:
    """A request with these tokens comes and goes; returns how many tokens it found."""
    chain = keys(tokens)
    hits = pool.match(chain)
    pages = pool.acquire(hits, len(chain) - len(hits))
    assert pages is not None
    for page, key in zip(pages, chain, strict=True):
        pool.publish(page, key)
    pool.release(pages)
    pool.check()
    return len(hits) * SIZE


def trace(seed: int = 0):
    """A system prompt of 40 pages, used in turn with bursts of one-off prompts, as on a server that
    also summarizes documents. The bursts alone fill the cache."""
    rng = random.Random(seed)
    system = [rng.randrange(1000) for _ in range(40 * SIZE)]
    for burst in range(30):
        for _ in range(6):
            yield system + [rng.randrange(1000) for _ in range(rng.randrange(4, 20))]
        for _ in range(12 if burst % 3 else 0):
            yield [rng.randrange(1000, 2000) for _ in range(10 * SIZE)]


def found_share(eviction: str) -> float:
    pool, found, total = PagePool(101, SIZE, eviction=eviction), 0, 0
    for tokens in trace():
        found += run(pool, tokens)
        total += len(tokens)
    return found / total


def test_a_system_prompt_survives_bursts_that_flush_an_lru_cache():
    """docs/scheduling.md has these numbers."""
    assert found_share("lru") == pytest.approx(0.633, abs=0.001)
    assert found_share("cost") == pytest.approx(0.708, abs=0.001)


def test_what_was_used_often_goes_in_the_end_when_it_is_not_used_any_more():
    pool = PagePool(21, SIZE, eviction="cost")
    old = list(range(5 * SIZE))
    for _ in range(100):
        run(pool, old)
    rng = random.Random(1)
    count = 0
    while pool.match(keys(old)) and count < 200:
        run(pool, [rng.randrange(9999) for _ in range(5 * SIZE)])
        count += 1
    assert 8 < count < 40  # LRU: 4


@pytest.mark.parametrize("seed", range(4))
def test_no_page_is_evicted_before_those_that_come_after_it(seed):
    rng, pool = random.Random(seed), PagePool(60, SIZE, eviction="cost")
    prefixes: list[list[int]] = [[]]
    for _ in range(400):
        prefix = rng.choice(prefixes)
        tokens = prefix + [rng.randrange(50) for _ in range(SIZE * rng.randrange(1, 6))]
        if len(tokens) <= 40 * SIZE:
            run(pool, tokens)
            prefixes = [*prefixes[-12:], tokens]
        known = {key.digest for key in map(pool.key, range(60)) if key is not None}
        root = root_digest(None, "auto", None)
        for key in map(pool.key, range(60)):
            assert key is None or key.parent == root or key.parent in known


def test_a_deeper_page_costs_more_but_never_outlives_the_one_before():
    order = CostOrder(9, 512)
    order.released([1, 2, 3])
    order.released([4])
    for page in (3, 2, 1, 4):
        order[page] = None
    assert [order.popitem()[0] for _ in range(4)] == [4, 3, 2, 1]


def test_the_heap_does_not_grow_with_the_requests():
    pool = PagePool(31, SIZE, eviction="cost")
    for i in range(2000):
        run(pool, list(range(SIZE * 5)) + [i] * SIZE)
    assert len(pool._costs._heap) <= 2 * pool.num_cached + 65


def test_a_page_starts_anew_with_new_content():
    pool = PagePool(3, SIZE, eviction="cost")
    for _ in range(20):
        run(pool, [1] * SIZE)
    pool.reset_prefix_cache()
    run(pool, [2] * SIZE)
    run(pool, [3] * SIZE)
    run(pool, [4] * SIZE)
    assert [len(pool.match(keys([n] * SIZE))) for n in (1, 2, 3, 4)] == [0, 0, 1, 1]
