"""The settings of a bench run, and the rounds of its suites."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sdk.bench.engines import (
    NEED_VOCABULARY,
    OF_ONE_SUITE,
    OURS,
    READ_GGUF,
    Engines,
    Load,
    Peer,
    Worker,
)
from sdk.bench.peers.opening import Opening, without_type
from sdk.bench.report import Result

#: Tokens of context before decoding is measured, unless the suite varies them.
DECODE_PROMPT = 128


def least_output(requests: int) -> int:
    """The fewest tokens an answer must have for all ``requests`` to decode at the same time in our
    engine: while the prompts of the last ones are computed, the first ones decode already."""
    from sdk.api.config import STEP_TOKENS  # parsing a command line must not import it

    left, began, steps = requests * DECODE_PROMPT, 0, 0
    while left > 0:
        left -= max(STEP_TOKENS, 2 * requests) - began
        began = min(requests, (requests * DECODE_PROMPT - left) // DECODE_PROMPT)
        steps += 1
    return steps + 1


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one run. ``unpacked()`` returns a model that every engine can read,
    ``with_vocabulary()`` our file with a vocabulary; ``progress`` gets one line of text."""

    model: str
    threads: int
    rounds: int
    kv: str
    peers: tuple[Peer, ...]
    requests: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    output_len: int
    unpacked: Callable[[], str]
    with_vocabulary: Callable[[], str]
    progress: Callable[[str], None]
    #: ``random:RANK``, or the path of an adapter.
    lora: str = "random:16"
    #: The type of its factors, as in ``LLM(lora_dtype=)``.
    lora_dtype: str = "auto"
    #: The same model as a GGUF file, for llama.cpp in the embed suite.
    gguf: str | None = None
    #: How many texts the embed suite embeds in one call.
    texts: int = 1000
    #: What the report says about peers that failed.
    failures: list[str] = field(default_factory=list)

    def engines(self, without: Sequence[str] = ()) -> list[Peer]:
        """Ours first, then the peers except those in ``without`` and their variants
        (``-bf16``, ``-f32``)."""
        without = [*without, *OF_ONE_SUITE]
        fine = [p for p in self.peers if without_type(p.engine) not in without]
        return [Peer(OURS), *fine]

    def peer(self, engine: str) -> Peer | None:
        """The peer of that name, if it is to be measured."""
        return next((peer for peer in self.peers if peer.engine == engine), None)

    def opening(
        self, engine: str, requests: int, context: int, *, kv: str = "", prefix: bool = False
    ) -> Opening:
        """What ``engine`` opens: our file, also with a vocabulary, or its unpacked weights."""
        if engine in NEED_VOCABULARY:
            model = self.with_vocabulary()
        else:
            model = self.model if engine in (OURS, *READ_GGUF) else self.unpacked()
        return Opening(engine, model, self.threads, requests, context, kv or self.kv, prefix)

    @contextmanager
    def opened(
        self, peers: Sequence[Peer], requests: int, context: int, *, prefix: bool = False
    ) -> Iterator[Engines]:
        """Open all of ``peers`` at the same time; ``prefix``: with a prefix cache."""
        with Engines(self.failures) as engines:
            for peer in peers:
                self.progress(f"opening {peer.engine}")
                with engines.sparing():
                    engines.open(
                        self.opening(peer.engine, requests, context, prefix=prefix), peer.python
                    )
            yield engines


def make_load(vocab_size: int, requests: int, prompt_len: int, output_len: int, seed: int) -> Load:
    """Random prompts, the same every time, without the lowest ids (control tokens, bytes)."""
    draw = random.Random(seed)
    low = min(1000, vocab_size // 2)
    prompts = tuple(
        tuple(draw.randrange(low, vocab_size) for _ in range(prompt_len)) for _ in range(requests)
    )
    return Load(prompts, output_len)


def _said(case: Mapping[str, int | str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in case.items())


def in_rounds(
    settings: Settings,
    engines: Engines,
    case: Mapping[str, int | str],
    sample: Callable[[Worker, int], dict[str, float]],
) -> list[Result]:
    """Call ``sample(engine, round)`` for every engine in every round; one result for each engine
    that did not fail."""
    results = {
        id(engine): Result(engine.engine, engine.name, engine.kv, case) for engine in engines.opened
    }
    said = _said(case)
    for number in range(settings.rounds):
        for engine in engines.interleaved(number):
            with engines.sparing(said):
                results[id(engine)].add(**sample(engine, number))
        settings.progress(f"{said or 'all engines'}: round {number + 1} of {settings.rounds}")
    return [results[id(engine)] for engine in engines.opened]


def same_load(
    settings: Settings,
    engines: Engines,
    case: Mapping[str, int | str],
    load: Load,
    sample: Callable[[Worker, Load], dict[str, float]],
) -> list[Result]:
    """:func:`in_rounds` with one load, after a warm-up run of its prompts."""
    for engine in [*engines.opened]:
        with engines.sparing(_said(case)):
            engine.measure(Load(load.prompts, 2))
    return in_rounds(settings, engines, case, lambda engine, number: sample(engine, load))
