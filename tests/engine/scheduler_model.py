"""What random use of a scheduler is compared with: its limits, steps whose order is checked, and a
naive model of every answer. test_scheduler_machine.py has the events.
"""

from __future__ import annotations

import math

from fake_runner import ScriptedDrafter, expected_tokens
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition

from sdk.api.errors import RequestError
from sdk.engine.scheduling.drafts import Drafts
from sdk.engine.scheduling.negative_prompt import in_prefill
from sdk.engine.scheduling.prompt_lookup import PromptLookup
from sdk.engine.scheduling.scheduler_config import StateSlots, WindowGroup

MOST_DRAFTS = 4


class SchedulerModel(RuleBasedStateMachine):
    """Subclasses set ``rig_class``; the model is a dict of what was asked for."""

    rig_class: type

    def __init__(self) -> None:
        super().__init__()
        self.rig = None
        self.num_added = 0
        self.ended: dict[str, str] = {}  # the reasons this machine caused itself
        self.forbidden: dict[str, dict[int, tuple[int, ...]]] = {}  # by position of the answer
        self.rooms: dict[str, int] = {}  # pages a request could get when it was added
        self.pinned: list[tuple[list[int], str | None]] = []
        self.steps_of_first = 0  # since the first in order last advanced

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 8]),
        pages=st.integers(3, 16),
        max_model_len=st.integers(8, 48),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(0, 12),
        chunked=st.booleans(),
        caching=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        aging=st.sampled_from([0.5, 60.0, math.inf]),
        short=st.sampled_from([1, 3, 64]),
        eviction=st.sampled_from(["lru", "cost"]),
        eos=st.sampled_from([False, False, True]),
        swap=st.sampled_from([0, 1, 3, 40, 300]),
        bits=st.sampled_from([(16,), (16, 8), (16, 8, 4)]),
        in_flight=st.sampled_from([1, 1, 2, 3]),
        min_concurrent_tokens=st.sampled_from([0, 1, 4]),
        drafts=st.sampled_from([0, 0, 1, 3, 4]),
        windows=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 150)), max_size=2),
        slot_bytes=st.sampled_from([None, 30, 90, 900]),
        rounds=st.booleans(),
        memory=st.sampled_from([None, 0.0, 0.3, 1.0]),
        groups=st.sampled_from([False, True]),
    )
    def start(
        self,
        page_size,
        pages,
        max_model_len,
        max_num_seqs,
        budget,
        chunked,
        caching,
        policy,
        aging,
        short,
        eviction,
        eos,
        swap,
        bits,
        in_flight,
        min_concurrent_tokens,
        drafts,
        windows,
        slot_bytes,
        rounds,
        memory,
        groups,
    ) -> None:
        options = {}
        if groups:
            bits = (16,)
            states = slot_bytes, rounds
            options = self.group_options(pages, page_size, windows, states, memory, chunked)
        least = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
        self.rig = self.rig_class(
            num_pages=1 + pages,
            page_size=page_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=least + budget,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
            num_swap_pages=swap if caching else 0,
            kv_bits=bits,
            policy=policy,
            tenant_weights={"a": 4, "b": 0.5} if policy == "fair" else None,
            priority_aging=aging,
            short_step_tokens=short,
            prefix_eviction=eviction,
            eos_token_ids=frozenset(range(0, 1000, 20)) if eos else frozenset(),
            **options,
        )
        self.longest = min(max_model_len - 1, pages * page_size)
        self.rig.scheduler.batches_in_flight = in_flight
        self.rig.scheduler.min_concurrent_tokens = min_concurrent_tokens
        if drafts == 3:
            lookup = PromptLookup(1, None, 2**20, shares=True)
            self.rig.scheduler.drafts = Drafts(lookup, 4, most_in_step=6)
        elif drafts:
            self.rig.scheduler.drafts = Drafts(ScriptedDrafter(), drafts)

    def group_options(self, pages, page_size, windows, states, memory, chunked) -> dict:
        """Window groups and states with enough memory for one request and its negative sequence,
        in which the longest one of ``pages`` pages runs; ``memory``: some more, or all places.
        ``states``: the bytes of a slot, and whether snapshots have 16 bits."""
        slots, needed, (slot_bytes, rounds) = 0, pages * 100, states
        groups = []
        for window, nbytes in windows:
            frames = 3 + (2 * min(pages, window // page_size + 2) if chunked else 2 * pages)
            groups.append((window, nbytes, frames))
            needed += nbytes * frames
        if slot_bytes is not None:
            slots = 2 * (MOST_DRAFTS + 2)
            needed += slot_bytes * slots
        extra = 30
        rounded = (slot_bytes // 2, extra) if slots and rounds else ()
        parts = [2, *(1 + nbytes % 3 for _, nbytes in windows)]
        return {
            "swap_parts": (*parts, 3) if slots else tuple(parts) if windows else (1,),
            "windows": tuple(WindowGroup(one[0], one[1], one[2] + 1 + extra) for one in groups),
            "states": StateSlots(slot_bytes, slots + 1 + extra, MOST_DRAFTS, *rounded)
            if slots
            else None,
            "page_bytes": 100,
            "cache_bytes": None if memory is None else int(needed * (1 + memory)),
        }

    def add_one(self, prompt, rewinds=False, **params) -> None:
        """Where pins leave room for it. ``rewinds``: no token of its answer is certain."""
        request_id, prefixes = str(self.num_added), self.rig.scheduler.prefixes
        try:
            request = self.rig.add(request_id, prompt, **params)
        except RequestError:
            assert prefixes.num_pinned
            return
        if rewinds and request.spec.kind == "generate":
            self.forbidden[request_id] = {}
            for sequence in request.sequences:
                sequence.num_certain = sequence.num_prompt_tokens
        self.rooms[request_id] = prefixes.available_pages(request)
        self.num_added += 1

    def room(self, num_sequences: int) -> int:
        """The pages that a request with so many sequences could get without pins."""
        groups = self.rig.scheduler.groups
        return self.rig.pool.capacity if groups is None else groups.most_pages(num_sequences, 0)

    def longest_guided(self, num: int, negative: int, room: int | None = None) -> int:
        """The longest answer for which both prompts fit, by trying them all."""
        config, longest = self.rig.config, 0
        for answer in range(1, config.max_model_len + 1 - max(num, negative)):
            pages = [-(-(start + answer - 1) // config.page_size) for start in (num, negative)]
            if sum(pages) <= (self.room(2) if room is None else room):
                longest = answer
        return longest

    def forget_updates(self, request, count: int) -> None:
        """The last tokens reported of a request are taken back."""
        updates = self.rig.updates
        for index in reversed(range(len(updates))):
            if count and updates[index].request is request:
                sampled = updates[index].sampled
                kept = max(len(sampled) - count, 0)
                updates[index] = updates[index]._replace(sampled=sampled[:kept])
                count -= len(sampled) - kept

    def do_step(self, during=None, errors=None) -> None:
        """One step; the checks of ``Rig.step`` and that the first in order is never held up."""
        rig, scheduler = self.rig, self.rig.scheduler
        alive = [r for r in rig.requests.values() if not r.finished]
        rig.now += 0.25
        rig.runner.errors = errors or {}
        while self.launch(scheduler) and len(rig.runner.launched) < scheduler.batches_in_flight:
            pass
        alive = [r for r in alive if not r.finished]  # not those whose deadline has come
        in_flight = {row.request_id for plan, _, _ in rig.runner.launched for row in plan.rows}
        assert bool(in_flight) or not alive, "nothing runs though somebody waits"
        if alive and self.rig.config.policy != "fair":
            first = min(alive, key=self.turn)
            held_up = not any(one.request_id in in_flight for one in first.sequences)
            # It may wait for a prefix that another is computing, or (priorities) for those who
            # run already: they end, so it runs after a bounded number of steps.
            self.steps_of_first = self.steps_of_first + 1 if held_up else 0
            assert self.steps_of_first < 300, "the first in order starves"
        if during is not None:
            during()
            scheduler.check()
        rig.updates += scheduler.commit(rig.runner.result())
        assert not rig.runner.errors
        scheduler.check()

    def launch(self, scheduler, *, heard: bool = True) -> bool:
        """Plan a step, check it and have it run; False: there is none."""
        rig = self.rig
        running, rewound = set(scheduler.queues.running), set(scheduler.queues._rewound)
        plan = scheduler.plan()
        scheduler.check()
        if plan is None:
            assert rig.runner.launched, "nothing is in flight, and nothing is planned"
            return False
        self.check_turns(plan, running, rewound)
        counts = {row.request_id: row.num_scheduled_tokens for row in plan.rows}
        assert len(counts) == len(plan.rows), "a request is twice in a step"
        assert sum(counts.values()) <= rig.config.max_num_batched_tokens
        assert len(counts) <= rig.config.max_num_seqs
        assert all(num > 0 for num in counts.values())
        if heard:
            rig.runner.launch(plan)
        return True

    def settle(self) -> None:
        """Commit what is in flight."""
        while self.rig.runner.launched:
            self.rig.updates += self.rig.scheduler.commit(self.rig.runner.result())
            self.rig.scheduler.check()

    def turn(self, request):
        """Who is first, as the policy says; under "fair" within a tenant."""
        config, arrival = self.rig.config, int(request.request_id)
        if config.policy == "fcfs":
            return 0, arrival
        if math.isinf(config.priority_aging):
            return request.priority, arrival
        return request.arrival_time + request.priority * config.priority_aging, arrival

    def may_wait(self, request, started) -> bool:
        """Whether a step may run nothing of a running request: next to an urgent prompt, also if it
        is one itself and another one starts before it, urgent or earlier in order: whether a
        request is urgent is decided as it arrives, and one that arrives later may be ahead."""
        order = self.rig.scheduler.queues.running.index
        ahead = any(one.urgent for one in started)
        ahead = ahead or all(order(one) < order(request) for one in started)
        urgent = request.urgent and in_prefill(request)
        return self.rig.config.policy != "fcfs" and (ahead or not urgent)

    def check_turns(self, plan, running, rewound) -> None:
        """Nobody starts before one whose turn is earlier, or while one that runs lacks a page.
        Those that were ``rewound`` have been running."""
        started = [
            self.rig.requests[start.request_id]
            for start in plan.started
            if start.spec.negative_of is None
        ]
        started = [request for request in started if request not in rewound]
        if not started:
            return
        counts = {row.request_id for row in plan.rows}
        counts |= {row.request_id for plan, _, _ in self.rig.runner.launched for row in plan.rows}
        for request in self.rig.scheduler.queues.running:
            ran = any(one.request_id in counts for one in request.sequences)
            # those who decode may wait for others who do, to run together
            waits = self.rig.scheduler.batches_in_flight > 1 and not in_prefill(request)
            assert ran or waits or request not in running or self.may_wait(request, started)
        fair = self.rig.config.policy == "fair"
        for request in self.rig.scheduler.queues.waiting:
            others = [one for one in started if not fair or one.tenant == request.tenant]
            early = others and self.turn(request) < max(map(self.turn, others))
            assert not early or request.waits_for is not None, "overtaken"

    def someone(self, data: st.DataObject, *, running: bool = False) -> str | None:
        alive = [
            request_id
            for request_id, request in self.rig.requests.items()
            if not request.finished and (request.pages or not running)
        ]
        return data.draw(st.sampled_from(alive)) if alive else None

    def check_nothing_is_held(self) -> None:
        pinned = self.rig.scheduler.prefixes.num_pinned
        room = self.rig.pool.num_available + pinned
        assert room >= self.rig.pool.capacity, "a page leaked"
        assert room == self.rig.pool.capacity or self.rig.scheduler.tiered_pool is not None
        if (groups := self.rig.scheduler.groups) is not None:
            assert all(pool.claimed == pool.num_pinned for pool in groups.frames)

    @precondition(lambda self: self.rig is not None)
    @invariant()
    def books_balance(self) -> None:
        self.rig.scheduler.check()
        alive = sum(not request.finished for request in self.rig.requests.values())
        queues = self.rig.scheduler.queues
        assert alive == queues.num_running + queues.num_waiting

    def teardown(self) -> None:
        if self.rig is None:
            return
        for _ in range(3000):
            if not self.rig.scheduler.queues.num_running + self.rig.scheduler.queues.num_waiting:
                break
            self.do_step()
        else:
            raise AssertionError("requests starve")
        self.settle()
        self.do_step()  # the ranks hear of the last that ended
        self.check_nothing_is_held()
        assert not self.rig.scheduler.prefixes.pending
        assert not self.rig.runner.requests, "a rank remembers a request that is gone"
        for request_id, request in self.rig.requests.items():
            self.check_answer(request_id, request)

    def check_answer(self, request_id, request) -> None:
        """Against the naive model: a request alone, with all the memory in the world."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        output = request.output_token_ids
        params, config, reason = request.params, self.rig.config, request.finish_reason
        guide = request.negative
        negative = None if guide is None else guide.token_ids[: guide.num_prompt_tokens]
        forbidden = self.forbidden.get(request_id)
        assert output == expected_tokens(prompt, len(output), negative, forbidden)
        updates = [update for update in self.rig.updates if update.request is request]
        sampled = [one.token_id for update in updates for one in update.sampled]
        assert sampled == output, "a token was reported twice or never"
        if request_id in self.ended:
            assert reason == self.ended[request_id]
            return
        if reason == "deadline":
            assert params.deadline is not None and not updates[-1].sampled
            return
        if request.spec.kind == "embed":
            assert reason == "stop" and len(updates[-1].hidden) == len(prompt) and not output
            return
        longest = min(
            config.max_model_len,
            self.rooms[request_id] * config.page_size + 1,
            len(prompt) + (params.max_tokens or config.max_model_len),
            len(prompt)
            + (
                config.max_model_len
                if guide is None
                else self.longest_guided(len(prompt), len(negative), self.rooms[request_id])
            ),
        )
        ends = [i + 1 for i, token in enumerate(output) if token in config.eos_token_ids]
        ends = [end for end in ends if end >= params.min_tokens]
        if reason == "stop":
            assert ends == [len(output)]
        else:
            assert reason == "length" and request.num_tokens == longest and not ends
        if params.prompt_logprobs is not None:
            scored = [entry.token_id for update in updates for entry in update.prompt_logprobs]
            assert scored == prompt[1:], "every prompt position is scored once"
            assert request.num_cached == 0
