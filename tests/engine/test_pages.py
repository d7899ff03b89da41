"""The page pool alone: states, references, prefix keys, eviction order, and random use of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sdk.engine.pages.page_pool import PageKey, PagePool, page_key, root_digest

ROOT = root_digest(None, "auto", None)


def chain(tokens: list[int], page_size: int = 2, root: bytes = ROOT) -> list[PageKey]:
    keys: list[PageKey] = []
    for start in range(0, len(tokens), page_size):
        parent = keys[-1].digest if keys else root
        keys.append(page_key(parent, tokens[start : start + page_size]))
    return keys


def filled(pool: PagePool, keys: list[PageKey]) -> list[int]:
    pages = pool.acquire((), len(keys))
    assert pages is not None
    for page, key in zip(pages, keys, strict=True):
        pool.publish(page, key)
    return pages


def test_page_zero_is_never_handed_out():
    pool = PagePool(5, 2)
    assert pool.capacity == 4
    assert sorted(pool.acquire((), 4)) == [1, 2, 3, 4]


def test_acquire_gives_everything_or_nothing():
    pool = PagePool(6, 2)
    keys = chain([1, 2, 3, 4])
    pages = filled(pool, keys)
    pool.release(pages)
    hits = pool.match(keys)
    before = (pool.num_free, pool.num_cached)
    assert pool.acquire(hits, 4) is None
    assert pool.acquire(hits, 3, spare=1) is None
    assert (pool.num_free, pool.num_cached) == before
    pool.check([])
    assert pool.acquire(hits, 3)[:2] == hits, "its own hits are not evicted for its new pages"


def test_the_tail_of_a_request_is_evicted_before_its_head():
    pool = PagePool(5, 2)
    keys = chain([1, 2, 3, 4, 5, 6, 7, 8])
    pages = filled(pool, keys)
    pool.release(pages)
    for left in (3, 2, 1, 0):
        assert pool.acquire((), 1) is not None
        assert pool.match(keys) == pages[:left]
    assert pool.evictions == 4


def test_the_least_recently_used_prefix_is_evicted_first():
    pool = PagePool(4, 2)
    old, new = chain([1, 2]), chain([3, 4])
    first, second = filled(pool, old), filled(pool, new)
    pool.release(first)
    pool.release(second)
    pool.release(pool.acquire(pool.match(old), 0))
    pool.acquire((), 2)
    assert pool.match(old) and not pool.match(new)


def test_tokens_are_compared_on_a_hit_so_that_a_collision_is_a_miss():
    pool = PagePool(5, 2)
    key = chain([1, 2])[0]
    filled(pool, [key])
    assert pool.match([key])
    assert pool.match([key._replace(token_ids=(9, 9))]) == []
    assert pool.match([key._replace(parent=b"another")]) == []


def test_keys_depend_on_everything_before_and_on_adapter_kv_type_and_salt():
    assert chain([1, 2, 3, 4])[1] != chain([9, 2, 3, 4])[1]
    roots = [
        root_digest(*names)
        for names in ((None, "auto", None), ("a", "auto", None), (None, "fp8", None))
    ]
    roots += [root_digest(None, "auto", "a"), root_digest(None, "auto", "None")]
    assert len({chain([1, 2], root=root)[0].digest for root in roots}) == 5
    assert root_digest(None, "auto", "\ud800")


def test_the_second_of_two_equal_pages_stays_private():
    pool = PagePool(5, 2)
    keys = chain([1, 2])
    first, second = filled(pool, keys), filled(pool, keys)
    assert pool.match(keys) == first
    pool.release(second)
    pool.release(first)
    assert (pool.num_free, pool.num_cached) == (3, 1)
    pool.check([])


def test_a_pool_without_prefix_caching_knows_nothing():
    pool = PagePool(5, 2, enable_prefix_caching=False)
    keys = chain([1, 2])
    filled(pool, keys)
    assert pool.match(keys) == []


def test_reset_and_forget_leave_the_pages_with_their_owners():
    pool = PagePool(6, 2)
    kept, idle = chain([1, 2, 3, 4]), chain([5, 6])
    pages = filled(pool, kept)
    others = filled(pool, idle)
    pool.release(others)
    pool.forget([*pages[:1], *others])
    assert pool.match(kept) == [] and pool.match(idle) == [] and pool.num_cached == 0
    pool.check([pages])
    pool.reset_prefix_cache()
    pool.check([pages])
    pool.release(pages)
    assert pool.num_free == pool.capacity


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="num_pages must be at least 2"):
        PagePool(1, 2)
    with pytest.raises(ValueError, match="page_size must be at least 1"):
        PagePool(4, 0)
    pool = PagePool(4, 2)
    [page] = pool.acquire((), 1)
    pool.release([page])
    with pytest.raises(ValueError, match="is released but has no owner"):
        pool.release([page])
    with pytest.raises(ValueError, match="is published but has no owner"):
        pool.publish(page, chain([1, 2])[0])


def test_pages_are_borrowed_before_known_ones_are_thrown_out_and_once_more_before_refusing():
    asked = []
    pool = PagePool(7, 2, limit=3)
    assert (pool.capacity, pool.num_withheld) == (2, 4)
    pool.on_shortage = lambda count, urgent: (
        asked.append((count, urgent)) or (pool.grant(1) and None)
    )
    pool.release(filled(pool, chain([1, 2, 3, 4])))
    assert len(pool.acquire((), 2)) == 2
    assert asked == [(2, False)]
    assert (pool.num_cached, pool.evictions) == (1, 1)  # one was lent, one page lost its content
    assert pool.acquire((), 5) is None
    assert asked[1:] == [(5, False), (3, True)]
    pool.check()


def test_withheld_pages_are_free_ones_first():
    pool = PagePool(5, 2)
    keys = chain([1, 2, 3, 4])
    pages = filled(pool, keys)
    pool.release(pages)
    assert not set(pool.withhold(2)) & set(pages)
    assert pool.match(keys) == pages
    assert pool.withhold(3) == pages[::-1]
    assert (pool.capacity, pool.num_withheld, pool.match(keys)) == (0, 4, [])
    assert pool.acquire((), 1) is None
    assert pool.grant(9) == 4
    pool.check()


def test_check_finds_a_lost_page_and_a_wrong_count():
    pool = PagePool(4, 2)
    pages = pool.acquire((), 2)
    with pytest.raises(AssertionError, match="reference counts and page tables differ"):
        pool.check([pages[:1]])
    pool._free.pop()
    with pytest.raises(AssertionError, match="a page was lost"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Owners with random short token lists against a model: which page holds which prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(9, 2, limit=7)
        self.pool.on_shortage = self.lend
        self.lendable = 0
        self.owners: list[tuple[list[PageKey], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # page -> all tokens up to its end

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5), extra=st.integers(0, 2))
    def acquire(self, tokens: list[int], extra: int) -> None:
        doubled = [token for token in tokens for _ in range(2)]
        keys = chain(doubled)
        hits = self.pool.match(keys)
        for index, page in enumerate(hits):
            assert self.content[page] == tuple(doubled[: 2 * index + 2]), "somebody else's text"
        num_new = len(keys) - len(hits) + extra
        available, lent = self.pool.num_available, self.pool.capacity
        pages = self.pool.acquire(hits, num_new)
        if pages is None:
            assert self.pool.num_available == available + self.pool.capacity - lent
            return
        for index, page in enumerate(pages[len(hits) : len(keys)], start=len(hits)):
            self.content[page] = tuple(doubled[: 2 * index + 2])
            self.pool.publish(page, keys[index])
        self.owners.append((keys, pages))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, pages = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(pages)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        keys, pages = data.draw(st.sampled_from(self.owners))
        self.pool.forget(pages)
        assert not set(self.pool.match(keys)) & set(pages)

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()

    def lend(self, count: int, urgent: bool) -> None:
        self.lendable -= self.pool.grant(min(count, self.lendable))

    @rule(pages=st.integers(0, 2))
    def may_borrow(self, pages: int) -> None:
        self.lendable = pages

    @rule(count=st.integers(0, 9))
    def withhold(self, count: int) -> None:
        idle, capacity = self.pool.num_available, self.pool.capacity
        taken = self.pool.withhold(count)
        assert len(taken) == min(count, idle) == capacity - self.pool.capacity
        for page in taken:
            self.content.pop(page, None)

    @rule(count=st.integers(0, 9))
    def grant(self, count: int) -> None:
        withheld, free = self.pool.num_withheld, self.pool.num_free
        assert self.pool.grant(count) == min(count, withheld)
        assert self.pool.num_free == free + min(count, withheld)

    @rule()
    def drop_cached(self) -> None:
        assert len(self.pool.drop_cached()) == self.pool.num_free == self.pool.num_available

    @invariant()
    def balanced(self) -> None:
        self.pool.check([pages for _, pages in self.owners])


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("chunked", [True, False])
def test_no_page_is_leaked_after_5000_random_events(rig, policy, chunked):
    rng = random.Random(f"{policy}{chunked}")
    r = rig(
        num_pages=24,
        max_model_len=60,
        max_num_seqs=6,
        max_num_batched_tokens=16 if chunked else 60,
        enable_chunked_prefill=chunked,
        policy=policy,
        eos_token_ids=frozenset(range(0, 1000, 25)),
    )
    added = 0
    for _ in range(5000):
        event = rng.random()
        queued = r.scheduler.queues.num_waiting + r.scheduler.queues.num_running
        if event < 0.3 and queued < 12:
            base = [rng.randrange(3)] * rng.choice((4, 9, 16))
            params = {"max_tokens": rng.randrange(1, 30), "priority": rng.randrange(3)}
            if rng.random() < 0.1:
                params["deadline"] = rng.uniform(0.1, 30)
            if rng.random() < 0.1:
                params["prompt_logprobs"] = 0
            kind = "embed" if rng.random() < 0.1 else "generate"
            tail = [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
            r.add(str(added), base + tail, kind=kind, salt=rng.choice((None, "s")), **params)
            added += 1
        elif event < 0.34 and added:
            r.scheduler.queues.abort(str(rng.randrange(added)))
        elif event < 0.35:
            r.scheduler.reset_prefix_cache()
        elif event < 0.36 and r.scheduler.queues.num_running:
            r.runner.errors = {rng.choice(r.scheduler.queues.running).request_id: "NaN"}
            r.step()
        elif event < 0.37:
            r.scheduler.plan()
            r.scheduler.rollback()
        else:
            r.now += 0.1
            r.step()
    r.run()
    r.assert_answers()
    reasons = {request.finish_reason for request in r.requests.values()}
    assert reasons == {"stop", "length", "abort", "error", "deadline"}
    assert r.scheduler.queues.num_preemptions > 0 and r.pool.hits > 0 and r.pool.evictions > 0
    assert r.pool.num_available == r.pool.capacity and not r.scheduler.prefixes.pending
