"""A rank without a model: its KV is a record of what was written where, its tokens are hashes of
it.

The KV value of a position is a hash of all KV values before it, as read back through the page
table, and of the token; the next token is a hash of the last value. So a wrong page, a stale one,
one that was never written, a missed token or a wrong position changes every token that follows, and
``expected_tokens`` says what a request must produce whatever happens around it.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from types import SimpleNamespace

import numpy as np

from sdk.api.logprobs import Logprobs, Sampled
from sdk.engine.plan import Duplicate, StateCopy, StepPlan, StepResult, StepRow, Swap
from sdk.engine.scheduling.drafts import Drafter
from sdk.kernels.kv.tiers import page_id, page_tier

VOCAB = 1000
LEVELS = 3


def _value(before: list[bytes], token: int) -> bytes:
    digest = blake2b(digest_size=8)
    for value in before:
        digest.update(value)
    digest.update(token.to_bytes(4, "little"))
    return digest.digest()


def _token(*values: bytes) -> int:
    """From the last value; a guided request has its own and its guide's."""
    return sum(int.from_bytes(value, "little") for value in values) % VOCAB


def _scored(token: int, logprob: float) -> Sampled:
    """A token of rank 1, and nothing beside it."""
    arrays = np.array([token], np.int32), np.array([logprob], np.float32), np.ones(1, np.int32)
    return Sampled(token, logprob, 1, Logprobs(*arrays, 0.0))


def _allowed(token: int, forbidden: tuple[int, ...]) -> int:
    """The next token that is not forbidden."""
    while token in forbidden:
        token = (token + 1) % VOCAB
    return token


def expected_tokens(
    prompt: list[int],
    num: int,
    negative: list[int] | None = None,
    forbidden: dict[int, tuple[int, ...]] | None = None,
) -> list[int]:
    """The answer of a request that runs alone, in one piece, in pages nobody touched before.

    ``forbidden``: tokens that a position of the answer must not have.
    """
    answer: list[int] = []
    prompts = [prompt] if negative is None else [prompt, negative]
    values: list[list[bytes]] = [[] for _ in prompts]
    for _ in range(num):
        for known, start in zip(values, prompts, strict=True):
            for token in [*start, *answer][len(known) :]:
                known.append(_value(known, token))
        token = _token(*(known[-1] for known in values))
        answer.append(_allowed(token, (forbidden or {}).get(len(answer), ())))
    return answer


class ScriptedDrafter(Drafter):
    """Knows how each answer goes on, and says so, or something else from some token on."""

    def propose(self, request, most):
        known = request.num_tokens
        prompt = request.token_ids[: request.num_prompt_tokens]
        answer = expected_tokens(prompt, request.num_output_tokens + most)
        right = answer[request.num_output_tokens :]
        count = known * 7 % (most + 2)  # right ones; one more than there are: all of them
        wrong = [(token + 1) % VOCAB for token in right[count:]]
        return (right[:count] + wrong)[: known % 5]  # sometimes fewer, or none


class FakeRunner:
    """An executor. It knows only what the plans told it, and complains about plans that lie."""

    ops = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    drafting = None

    def __init__(self, page_size: int, num_pages: int, published=None, groups=None) -> None:
        self.groups = groups  # the memory of window groups and states, if there are any
        self.page_size = page_size
        self.num_pages = num_pages
        self.published = published or (lambda page: False)  # may this page still be written?
        self.slots: dict[tuple[int, int], bytes] = {}
        self.swapped: dict[tuple[int, int], bytes] = {}
        self.requests: dict[str, dict] = {}
        self.plans: list[StepPlan] = []
        self.errors: dict[str, str] = {}  # to be returned with the next step
        self.failure: BaseException | None = None  # to be raised by the next step
        self.started = self.closed = 0
        self.computed: list[bytes] = []  # the values of all tokens that ran, in order
        self.launched: deque = deque()  # plans, results, states
        self.native_seconds = 0.0

    def start(self) -> None:
        self.started += 1

    def close(self) -> None:
        self.closed += 1

    @property
    def num_repeated(self) -> int:
        """Tokens that were computed although they had been before, after the same tokens."""
        return len(self.computed) - len(set(self.computed))

    @property
    def kv(self):
        return self

    can_vacate = True  # page by page, as on a CPU

    def vacate(self, pages) -> None:
        for page in pages:
            for offset in range(self.page_size):
                self.slots.pop((page, offset), None)

    def on_ranks(self, function, *args) -> list:
        return [function(self, *args)]

    def launch(self, plan: StepPlan) -> None:
        """Steps run in order, so this one runs now; the requests learn of it with the result."""
        self.plans.append(plan)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            self.launched.clear()
            raise failure
        self.launched.append(self._step(plan))

    def result(self) -> StepResult:
        _, result, states = self.launched.popleft()
        for state, tokens in zip(states, result.tokens, strict=True):
            for one in (state, state["negative"]):
                if one is not None and tokens:
                    one["tokens"] += tokens
                    one["computed"] += len(tokens) - 1
                    one["current"] += len(tokens) if one["drafted"] else 0
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        self.launch(plan)
        return self.result()

    def _step(self, plan: StepPlan):
        for one in plan.copies:
            if isinstance(one, Swap):
                self._swap(one)
            elif isinstance(one, Duplicate):
                self._duplicate(one)
            elif isinstance(one, StateCopy):
                self.groups.copy_state(one)
            else:
                self._move(*one)
        if plan.vacated:
            self.vacate(plan.vacated[0])
            self.groups.vacate(plan.vacated)
        for request_id, pages in plan.new_pages:
            self.requests[request_id]["pages"] += pages
        for request_id, frames in plan.new_frames:
            self.groups.add(self.requests[request_id], frames)
        for request_id in plan.dropped:
            self.requests.pop(request_id, None)
        for start in plan.started:
            assert start.request_id not in self.requests, "started twice"
            assert start.num_computed < len(start.token_ids), "nothing to run"
            self.requests[start.request_id] = {
                "tokens": list(start.token_ids),
                "computed": start.num_computed,
                "pages": list(start.pages),
                "start": start,
                "negative": None,
                "frames": {},
                "current": 0,
                "drafted": False,
                "has_run": False,
            }
            for frames in start.frames:
                self.groups.add(self.requests[start.request_id], frames)
            if start.spec.negative_of is not None:
                self.requests[start.spec.negative_of]["negative"] = self.requests[start.request_id]
        assert not plan.sampled, "this rank samples itself"
        if self.groups is not None:
            self.groups.begin(plan)
        scored, hidden = {}, {}
        states = [self.requests[row.request_id] for row in plan.rows]
        busy = [id(one) for _, _, others in self.launched for one in others]
        for row, state in zip(plan.rows, states, strict=True):
            assert row.num_scheduled_tokens > 0, "a step of no tokens"
            assert id(state) not in busy, "in flight twice"
            self._run(row, state, scored, hidden)
        tokens, details = self._sample(plan.rows, states)
        errors, self.errors = self.errors, {}
        return plan, StepResult(plan.step_id, tokens, details, scored, hidden, errors), states

    def _slot(self, pages: list[int], position: int) -> tuple[int, int]:
        page = pages[position // self.page_size]
        tier, index = page_tier(page)
        assert 0 < index >> tier < self.num_pages, "no such page"
        return page, position % self.page_size

    def _swap(self, one: Swap) -> None:
        """What lay in the memory of the target, also as pages of another tier, is lost."""
        if self.groups is not None:
            self.groups.swap(one, self.slots)
            return
        [slot], page = one.slots, one.page
        assert not one.region, "no such region"
        assert page_tier(page)[0] == page_tier(slot)[0], "a page and a slot of another size"
        source, target = (self.slots, self.swapped) if one.out else (self.swapped, self.slots)
        begin, end = (page, slot) if one.out else (slot, page)
        for offset in range(self.page_size):
            self._write(end, offset, source[begin, offset], target)

    def _move(self, source: int, target: int) -> None:
        """Of a tiered cache; what lay in the memory of the target is lost."""
        values = [self.slots[source, i] for i in range(self.page_size)]
        tier, _ = page_tier(target)
        assert page_tier(source)[0] in (tier - 1, tier), "a page went up or two steps down"
        for offset, value in enumerate(values):
            self._write(target, offset, value, self.slots)
        for state in self.requests.values():
            state["pages"] = [target if page == source else page for page in state["pages"]]

    def _duplicate(self, one: Duplicate) -> None:
        """Both pages stay; what lay in the memory of the target is lost."""
        source, target, group = one
        if group is not None:
            self.groups.duplicate(group, source, target)
            return
        assert page_tier(source)[0] == page_tier(target)[0] == 0, "a copy of recoded values"
        values = [self.slots.get((source, i), b"unwritten") for i in range(self.page_size)]
        for offset, value in enumerate(values):
            self._write(target, offset, value, self.slots)

    def _write(self, page: int, offset: int, value: bytes, slots: dict) -> None:
        tier, index = page_tier(page)
        for other in range(LEVELS):
            first = index << other - tier if other > tier else index >> tier - other
            for part in range(1 << max(other - tier, 0)) if other != tier else ():
                for i in range(self.page_size):
                    slots.pop((page_id(other, first + part), i), None)
        slots[page, offset] = value

    def _sample(self, rows, states):
        """The token behind each output; drafts are accepted while they equal these."""
        guides = {}
        for row, state in zip(rows, states, strict=True):
            if row.num_output_rows and state["start"].spec.negative_of is not None:
                guides[state["start"].spec.negative_of] = state["values"][-1]
        sampled, details = [], {}
        for row, state in zip(rows, states, strict=True):
            start, found = state["start"], []
            sampled.append(found)
            assert row.num_output_rows in (0, 1 + len(row.drafts)), "drafts without outputs"
            if not row.num_output_rows or start.spec.negative_of is not None:
                continue
            guided = row.request_id in guides
            assert guided == (start.spec.params.guidance_scale != 1), "no guide"
            more = [guides.pop(row.request_id)] if guided else []
            for value, draft in zip(
                state["values"][-row.num_output_rows :], [*row.drafts, None], strict=True
            ):
                begins = len(state["tokens"]) + len(found) == len(start.token_ids)
                found.append(_allowed(_token(value, *more), start.forbidden if begins else ()))
                if found[-1] != draft:
                    break
            if start.spec.params.logprobs is not None:
                details[row.request_id] = [_scored(token, -0.5) for token in found]
        assert not guides, "a guide completes without its request"
        return sampled, details

    def _run(self, row: StepRow, state, scored, hidden) -> None:
        request_id, start = row.request_id, state["start"]
        known, begin = state["tokens"], state["computed"]
        pages, tokens = state["pages"], [*known, *row.drafts]
        end = begin + row.num_scheduled_tokens
        state["computed"] = end - len(row.drafts)
        assert end <= len(tokens), "more tokens than are known"
        assert not row.drafts or end == len(tokens), "drafts behind a hole"
        ends = start.spec.kind == "generate" and end == len(tokens)
        assert bool(row.num_output_rows) == ends, "an output in the wrong place"
        values = [self.slots.get(self._slot(pages, i), b"unwritten") for i in range(begin)]
        least = start.spec.params.kv_min_bits or 0
        assert all(16 >> page_tier(page)[0] >= least for page in pages), "below its floor"
        for position in range(begin, end):
            slot = self._slot(pages, position)
            assert not page_tier(slot[0])[0], "a page of a lower type is written"
            assert not self.published(slot[0]), "a page others may read is written"
            values.append(_value(values, tokens[position]))
            self._write(*slot, values[-1], self.slots)
            self.computed.append(values[-1])
        state["values"] = values
        if self.groups is not None:
            self.groups.run(row, state, begin, values)
        if start.spec.params.prompt_logprobs is not None and begin < start.num_prompt_tokens:
            last = min(end, start.num_prompt_tokens - 1)
            scored[request_id] = tuple(
                _scored(tokens[i + 1], -float(i + 1)) for i in range(begin, last)
            )
        if end == len(tokens) and start.spec.kind == "embed":
            hidden[request_id] = [float(_token(value)) for value in values]


class GroupMemory:
    """The frames and slots of a rank, in which each token's value and each state is written.

    A row must find in its frames the values that the pages have, as far as its windows reach, and
    in its slot the state after the tokens before. In one plan no row may read or write what another
    one writes.
    """

    def __init__(self, config, attached=None) -> None:
        self.page_size = config.page_size
        self.windows = config.windows
        self.states = config.states
        self.attached = attached or (lambda group, frame: False)  # may it still be written?
        self.values: dict[tuple[int, int, int], bytes] = {}  # by group, frame, offset
        self.slots: dict[int, bytes] = {}
        self.rounded: dict[int, bytes] = {}  # exact here: only where they are is tested
        self.most_held = [0] * len(config.windows)
        self.swap_parts, self.num_swap_slots = config.swap_parts, config.num_swap_pages
        self.swapped: dict[int, tuple[int, int, list[bytes]]] = {}

    def add(self, state, frames) -> None:
        """New frames of a request."""
        assert all(0 < frame < self.windows[frames.group].num_frames for frame in frames.frames)
        for index, frame in enumerate(frames.frames, frames.first):
            state["frames"][frames.group, index] = frame

    def swap(self, one: Swap, pages: dict) -> None:
        """Copy a place to or from its slots, each with a part of it that is told from others."""
        assert len(one.slots) == self.swap_parts[one.region], "a place of another size"
        size = range(self.page_size)
        if one.region == 1 + len(self.windows):
            rounds = self.states is not None and self.states.num_rounded
            memory, places = self.rounded if rounds else self.slots, [one.page]
        elif one.region:
            memory, places = self.values, [(one.region - 1, one.page, i) for i in size]
        else:
            memory, places = pages, [(one.page, i) for i in size]
        if one.out:
            content = [memory.get(place, b"unwritten") for place in places]
            for number, slot in enumerate(one.slots):
                assert 0 <= slot < self.num_swap_slots, "no such slot"
                self.swapped[slot] = (one.region, number, content)
            return
        parts = [self.swapped[slot] for slot in one.slots]
        content = parts[0][2]
        for number, part in enumerate(parts):
            assert part == (one.region, number, content), "a slot has another content"
            assert part[2] is content, "parts of different copies"
        for place, value in zip(places, content, strict=True):
            memory[place] = value

    def copy_state(self, one: StateCopy) -> None:
        """Between a slot and a snapshot in 16 bits."""
        assert 0 < one.slot < self.states.num_slots, "no such slot"
        assert 0 < one.place < self.states.num_rounded, "no such place"
        if one.out:
            self.rounded[one.place] = self.slots.get(one.slot, b"unwritten")
        else:
            self.slots[one.slot] = self.rounded.get(one.place, b"unwritten")

    def duplicate(self, group: int, source: int, target: int) -> None:
        for offset in range(self.page_size):
            value = self.values.get((group, source, offset), b"unwritten")
            self.values[group, target, offset] = value

    def vacate(self, vacated) -> None:
        """The memory of these was given to another kind."""
        for group, frames in enumerate(vacated[1 : 1 + len(self.windows)]):
            for frame in frames:
                for offset in range(self.page_size):
                    self.values.pop((group, frame, offset), None)
        slots, places = vacated[1 + len(self.windows) :]
        for slot in slots:
            self.slots.pop(slot, None)
        for place in places:
            self.rounded.pop(place, None)

    def begin(self, plan: StepPlan) -> None:
        self.reads: dict[tuple, str] = {}
        self.writes: dict[tuple, str] = {}
        self.saves: dict[str, list] = {}
        for save in plan.state_saves:
            assert 0 < save.slot < self.states.num_slots
            self.saves.setdefault(save.request_id, []).append(save)
        assert self.saves.keys() <= {row.request_id for row in plan.rows}, "saved without a row"

    def note(self, places: dict, others: tuple[dict, ...], place: tuple, name: str) -> None:
        for one in others:
            assert one.get(place, name) == name, "a row writes what another one needs"
        places[place] = name

    def run(self, row: StepRow, state, begin: int, values: list[bytes]) -> None:
        name, end = row.request_id, len(values)
        for group, one in enumerate(self.windows):
            for position in range(max(begin + 1 - one.window, 0), end):
                index, offset = divmod(position, self.page_size)
                assert (group, index) in state["frames"], "a page in the window has no frame"
                frame = state["frames"][group, index]
                if position >= begin:
                    assert not self.attached(group, frame), "a frame others may read is written"
                    self.note(self.writes, (self.reads, self.writes), (group, frame), name)
                    self.values[group, frame, offset] = values[position]
                else:
                    self.note(self.reads, (self.writes,), (group, frame), name)
                found = self.values.get((group, frame, offset))
                assert found == values[position], "a frame has another content"
        if self.states is not None:
            self.run_state(row, state, begin, values)

    def run_state(self, row: StepRow, state, begin: int, values: list[bytes]) -> None:
        name, slots, start = row.request_id, state["start"].state_slots, state["start"]
        assert len(slots) == self.states.drafts + 1 and len(row.drafts) <= self.states.drafts
        current = state["current"] % len(slots)
        slot = slots[current] if state["has_run"] else start.initial_state
        if slot < 0:
            assert not begin, "a state begins in the middle"
        else:
            self.note(self.reads, (self.writes,), (slot,), name)
            assert begin and self.slots.get(slot) == values[begin - 1], "a wrong state"
        state["has_run"], state["drafted"] = True, bool(row.drafts)
        written = {current: values[-1]}
        if row.drafts:
            written = {
                (current + 1 + i) % len(slots): value for i, value in enumerate(values[begin:])
            }
        for index, value in written.items():
            self.note(self.writes, (self.reads, self.writes), (slots[index],), name)
            self.slots[slots[index]] = value
        for save in self.saves.get(name, ()):
            assert begin < save.num_tokens <= len(values) - len(row.drafts), "saved elsewhere"
            assert (save.slot,) not in self.writes, "a slot is written twice"
            self.note(self.writes, (self.reads,), (save.slot,), name)
            self.slots[save.slot] = values[save.num_tokens - 1]
