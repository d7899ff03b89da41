"""Ranks with window groups and with recurrent states, and plans made by hand.

With frames that only pages in the window have, answers and logits are those with all tokens in
pages; everything outside of the windows is NaN. With states they are those of one request that runs
alone, whatever is drafted and wherever it starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sdk.api.params import SamplingParams
from sdk.engine.plan import (
    Duplicate,
    Frames,
    RequestStart,
    SequenceSpec,
    StateSave,
    StepPlan,
    StepRow,
)
from sdk.engine.rank.kv_cache import KVCache
from sdk.engine.rank.runner import ModelRunner
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.states import LayerState
from sdk.models.parallel import Mesh
from sdk.quant.caches import AttentionCache, pages_in_window
from sdk.quant.spec import KVSpec
from tests.tiny_hybrids import HYBRIDS, tiny_hybrid

PAGE, LONGEST, WINDOW = 16, 512, 20
PROMPTS = [[3 + 7 * i % 200 for i in range(count)] for count in (201, 150, 33)]
#: Of some rows: the drafts of one decode step, the first of which is right or not.
DECODED = 90


@dataclass
class Scheduled:
    """A request of a :class:`Rig`, as a scheduler knows it."""

    name: str
    tokens: list[int]
    num_prompt: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    #: The frames of its pages that have any, by index.
    frames: dict[int, int] = field(default_factory=dict)
    slots: tuple[int, ...] = ()
    initial: int = -1


class Rig:
    """Gives requests pages, and frames only to those that the next tokens see or write."""

    def __init__(self, path: Path, *, windows: bool, states: int = 0, **options) -> None:
        """``states``: the slots of a request, of a model with recurrent states."""
        self.window = None
        if windows:
            options["num_frames"] = (1 + 3 * 8,)
        given = {
            "num_pages": 150,
            "page_size": PAGE,
            "kv_dtype": "float32",
            "max_model_len": LONGEST,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "max_draft_tokens": 6,
            "num_threads": 1,
            "compute": "exact",
            "hf_overrides": {"sliding_window": WINDOW},
        }
        if states:
            given |= {"num_states": 40, "hf_overrides": {}}
        config = RunnerConfig(str(path), **{**given, **options})
        self.runner = ModelRunner(config, Mesh())
        self.free = list(range(config.num_pages - 1, 0, -1))
        self.states, self.free_slots = states, list(range(39, 0, -1))
        if windows:
            [self.window] = self.runner.kv.spec.windows
            self.free_frames = list(range(config.num_frames[0] - 1, 0, -1))
            self._poison(self.free_frames)
        self.requests: dict[str, Scheduled] = {}
        self.step = 0
        self.logits: list[torch.Tensor] = []

    def _poison(self, frames: Sequence[int]) -> None:
        """No token may see what was there."""
        memory = self.runner.kv._memories[1].places
        memory.view(torch.float32)[list(frames)] = torch.nan

    def _make_room(self, request: Scheduled, tokens: int) -> tuple[list[int], list[Frames]]:
        """Pages and frames for the next tokens of a request."""
        end = -(-(request.computed + tokens) // PAGE)
        new = [self.free.pop() for _ in range(len(request.pages), end)]
        request.pages += new
        if self.window is None:
            return new, []
        first = max(request.computed - self.window + 1, 0) // PAGE
        gone = [request.frames.pop(page) for page in list(request.frames) if page < first]
        self._poison(gone)
        self.free_frames += gone
        missing = [page for page in range(first, end) if page not in request.frames]
        frames = [self.free_frames.pop() for _ in missing]
        request.frames |= dict(zip(missing, frames, strict=True))
        assert len(request.frames) <= pages_in_window(self.window, tokens, PAGE)
        return new, [Frames(0, missing[0], tuple(frames))] if missing else []

    def run(
        self,
        counts: dict[str, int],
        drafts: dict[str, tuple[int, ...]] | None = None,
        copies: tuple[Duplicate, ...] = (),
        saves: tuple[StateSave, ...] = (),
    ) -> dict[str, Sequence[int]]:
        """One step with so many known tokens of each request, and drafts behind them."""
        started, new_pages, new_frames, rows = [], [], [], []
        for name, count in counts.items():
            request, more = self.requests[name], (drafts or {}).get(name, ())
            is_new = not request.pages or name not in self.runner._requests
            pages, frames = self._make_room(request, count + len(more))
            if is_new:
                own = [Frames(0, page, (frame,)) for page, frame in sorted(request.frames.items())]
                started.append(
                    RequestStart(
                        SequenceSpec(name, SamplingParams(temperature=0, max_tokens=400)),
                        tuple(request.tokens),
                        request.num_prompt,
                        request.computed,
                        tuple(request.pages),
                        LONGEST,
                        frames=tuple(own),
                        state_slots=request.slots,
                        initial_state=request.initial,
                    )
                )
            else:
                new_pages += [(name, tuple(pages))] if pages else []
                new_frames += [(name, one) for one in frames]
            ends = request.computed + count == len(request.tokens)
            rows.append(StepRow(name, count + len(more), (1 + len(more)) * ends, more))
        last = self.runner._last_step
        same = last is not None and list(last.plan.rows) == rows
        kept = last.plan.rows if same else tuple(rows)
        plan = StepPlan(
            self.step,
            kept,
            tuple(started),
            tuple(new_pages),
            (),
            copies,
            (),
            tuple(new_frames),
            saves,
        )
        launched = self.runner.launch(plan)
        result = launched.result()
        assert not result.errors
        self.step += 1
        found = {}
        for (name, count), tokens in zip(counts.items(), result.tokens, strict=True):
            request = self.requests[name]
            request.tokens += tokens
            request.computed += count + max(len(tokens) - 1, 0)
            found[name] = tokens
        return found

    def add(self, name: str, tokens: Sequence[int]) -> None:
        made = self.requests[name] = Scheduled(name, list(tokens), len(tokens))
        made.slots = tuple(self.free_slots.pop() for _ in range(self.states))

    def fork(self, source: str, name: str, tokens: Sequence[int]) -> tuple[Duplicate, ...]:
        """A request that goes on with ``tokens`` where another one is: it has the same full pages
        and frames, and copies of what is in the last page."""
        first = self.requests[source]
        full = first.computed // PAGE
        known = first.tokens[: first.computed]
        made = Scheduled(name, known + list(tokens), len(known) + len(tokens))
        self.requests[name] = made
        made.pages, made.computed = [*first.pages[:full], self.free.pop()], len(known)
        copies = [Duplicate(first.pages[full], made.pages[full])]
        if self.window is not None:
            made.frames = {page: first.frames[page] for page in first.frames if page < full}
            made.frames[full] = self.free_frames.pop()
            copies.append(Duplicate(first.frames[full], made.frames[full], group=0))
        return tuple(copies)

    def state(self, name: str) -> list[torch.Tensor]:
        """The current recurrent states of a request."""
        request = self.runner._requests[name]
        slot = request.state_slots[request.current_slot]
        layers = [one for one in self.runner.kv.layers if isinstance(one, LayerState)]
        assert layers
        return [part[slot].clone() for one in layers for part in one.parts.values()]

    def close(self) -> None:
        self.runner.close()


@contextlib.contextmanager
def rig(path: Path, **options):
    made = Rig(path, **options)
    try:
        yield made
    finally:
        made.close()


def answers(made: Rig) -> tuple[list[list[int]], torch.Tensor]:
    """Prompts in chunks, then plain decode steps, with drafts in some, far beyond the window."""
    for name, prompt in zip("abc", PROMPTS, strict=True):
        made.add(name, prompt)
    steps = [{"a": 48}, {"a": 48, "b": 33}, {"a": 48, "b": 48, "c": 20}, {"a": 48, "b": 48}]
    for counts in [*steps, {"a": 9, "b": 21, "c": 13}]:
        made.run(counts)
    for index in range(DECODED):
        drafts = {}
        if index % 20 == 7:  # what the model said before, and something else
            drafts = {"a": tuple(made.requests["a"].tokens[-3:]), "c": (5, 6)}
        made.run(dict.fromkeys("abc", 1), drafts)
    scored = [*made.runner.prompt_logits(made.requests["a"].tokens[:300])]
    logits = torch.cat([part.clone() for part in scored])
    return [made.requests[name].tokens for name in "abc"], logits


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_frames_give_the_same_answers_and_logits(golden: Path, eager: bool, kv_dtype: str) -> None:
    path, options = golden / "arch-gemma3" / "hf", {"enforce_eager": eager, "kv_dtype": kv_dtype}
    with rig(path, windows=False, **options) as made:
        tokens, logits = answers(made)
    with rig(path, windows=True, **options) as made:
        assert made.window == WINDOW
        assert isinstance(made.runner.strategy.eager_reason, str) == eager
        found, found_logits = answers(made)
        assert len(found[0]) > 10 * WINDOW
    assert found == tokens
    assert torch.equal(found_logits, logits)


def test_a_request_continues_from_shared_frames_and_a_copied_one(golden: Path) -> None:
    found = []
    for windows in (False, True):
        with rig(golden / "arch-gemma3" / "hf", windows=windows) as made:
            made.add("a", PROMPTS[0])
            for count in (48, 48, 48, 48, 9, 1, 1, 1):
                made.run({"a": count})
            copies = made.fork("a", "b", range(9, 40))
            assert len(copies) == 1 + windows
            first = made.run({"b": 31}, copies=copies)
            tokens = [made.run({"b": 1})["b"] for _ in range(40)]
            found.append((first, tokens))
    assert found[0] == found[1]
    with rig(golden / "arch-gemma3" / "hf", windows=True) as alone:  # nothing is shared there
        own = [*made.requests["b"].tokens[: made.requests["b"].num_prompt]]
        alone.add("b", own)
        for begin in range(0, len(own), 48):
            last = alone.run({"b": min(48, len(own) - begin)})
        assert last == found[1][0]
        assert [alone.run({"b": 1})["b"] for _ in range(40)] == found[1][1]


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with recurrent states."""
    return tiny_hybrid(request.param, tmp_path_factory.mktemp(request.param))


def alone(path: Path, prompt: Sequence[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
    """The answer of a request that runs alone, a whole prompt at once, and its last states."""
    with rig(path, windows=False, states=1, max_num_batched_tokens=256) as made:
        made.add("a", prompt)
        made.run({"a": len(prompt)})
        for _ in range(count):
            made.run({"a": 1})
        return made.requests["a"].tokens, made.state("a")


def guesses(tokens: Sequence[int], known: int) -> tuple[int, ...]:
    """Drafts behind ``known`` tokens: none, all right, the first one right, all wrong."""
    next_ = tokens[known : known + 5]
    if len(next_) < 5:
        return ()
    return ((), tuple(next_[:3]), (next_[0], 255 - next_[1], 7), (255 - next_[0], 1))[
        known // 3 % 4
    ]


@pytest.mark.parametrize("eager", [False, True])
def test_states_follow_accepted_drafts_and_go_on_from_snapshots(hybrid: Path, eager: bool) -> None:
    prompt = PROMPTS[0]
    tokens, state = alone(hybrid, prompt, 40)
    assert len(set(tokens[len(prompt) :])) > 5
    with rig(hybrid, windows=False, states=4, enforce_eager=eager) as made:
        made.add("a", prompt)
        made.add("b", PROMPTS[1])
        places = [32, 48, 157]  # within a chunk, at its end, and within a page
        snapshots = [made.free_slots.pop() for _ in places]
        saves = [StateSave("a", *one) for one in zip(places, snapshots, strict=True)]
        made.run({"a": 48, "b": 20}, saves=tuple(saves[:2]))
        made.run({"b": 20, "a": 100})
        made.run({"a": len(prompt) - 148, "b": 1}, saves=(saves[2],))
        a = made.requests["a"]
        while len(a.tokens) < len(tokens):
            made.run({"a": 1, "b": 1}, {"a": guesses(tokens, len(a.tokens))})
        assert a.tokens == tokens
        assert all(map(torch.equal, made.state("a"), state))
        for place, slot in zip(places, snapshots, strict=True):
            made.add(f"from {place}", prompt)
            request, full = made.requests[f"from {place}"], place // PAGE
            request.computed, request.initial, copies = place, slot, []
            request.pages = a.pages[:full]
            if place % PAGE:
                request.pages.append(made.free.pop())
                copies.append(Duplicate(a.pages[full], request.pages[full]))
            made.run({request.name: 40}, copies=tuple(copies))
            while request.computed + 1 < len(prompt):
                made.run({request.name: min(len(prompt) - request.computed, 100)})
            for _ in range(12):
                made.run({request.name: 1})
            assert request.tokens == tokens[: len(request.tokens)]


def test_a_cache_needs_frames_for_each_of_its_window_groups() -> None:
    spec = KVSpec(1, 1, 32, PAGE, caches=(AttentionCache(1, 32, 32, 8),), windows=(8,))
    assert KVCache(spec, 3, num_frames=(5,)).pages[0].k.shape[0] == 5
    with pytest.raises(ValueError, match="expected frames of 1 window groups, found"):
        KVCache(spec, 3)
