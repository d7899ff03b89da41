"""Random calls from many threads and an event loop, against the same calls one after the other.

``EMBEDLM_SOAK_CALLS`` makes it longer (default 120 calls), ``EMBEDLM_SOAK_SEED`` repeats a run: the
seed is printed with every failure.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, OutOfMemoryError, RequestError, RequestOutput, SamplingParams
from tests.api.engines import LIMIT, books, settle

CALLS = int(os.environ.get("EMBEDLM_SOAK_CALLS", "120"))
SEED = int(os.environ.get("EMBEDLM_SOAK_SEED", random.SystemRandom().randrange(10**6)))
THREADS = 4


class Refusal(Exception):
    """What a raising processor raises."""


def raising(generated: Any, logits: Any) -> Any:
    if len(generated) == 3:
        raise Refusal
    return logits


#: What answers are drawn with; all are seeded, so that they can be repeated.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"top_p": 0.9, "top_k": 50},
    {"mirostat_mode": 2, "mirostat_tau": 3.0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"dry_multiplier": 1.5, "xtc_probability": 0.3},
    {"no_repeat_ngram_size": 3, "min_tokens": 4, "stop_token_ids": list(range(3, 40))},
    {"stop": ["e", "th"]},
    {"banned_strings": ["e", "th", "a"], "stop": ["ro"]},
    {"n": 2, "logprobs": 1},
    {"guidance_scale": 1.4, "mirostat_mode": 2},
    {"prompt_logprobs": 1},
]


@dataclass(frozen=True)
class Call:
    """One call: how, of which prompt, with which parameters, and how far it is read."""

    number: int
    how: str
    prompt: list[int]
    params: SamplingParams
    priority: int
    leave_after: int

    @property
    def whole(self) -> bool:
        """Whether its answer must be that of a single-threaded run."""
        return self.how in ("generate", "stream", "agenerate", "astream", "enqueue")


def make_calls(rng: random.Random) -> list[Call]:
    hows = ["generate", "stream", "agenerate", "astream", "enqueue"] * 3
    hows += ["embed", "leave", "aleave", "cancel", "raise", "deadline", "refused"]
    prefixes = [[rng.randrange(3, 400) for _ in range(40)] for _ in range(4)]
    calls = []
    for number in range(CALLS):
        how = rng.choice(hows)
        prompt = rng.choice(prefixes)[: rng.randrange(1, 41)]
        prompt = prompt + [rng.randrange(3, 400) for _ in range(rng.randrange(0, 20))]
        params = SamplingParams(
            **{"seed": number, "max_tokens": rng.randrange(4, 40), **rng.choice(KINDS)}
        )
        if how == "raise":
            params = params.clone(max_tokens=20, logits_processors=[raising], min_tokens=10)
        elif how == "deadline":
            params = params.clone(deadline=rng.choice([0.001, 0.01, 0.1]))
        priority, leave = rng.randrange(3), rng.randrange(0, 4)
        calls.append(Call(number, how, prompt, params, priority, leave))
    return calls


def facts(output: RequestOutput) -> list[tuple[object, ...]]:
    return [(one.token_ids, one.finish_reason, one.text) for one in output.outputs]


def merged(pieces: list[RequestOutput]) -> list[tuple[object, ...]]:
    """The answers whose parts these are."""
    ids: dict[int, list[int]] = {}
    text: dict[int, str] = {}
    reason: dict[int, str] = {}
    for piece in pieces:
        for one in piece.outputs:
            assert one.index not in reason, "news of an answer that has ended"
            ids[one.index] = ids.get(one.index, []) + one.token_ids
            text[one.index] = text.get(one.index, "") + one.text
            if one.finish_reason is not None:
                reason[one.index] = one.finish_reason
    assert pieces[-1].finished and len(reason) == len(ids)
    return [(ids[i], reason[i], text[i]) for i in sorted(ids)]


@dataclass
class Soak:
    """The calls on one engine; ``answers`` by call number, each exactly once."""

    llm: LLM
    answers: dict[int, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    enqueued: dict[str, int] = field(default_factory=dict)
    collected: dict[str, RequestOutput] = field(default_factory=dict)

    def answer(self, call: Call, value: Any) -> None:
        assert call.number not in self.answers, f"{call} was answered twice"
        self.answers[call.number] = value

    def run(self, call: Call) -> None:
        """A call of a thread."""
        llm, prompt, params = self.llm, {"prompt_token_ids": call.prompt}, call.params
        if call.how == "stream":
            pieces = list(llm.stream(prompt, params, priority=call.priority))
            self.answer(call, merged(pieces))
        elif call.how == "embed":
            self.answer(call, llm.embed(prompt)[0].embedding)
        elif call.how == "leave":
            stream = llm.stream(prompt, params.clone(max_tokens=200, ignore_eos=True))
            for _ in range(call.leave_after):
                next(stream, None)
            del stream
            self.answer(call, None)
        elif call.how == "refused":
            with pytest.raises(RequestError):
                llm.generate({"prompt_token_ids": [10**6]}, params)
            self.answer(call, None)
        elif call.how == "enqueue":
            [name] = llm.enqueue(prompt, params, priority=call.priority)
            self.enqueued[name] = call.number
            self.collect(llm.wait_for_completion())  # perhaps another thread's too
        else:
            [output] = llm.generate(prompt, params, priority=call.priority)
            assert output.finished
            reasons = {one.finish_reason for one in output.outputs}
            if call.how == "raise":
                assert reasons == {"error"}, output
            self.answer(call, facts(output))

    def collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                assert output.request_id not in self.collected, "an answer came twice"
                self.collected[output.request_id] = output

    async def run_async(self, call: Call) -> None:
        """A call of an event loop."""
        llm, prompt, params = self.llm, {"prompt_token_ids": call.prompt}, call.params
        if call.how == "agenerate":
            [output] = await llm.agenerate(prompt, params, priority=call.priority)
            self.answer(call, facts(output))
        elif call.how == "astream":
            stream = llm.astream(prompt, params, priority=call.priority)
            self.answer(call, merged([piece async for piece in stream]))
        elif call.how == "aleave":
            stream = llm.astream(prompt, params.clone(max_tokens=200, ignore_eos=True))
            if call.leave_after:
                async for _ in stream:
                    break
                await stream.aclose()
            self.answer(call, None)
        else:
            task = asyncio.ensure_future(llm.agenerate(prompt, params.clone(max_tokens=200)))
            await asyncio.sleep(call.leave_after * 0.002)
            in_time = task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                assert in_time
            else:
                assert not in_time, "an answer of a call that was cancelled"
            self.answer(call, None)


ASYNC = ("agenerate", "astream", "aleave", "cancel")


def together(soak: Soak, calls: list[Call], disturb: Callable[[], None]) -> None:
    """Run the calls from threads and an event loop, while ``disturb`` is called again and again."""
    waiting = [call for call in calls if call.how not in ASYNC]
    lock, ended = threading.Lock(), threading.Event()

    def work(do: Callable[[], Any]) -> None:
        try:
            do()
        except BaseException as error:
            soak.errors.append(f"{type(error).__name__}: {error}")

    def calling() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                call = waiting.pop()
            work(lambda call=call: soak.run(call))

    def looping() -> None:
        async def main() -> None:
            seats = asyncio.Semaphore(6)

            async def one(call: Call) -> None:
                async with seats:
                    await soak.run_async(call)

            await asyncio.gather(*(one(call) for call in calls if call.how in ASYNC))

        work(lambda: asyncio.run(main()))

    def disturbing() -> None:
        while not ended.wait(0.01):
            work(disturb)

    threads = [threading.Thread(target=calling, daemon=True) for _ in range(THREADS)]
    threads.append(threading.Thread(target=looping, daemon=True))
    other = threading.Thread(target=disturbing, daemon=True)
    for thread in (*threads, other):
        thread.start()
    for thread in threads:
        thread.join(LIMIT + CALLS)
        assert not thread.is_alive(), "a call hangs"
    ended.set()
    other.join(LIMIT)
    assert not other.is_alive(), "a disturbance hangs"


def disturbances(soak: Soak, rng: random.Random) -> Callable[[], None]:
    """Something an operator does while requests run, at random."""
    llm, plan = soak.llm, soak.llm.memory_plan
    prefix = {"prompt_token_ids": [5 + i for i in range(2 * books(llm).config.page_size)]}
    kept: list[Any] = []

    def resize() -> None:
        llm.resize(plan.serving - rng.randrange(0, plan.num_pages // 3) * plan.page_bytes)

    def snapshot() -> None:
        kept[:] = [llm.snapshot(prefix)]

    def restore() -> None:
        for one in kept:
            llm.restore(one)

    def pin() -> None:
        llm.pin(prefix)
        llm.unpin(prefix)

    actions = [resize, llm.trim, snapshot, restore, llm.reset_prefix_cache, llm.get_metrics]
    actions += [pin, lambda: soak.collect(llm.pump(1)), gc.collect]

    def disturb() -> None:
        with suppress(OutOfMemoryError, RequestError):  # no room for it beside what runs
            rng.choice(actions)()

    return disturb


ENGINES: dict[str, dict[str, Any]] = {
    "few pages": {"pages": 16},
    "priorities and a swap file": {"pages": 16, "scheduling_policy": "priority", "swap": 40},
    "tiers with swap space": {"pages": 10, "kv_policy": "fp16>int8>int4", "swap": 6},
}


def open_engine(path: Path, folder: Path, pages: int, swap: int = 0, **options: Any) -> LLM:
    page = LLM.plan(path, max_model_len=128, **options).page_bytes
    if swap:
        options["swap_space"] = swap * page
        options["swap_path"] = None if "kv_policy" in options else folder
    return LLM(
        path,
        max_model_len=128,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        kv_cache_memory_bytes=pages * page,
        **options,
    )


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return make_calls(random.Random(SEED))


@pytest.fixture(scope="module")
def alone(tiny: LLM, calls: list[Call]) -> dict[int, Any]:
    """The answers of a single thread, one call after the other."""
    answers = {}
    for call in calls:
        if call.whole:
            answers[call.number] = facts(tiny.generate([call.prompt], call.params)[0])
    return answers


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_random_calls_are_answered_once_and_as_by_a_single_thread(
    tiny_path: Path,
    tmp_path: Path,
    calls: list[Call],
    alone: dict[int, Any],
    engine: dict[str, Any],
) -> None:
    print(f"EMBEDLM_SOAK_SEED={SEED}")
    with open_engine(tiny_path, tmp_path, **engine) as llm:
        soak = Soak(llm)
        half = len(calls) // 2
        for level, some in ((1, calls[:half]), (2, calls[half:])):
            together(soak, some, disturbances(soak, random.Random(SEED)))
            soak.collect(llm.wait_for_completion())
            settle(llm)
            llm.sleep(level)
            llm.wake_up()
            settle(llm)
    assert soak.errors == []
    for name, output in soak.collected.items():
        soak.answers[soak.enqueued[name]] = facts(output)
    assert sorted(soak.answers) == [call.number for call in calls]
    if "kv_policy" not in engine:  # with tiers, answers depend on what the pages have lost
        wrong = [
            call for call in calls if call.whole and soak.answers[call.number] != alone[call.number]
        ]
        assert wrong == []
