"""Slots of adapters: who gets one, who leaves, who waits, and that nobody waits forever."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.engine.scheduling.adapter_slots import AdapterSlots
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from tests.engine.fake_runner import FakeRunner


@dataclass(frozen=True)
class Source:
    key: str
    nbytes: int = 10
    read_bytes: int = 5
    lora_request: object = None
    read: Any = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return self.key


A, B, C, D = map(Source, "ABCD")
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class Rig:
    """A scheduler over a fake rank; adapters are loaded a given number of steps after they are
    wanted."""

    def __init__(self, slots: int, *, nbytes: int = 10**9, seqs: int = 4, delay: int = 0) -> None:
        config = SchedulerConfig(
            num_pages=200,
            page_size=4,
            max_model_len=64,
            max_num_seqs=seqs,
            max_num_batched_tokens=64,
            adapter_slots=slots,
            adapter_bytes=nbytes,
        )
        self.scheduler = Scheduler(config)
        assert self.scheduler.adapters is not None
        self.slots: AdapterSlots = self.scheduler.adapters
        self.runner = FakeRunner(4, 200)
        self.started: list[str] = []
        self.most_bytes = 0
        self._delay, self._loading = delay, []
        self._number = 0

    def add(self, source: Source | None, name: str = "", tokens: int = 5, length: int = 4) -> str:
        self._number += 1
        name = name or f"{source.key if source else 'base'}{self._number}"
        params = PARAMS.clone(max_tokens=length)
        prompt = (self._number, *range(1, tokens))
        job = Job(SequenceSpec(name, params), prompt, adapter=source)
        self.scheduler.queues.add(Request(job))
        return name

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        for start in plan.started:
            self.started.append(start.request_id)
        running = {one.request_id: one for one in self.scheduler.queues.running}
        for row in plan.rows:
            request = running[row.request_id]
            expected = -1
            if request.adapter is not None:
                adapter = self.slots.find(request.adapter)
                assert adapter is not None and adapter.ready, "it runs without its adapter"
                expected = adapter.slot
            assert row.adapter == expected
        self.runner.launch(plan)
        self.scheduler.commit(self.runner.result())
        self.scheduler.check()
        self.load()

    def load(self) -> None:
        self.slots.take_cleared()
        self._loading += [(one, self._delay) for one in self.slots.take_wanted()]
        self.most_bytes = max(self.most_bytes, self.slots.nbytes)
        for one, left in self._loading:
            if left <= 0:
                self.slots.loaded(one)
        self._loading = [(one, left - 1) for one, left in self._loading if left > 0]
        residents = [self.slots.find(key) for key in "ABCDEFGH"]
        held = [one.slot for one in residents if one is not None and one.slot >= 0]
        assert len(set(held)) == len(held) <= self.slots.num_slots
        assert self.slots.nbytes <= self.slots.max_bytes

    def run(self, steps: int = 200) -> list[str]:
        """Until nothing is left; the order in which requests started."""
        for _ in range(steps):
            if not self.scheduler.queues.unfinished:
                return self.started
            self.step()
        raise AssertionError(f"requests wait forever: {list(self.scheduler.queues.unfinished)}")


def test_requests_run_when_their_adapter_is_in_a_slot_and_others_do_not_wait_for_that() -> None:
    rig = Rig(2, delay=3)
    rig.add(A, "a")
    rig.add(None, "base")
    rig.step()
    assert rig.started == ["base"]  # a's adapter is being loaded
    assert rig.run() == ["base", "a"]


def test_the_adapter_unused_for_the_longest_time_leaves() -> None:
    rig = Rig(2)
    for source in (A, B, A):
        rig.add(source)
        rig.run()
    rig.add(C)
    rig.run()
    ready = {key for key in "ABC" if (one := rig.slots.find(key)) is not None and one.ready}
    assert ready == {"A", "C"}
    assert rig.slots.num_loads == 3


def test_a_pinned_adapter_stays() -> None:
    rig = Rig(2)
    rig.slots.load(A, pin=True)
    rig.load()
    for source in (B, C, D, B):
        rig.add(source)
        rig.run()
    found = rig.slots.find("A")
    assert found is not None and found.ready
    assert rig.slots.num_loads == 5


def test_requests_for_other_adapters_are_rejected_while_pinned_ones_fill_all_slots() -> None:
    rig = Rig(1)
    rig.slots.load(A, pin=True)
    rig.load()
    with pytest.raises(RequestError, match=r"'B' cannot be loaded: 'A' are pinned.*1 slots"):
        rig.add(B)
    rig.slots.remove("A")
    rig.slots.take_cleared()
    rig.add(B)
    rig.run()


def test_an_adapter_is_not_pinned_where_a_waiting_request_needs_its_slot() -> None:
    rig = Rig(1, delay=2)
    rig.add(A)
    with pytest.raises(RequestError, match=r"'B' cannot be pinned while a request waits"):
        rig.slots.load(B, pin=True)
    rig.run()
    assert rig.slots.load(B, pin=True) is not None


def test_an_adapter_is_not_pinned_into_the_slot_of_a_request_that_has_not_started_yet() -> None:
    rig = Rig(1)
    rig.add(B)
    rig.step()  # B is in its slot; its request starts with the next step
    with pytest.raises(RequestError, match=r"'A' cannot be pinned while a request waits"):
        rig.slots.load(A, pin=True)
    rig.run()


def test_an_adapter_larger_than_all_room_is_rejected_with_the_numbers() -> None:
    rig = Rig(2, nbytes=14)
    with pytest.raises(RequestError, match=r"needs 15 bytes while it is loaded.*14; raise lora"):
        rig.add(A)


def test_bytes_count_as_well_as_slots() -> None:
    rig = Rig(4, nbytes=26)  # two adapters; while one is read it takes 15
    for source in (A, B, C, A, B, C):
        rig.add(source)
    rig.run()
    assert rig.most_bytes == 25  # one, and another one being read


def test_running_requests_keep_their_adapter_and_later_ones_overtake_only_so_often() -> None:
    rig = Rig(1, seqs=2)
    names = [rig.add(A if i % 2 == 0 else B) for i in range(12)]
    order = rig.run()
    assert sorted(order) == sorted(names)
    first_b = order.index(names[1])
    # two requests start with A before B waits; then at most two (max_num_seqs) overtake it
    assert [name[0] for name in order[:first_b]].count("A") <= 4
    assert rig.slots.num_loads <= 6  # they run in groups, not one by one


def test_a_stream_of_requests_with_one_adapter_does_not_keep_another_waiting() -> None:
    rig = Rig(1, seqs=2)
    rig.add(A)
    rig.add(A)
    rig.step()
    rig.step()
    rig.add(B, "waiting")
    for _ in range(40):
        rig.add(A)
        rig.step()
        if "waiting" in rig.started:
            break
    assert "waiting" in rig.started


def test_a_slot_is_not_taken_from_an_adapter_that_an_earlier_request_needs() -> None:
    rig = Rig(1, seqs=1)
    rig.slots.load(A, pin=False)
    rig.load()
    rig.add(None, "long", length=10)
    rig.step()
    rig.add(A, "first")
    rig.add(B, "second")
    assert rig.run() == ["long", "first", "second"]
    assert rig.slots.num_loads == 2


def test_a_preempted_request_waits_for_its_adapter_again() -> None:
    rig = Rig(1, seqs=2)
    rig.add(A, "a", length=8)
    rig.step()
    rig.step()
    rig.scheduler.queues.preempt_last()
    found = rig.slots.find("A")
    assert found is not None and found.num_running == 0
    rig.run()
    assert rig.started == ["a", "a"]


def test_a_removed_adapter_leaves_after_its_requests() -> None:
    rig = Rig(2)
    rig.add(A, "running")
    rig.step()
    rig.step()
    rig.slots.remove("A")
    rig.load()
    assert rig.slots.find("A") is not None
    rig.run()
    rig.load()
    assert rig.slots.find("A") is None
    rig.add(A)  # and may come back
    rig.run()


def test_a_removed_adapter_that_a_request_waits_for_is_still_loaded() -> None:
    rig = Rig(1, seqs=2)
    rig.add(A)
    rig.add(B, "waits")
    rig.step()
    rig.slots.remove("B")
    assert "waits" in rig.run()
    rig.load()
    assert rig.slots.find("B") is None


def test_after_a_failure_the_slot_is_free_and_the_adapter_may_be_tried_again() -> None:
    rig = Rig(1, delay=100)
    rig.add(A, "a")
    rig.step()
    [(adapter, _)] = rig._loading
    rig._loading.clear()
    rig.scheduler.queues.finish("a", "error")
    rig.slots.failed(adapter)
    assert rig.slots.find("A") is None and rig.slots.nbytes == 0
    rig._delay = 0
    rig.add(A)
    rig.run()


def test_after_a_restart_of_the_ranks_pinned_adapters_are_loaded_at_once() -> None:
    rig = Rig(2)
    rig.slots.load(A, pin=True)
    rig.slots.load(B, pin=False)
    rig.load()
    rig.slots.reload_all()
    assert [one.source.key for one in rig.slots.take_wanted()] == ["A"]


SOURCES = [Source(key, nbytes=size) for key, size in zip("ABCDEF", (3, 5, 8, 4, 9, 2), strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from([None, *SOURCES])),
            st.tuples(st.just("step"), st.integers(1, 4)),
            st.tuples(st.just("abort"), st.integers(0, 40)),
            st.tuples(st.just("pin"), st.sampled_from(SOURCES)),
            st.tuples(st.just("remove"), st.sampled_from(SOURCES)),
            st.tuples(st.just("preempt"), st.none()),
        ),
        max_size=40,
    ),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_whatever_happens_every_request_ends_and_the_limits_hold(
    events: list[tuple[str, Any]], slots: int, delay: int
) -> None:
    rig = Rig(slots, nbytes=30, seqs=3, delay=delay)
    names: list[str] = []
    for kind, what in events:
        if kind == "step":
            for _ in range(what):
                rig.step()
        elif kind == "abort" and what < len(names):
            rig.scheduler.queues.abort(names[what])
        elif kind == "preempt" and rig.scheduler.queues.running:
            rig.scheduler.queues.preempt_last()
        elif kind == "remove":
            rig.slots.remove(what.key)
        elif kind in ("add", "pin"):
            try:
                if kind == "pin":
                    rig.slots.load(what, pin=True)
                else:
                    names.append(rig.add(what))
            except RequestError:
                pass  # pinned ones fill all slots
    rig.run(600)
    rig.load()
    for source in SOURCES:
        found = rig.slots.find(source.key)
        assert found is None or (found.num_running, found.num_requests) == (0, 0)
