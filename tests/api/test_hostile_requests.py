"""Hostile requests beside running ones: each ends in an error of its own, nobody else notices.

To add a case, write a line into ``PROMPTS`` (what a caller may hand over as a prompt),
``CONVERSATIONS`` (messages and options of a chat) or ``PARAMETERS`` (fields of ``SamplingParams``).
A case is refused with a public error. ``ACCEPTED`` are expensive and allowed: they are answered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from sdk import LLM, RequestError, SamplingParams
from tests.api.engines import LIMIT, SHORT, ids, tokens

STREAMS = 3
ENDLESS = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)


class Hostile:
    """Raises from everything that reading it may call."""

    def _raise(self, *args: Any) -> Any:
        raise ZeroDivisionError("mine")

    __index__ = __float__ = __int__ = __iter__ = __len__ = __repr__ = __str__ = _raise
    __eq__ = __lt__ = __gt__ = __getitem__ = __contains__ = __bool__ = _raise
    __hash__ = None  # type: ignore[assignment]


class HostileSequence(Hostile, Sequence[Any]):  # type: ignore[misc]
    """The same, and it says that it is a sequence."""


class Endless(Sequence[int]):
    """Says that it is short and never ends."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        return 5

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 5


class Fives(Sequence[int]):
    """10**12 token ids that take no memory."""

    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: Any) -> Any:
        return [5] * len(range(10**12)[index]) if isinstance(index, slice) else 5


class Unequal(int):
    """A token id that cannot be compared."""

    def __lt__(self, other: object) -> bool:
        raise ZeroDivisionError

    __gt__ = __le__ = __ge__ = __lt__


HUGE = 10**5000
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
LAUGHS: Any = "ha"
for _ in range(30):
    LAUGHS = [LAUGHS] * 10
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "now"}}

PROMPTS: dict[str, Any] = {
    "an object": Hostile(),
    "a sequence that raises": HostileSequence(),
    "a list of objects": [Hostile()],
    "ids that are objects": {"prompt_token_ids": [5, Hostile()]},
    "a sequence of ids that raises": {"prompt_token_ids": HostileSequence()},
    "10**12 ids": range(10**12),
    "10**12 ids in a dict": {"prompt_token_ids": range(10**12)},
    "10**5000 ids": range(HUGE),
    "a huge id": [HUGE],
    "a huge negative id": [5, -HUGE],
    "ids in bytes": {"prompt_token_ids": b"abc"},
    "a cycle": CYCLE,
    "a number as text": {"prompt": HUGE},
    "a salt": {"prompt": "Hi", "cache_salt": HUGE},
    "unknown keys": {"prompt": "Hi", **{f"key {number}": number for number in range(10**5)}},
    "a key that is not a string": {"prompt": "Hi", HUGE: 1},
    "5 MB of words": "word " * 10**6,
    "5 MB without a space": "a" * (5 * 10**6),
    "1 MB of control tokens": "<|im_start|>" * 80_000,
    "1 MB of spaces": " " * 10**6,
}
CONVERSATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "no content": ([{"role": "user"}], {}),
    "content none": ([{"role": "user", "content": None}], {}),
    "an image": ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}),
    "an object as content": ([{"role": "user", "content": Hostile()}], {}),
    "an object as role": ([{"role": Hostile(), "content": "Hi"}], {}),
    "an object as messages": (Hostile(), {}),
    "a sequence that raises": (HostileSequence(), {}),
    "a message that is a cycle": ([{"role": "user", "content": "Hi", "more": CYCLE}], {}),
    "10**30 values": ([{"role": "user", "content": "Hi", "more": LAUGHS}], {}),
    "a huge number": ([{"role": "user", "content": "Hi", "more": HUGE}], {}),
    "tools that are dropped": ([USER], {"tools": [TOOL]}),
    "tools that are a cycle": ([USER], {"tools": [{"tools": CYCLE}]}),
    "10**30 tools": ([USER], {"tools": [{"tools": LAUGHS}]}),
    "an object as tools": ([USER], {"tools": Hostile()}),
    "an object as a tool": ([USER], {"tools": [{"tool": Hostile()}]}),
    "a template that is a number": ([USER], {"chat_template": HUGE}),
    "a template that is an object": ([USER], {"chat_template": Hostile()}),
    "a template that does not compile": ([USER], {"chat_template": "{% for %}"}),
    "an object for the template": ([USER], {"chat_template_kwargs": {"documents": Hostile()}}),
    "200,000 control tokens": ([{"role": "user", "content": "<|im_start|>" * 200_000}], {}),
    "5 MB of words": ([{"role": "user", "content": "word " * 10**6}], {}),
    "3 MB without a space": ([{"role": "user", "content": "a" * (3 * 10**6)}], {}),
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "a huge number": {"max_tokens": HUGE},
    "an object": {"temperature": Hostile()},
    "10**12 stop ids": {"stop_token_ids": range(10**12)},
    "a huge key of a bias": {"logit_bias": {HUGE: 1.0}},
    "an endless list of words": {"bad_words": Endless()},
    "results of 100 MB": {"logprobs": -1, "n": 64, "max_tokens": 1000},
    "half a character to stop at": {"stop": ["\ud83d"]},
    "half a character that breaks repetitions": {"dry_sequence_breakers": ["a\udc00"]},
    "half a character to choose": {"structured_outputs": {"choice": ["\ud83d"]}},
    "a pattern of 500 places": {"stop_regex": "(?:.?){500}\x00"},
    "a pattern that grows": {"stop_regex": "(((){999}){999}){999}a"},
}
#: Allowed, however expensive: such a request is answered.
ACCEPTED: dict[str, Callable[[LLM], Any]] = {
    "200,000 words, cut": lambda llm: llm.generate(
        "word " * 200_000, SHORT.clone(truncate_prompt_tokens=-1)
    ),
    "10**12 ids, cut": lambda llm: llm.generate(
        {"prompt_token_ids": Fives()},
        SHORT.clone(truncate_prompt_tokens=-1),
    ),
    "ids that cannot be compared": lambda llm: llm.generate([Unequal(5), Unequal(6)], SHORT),
    "a million allowed ids, 64 answers": lambda llm: llm.generate(
        ids(1), SHORT.clone(n=64, max_tokens=2, allowed_token_ids=[i % 400 for i in range(2**20)])
    ),
    "every list at its longest, 64 answers": lambda llm: llm.generate(ids(1), LONGEST),
    "all log-probabilities, 64 answers": lambda llm: llm.generate(
        ids(1), SHORT.clone(n=64, max_tokens=4, logprobs=-1, prompt_logprobs=-1)
    ),
    "a costly pattern, 64 answers": lambda llm: llm.generate(
        ids(1), SHORT.clone(n=64, stop_regex="(?:.?){255}\x00")
    ),
    "repetitions, 64 answers": lambda llm: llm.generate(
        {"prompt_token_ids": [7] * 100},
        SHORT.clone(n=64, dry_multiplier=1, dry_allowed_length=90, no_repeat_ngram_size=99),
    ),
    "guidance, 32 answers": lambda llm: llm.generate(ids(1), SHORT.clone(n=32, guidance_scale=2)),
    "300 requests": lambda llm: llm.generate([ids(seed) for seed in range(300)], SHORT),
}


LONGEST = SHORT.clone(
    n=64,
    max_tokens=2,
    stop=[chr(0x4E00 + index) * 1024 for index in range(64)],
    stop_token_ids=[401 + index % 40 for index in range(4096)],
    bad_words=[f"word {index}" for index in range(1024)],
    logit_bias=dict.fromkeys(range(400), 1.0),
    logprob_token_ids=[index % 400 for index in range(4096)],
    min_tokens=2,
)


class Streams:
    """Some streams that are read by a thread each, one after the other, until ``end``."""

    def __init__(self, llm: LLM, expected: list[list[int]]) -> None:
        self._llm, self._expected = llm, expected
        self._over = threading.Event()
        self.answers, self.wrong = 0, list[Any]()
        self._threads = [
            threading.Thread(target=self._read, args=(seed,), daemon=True)
            for seed in range(STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, seed: int) -> None:
        while not self._over.is_set():
            try:
                pieces = list(self._llm.stream(ids(seed), ENDLESS))
            except Exception as error:
                self.wrong.append(error)
                return
            found = [token for piece in pieces for token in tokens(piece)]
            if found != self._expected[seed]:
                self.wrong.append((seed, found))
            self.answers += 1

    def check(self) -> None:
        assert self.wrong == []
        assert all(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a stream hangs"
        assert self.wrong == [] and self.answers >= STREAMS


@pytest.fixture(scope="module")
def streams(tiny: LLM) -> Iterator[Streams]:
    undisturbed = tiny.generate([ids(seed) for seed in range(STREAMS)], ENDLESS)
    running = Streams(tiny, [tokens(output) for output in undisturbed])
    yield running
    running.end()


@pytest.mark.parametrize("name", PROMPTS)
def test_a_hostile_prompt_is_refused(tiny: LLM, streams: Streams, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        tiny.generate(PROMPTS[name], SHORT)
    assert len(str(caught.value)) < 500
    with pytest.raises(RequestError):
        tiny.stream(PROMPTS[name], SHORT)
    streams.check()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_hostile_conversation_is_refused(tiny: LLM, streams: Streams, name: str) -> None:
    messages, options = CONVERSATIONS[name]
    with pytest.raises(RequestError) as caught:
        tiny.chat(messages, SHORT, **options)
    assert len(str(caught.value)) < 500
    streams.check()


@pytest.mark.parametrize("name", PARAMETERS)
def test_hostile_parameters_are_refused(tiny: LLM, streams: Streams, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        tiny.generate(ids(7), SamplingParams(**PARAMETERS[name]))
    assert len(str(caught.value)) < 500
    streams.check()


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_expensive_request_is_answered(tiny: LLM, streams: Streams, name: str) -> None:
    for output in ACCEPTED[name](tiny):
        assert output.outputs[0].finish_reason in ("length", "stop")
    streams.check()
