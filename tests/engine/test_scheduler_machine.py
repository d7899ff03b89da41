"""The scheduler under random use, against a runner that notices every wrong page and a naive model.

Hypothesis chooses the limits (page size, pool, seats, budget, policy, chunks, prefix cache) and the
events: requests of every kind (guided ones too), steps, aborts and failures between and during
steps, stop strings, rollbacks, cache resets, the passing of time. Up to three batches are in
flight, and a scripted drafter is right, wrong or partly right. After each event the books are
checked; each answer must be what the request alone would have got.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import precondition, rule

from sdk.api.errors import OutOfMemoryError, RequestError
from sdk.engine.pages.elastic import ElasticPages
from sdk.engine.pages.prefix_store import PrefixStore
from sdk.quant.spec import KVSpec
from tests.engine.scheduler_model import SchedulerModel

SPEC = KVSpec(num_layers=1, kv_heads=1, head_dim=8, page_size=4)  # pins do not look into pages

PAGE = 4  # prompts are made of runs this long, so that they share pages whatever the page size


class SchedulerMachine(SchedulerModel):
    """The events."""

    @rule(
        count=st.integers(1, 4),
        runs=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        tail=st.lists(st.integers(0, 999), min_size=1, max_size=9),
        kind=st.sampled_from(["generate", "generate", "generate", "embed"]),
        salt=st.sampled_from([None, None, "s"]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from([None, "a", "b", "c"]),
        max_tokens=st.one_of(st.none(), st.integers(1, 30)),
        min_tokens=st.integers(0, 5),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        deadline=st.sampled_from([None, None, None, None, None, 3.0, 20.0]),
        kv_min_bits=st.sampled_from([None, None, None, 16, 8]),
        negative=st.one_of(
            st.none(), st.none(), st.lists(st.integers(0, 1), min_size=1, max_size=12)
        ),
        rewinds=st.sampled_from([True, True, False]),
    )
    def add(self, count, runs, tail, kind, negative, **params) -> None:
        prompt = ([run for run in runs for _ in range(PAGE)] + tail)[: self.longest]
        if kind == "embed":
            params["prompt_logprobs"] = None
        params["min_tokens"] = min(params["min_tokens"], params["max_tokens"] or 5)
        config = self.rig.config
        if (
            negative is not None
            and kind == "generate"
            and config.max_num_seqs > 1
            and config.enable_chunked_prefill
            and self.longest_guided(len(prompt), len(negative))
        ):
            params |= {"guidance_scale": 1.5, "negative": negative}
        for i in range(count):  # a batch with one prefix
            self.add_one([*prompt[:-1], 7 * i], kind=kind, **params)

    @precondition(lambda self: self.rig.requests)
    @rule(
        data=st.data(),
        tails=st.lists(
            st.lists(st.integers(0, 999), min_size=1, max_size=9), min_size=1, max_size=3
        ),
        max_tokens=st.integers(1, 12),
    )
    def go_on(self, data: st.DataObject, tails, max_tokens) -> None:
        """The next turn of some request, its last message edited, or agents that branch."""
        request = self.rig.requests[data.draw(st.sampled_from(sorted(self.rig.requests)))]
        most = min(request.num_tokens, self.longest - 1)
        cut = data.draw(st.sampled_from([most, most]) | st.integers(0, most))
        for tail in tails:
            prompt = [*request.token_ids[:cut], *tail][: self.longest]
            self.add_one(prompt, max_tokens=max_tokens, salt=request.job.cache_salt)

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.do_step()

    @rule(data=st.data(), times=st.integers(1, 8), certain=st.integers(0, 3))
    def step_and_rewind(self, data: st.DataObject, times: int, certain: int) -> None:
        """After each step an answer may lose its last tokens, maybe one it has just ended with."""
        for _ in range(times):
            self.step_then_rewind(data, certain)

    def step_then_rewind(self, data: st.DataObject, certain: int) -> None:
        rig, scheduler = self.rig, self.rig.scheduler
        alive = [one for one in map(rig.requests.get, self.forbidden) if not one.finished]
        self.do_step()
        busy = {row.request_id for plan, _, _ in rig.runner.launched for row in plan.rows}
        choices = [
            one
            for one in alive
            if one.finish_reason in (None, "stop", "length")
            and one.status.value in ("running", "stop", "length")
            and one.num_certain < one.num_tokens
            and busy.isdisjoint(sequence.request_id for sequence in one.sequences)
        ]
        if not choices:
            return
        request = data.draw(st.sampled_from(choices))
        num_tokens = data.draw(st.integers(request.num_certain, request.num_tokens - 1))
        position = num_tokens - request.num_prompt_tokens
        forbidden = self.forbidden[request.request_id]
        for later in [one for one in forbidden if one > position]:
            del forbidden[later]
        forbidden[position] = (*forbidden.get(position, ()), request.token_ids[num_tokens])
        self.forget_updates(request, request.num_tokens - num_tokens)
        scheduler.rewind(request, num_tokens, forbidden[position])
        scheduler.check()
        for sequence in request.sequences:
            sequence.num_certain += min(certain, num_tokens - request.num_certain)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if (request_id := self.someone(data)) is not None:
            assert self.rig.scheduler.queues.abort(request_id).finish_reason == "abort"
            self.ended[request_id] = "abort"
            assert self.rig.scheduler.queues.abort(request_id) is None

    @rule(data=st.data())
    def finish_by_stop_string(self, data: st.DataObject) -> None:
        if (request_id := self.someone(data)) is not None:
            self.rig.scheduler.queues.finish(request_id, "stop", "word")
            self.ended[request_id] = "stop"

    @rule(data=st.data())
    def abort_and_add_during_a_step(self, data: st.DataObject) -> None:
        request_id = self.someone(data)

        def during() -> None:
            if request_id in self.rig.scheduler.queues.unfinished:
                self.rig.scheduler.queues.abort(request_id)
                self.ended[request_id] = "abort"
            self.add_one([1] * min(PAGE, self.longest))

        self.do_step(during)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """The rank reports NaN for one request (which may not even be in this step)."""
        if self.someone(data, running=True) is None:
            self.do_step()
        if (request_id := self.someone(data, running=True)) is None:
            return
        request = self.rig.requests[request_id]
        self.settle()
        before = request.num_computed, request.num_preemptions
        held: list[int] = []
        self.do_step(
            lambda: held.extend(page for one in request.sequences for page in one.pages),
            {request_id: "NaN"},
        )
        if request.finish_reason == "error":
            self.ended[request_id] = "error"
            assert request.stop_reason == "NaN"
            assert not any(map(self.rig.pool.key, held)), "a page with NaN can be found"
        else:  # it did not run
            now = request.num_computed, request.num_preemptions
            assert now[0] == before[0] or now[1] > before[1] or request.finished

    @rule(heard=st.booleans())
    def roll_back(self, heard: bool) -> None:
        """A step is interrupted after the ranks did all of it, or nothing."""
        self.launch(self.rig.scheduler, heard=heard)
        self.rig.runner.launched.clear()
        self.rig.scheduler.rollback()
        assert self.rig.scheduler.queues.num_running == 0
        self.check_nothing_is_held()

    @rule(data=st.data(), pages=st.integers(1, 6))
    def pin(self, data: st.DataObject, pages: int) -> None:
        """The first pages of some request, if they are there and leave room for all others."""
        rig = self.rig
        if not rig.requests or not rig.config.enable_prefix_caching:
            return
        request = rig.requests[data.draw(st.sampled_from(sorted(rig.requests)))]
        tokens = request.token_ids[: pages * rig.config.page_size]
        if len(tokens) < rig.config.page_size:
            return
        kept = PrefixStore(rig.scheduler, rig.runner, SPEC)
        with suppress(OutOfMemoryError):
            if kept.pin(tokens, request.job.cache_salt):
                self.pinned.append((tokens, request.job.cache_salt))

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        """It may have gone: the cache was reset, or a page of it had NaN."""
        tokens, salt = self.pinned.pop()
        PrefixStore(self.rig.scheduler, self.rig.runner, SPEC).unpin(tokens, salt)

    @precondition(lambda self: self.rig.scheduler.groups is None)
    @rule(data=st.data(), times=st.integers(1, 8))
    def have_fewer_pages_for_a_while(self, data: st.DataObject, times: int) -> None:
        """What runs is preempted where it must be; the first in order goes on."""
        pool = self.rig.pool
        elastic = ElasticPages(self.rig.scheduler, self.rig.runner)
        self.settle()
        before = pool.capacity
        fewer = data.draw(st.integers(elastic.min_pages, before))
        with pytest.raises(RequestError, match="resize: 0 KV pages"):
            elastic.resize(0)
        elastic.resize(fewer)
        assert pool.capacity == fewer
        self.rig.scheduler.check()
        for _ in range(times):
            self.do_step()
        self.settle()
        elastic.trim()
        assert pool.num_cached == 0
        elastic.resize(before)
        self.rig.scheduler.check()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.rig.scheduler.reset_prefix_cache()
        assert self.rig.pool.num_cached == 0

    @rule(seconds=st.floats(0.1, 5))
    def pass_time(self, seconds: float) -> None:
        self.rig.now += seconds


@pytest.fixture
def machine(rig):
    """The machine, with the Rig of this folder's conftest."""
    return type("Machine", (SchedulerMachine,), {"rig_class": rig})


@pytest.mark.parametrize("sequences", [100, pytest.param(300, marks=pytest.mark.slow)])
def test_any_sequence_of_events_keeps_books_answers_and_order(machine, sequences):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_negative_prompt_leaves_no_state_that_is_ahead_of_its_tokens(machine):
    """The second request begins like the negative prompt of the first one, which ends while its
    last step is committed."""
    state = machine()
    sizes = {"page_size": 8, "pages": 3, "max_model_len": 8, "max_num_seqs": 2, "budget": 2}
    kinds = {
        "windows": [],
        "slot_bytes": 30,
        "rounds": False,
        "memory": None,
        "groups": True,
        "bits": (16,),
    }
    rest = {"chunked": True, "caching": True, "policy": "fcfs", "aging": 0.5, "short": 1}
    rest |= {"eviction": "lru", "eos": False, "swap": 0, "in_flight": 1, "drafts": 0}
    state.start(**sizes, **kinds, **rest, min_concurrent_tokens=0)
    plain = dict.fromkeys(("deadline", "kv_min_bits", "max_tokens", "salt", "tenant"))
    plain |= {"prompt_logprobs": None, "kind": "generate", "min_tokens": 0, "priority": 0}
    state.add(count=2, negative=[0], runs=[0], tail=[0, 0], rewinds=True, **plain)
    state.step(times=4)
    state.teardown()
