"""What a run of the bench was asked for, and the rounds every suite is made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sdk.cli.bench.engines import OURS, Engines, Load, Opening, Peer, Worker
from sdk.cli.bench.report import Result

#: Tokens of context before decoding is measured, where the suite does not vary them.
DECODE_PROMPT = 128


@dataclass(frozen=True, slots=True)
class Settings:
    """``unpacked()`` is the model as every engine reads it; ``progress`` gets one line."""

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
    progress: Callable[[str], None]

    def engines(self, without: Sequence[str] = ()) -> list[Peer]:
        """Ours first, then the peers but those named in ``without`` (up to ``-bf16``)."""
        fine = [p for p in self.peers if p.engine.removesuffix("-bf16") not in without]
        return [Peer(OURS), *fine]

    def opening(
        self, engine: str, requests: int, context: int, *, kv: str = "", prefix: bool = False
    ) -> Opening:
        """What ``engine`` is told to open: only llama.cpp reads the same packed file as we do."""
        model = self.model if engine in (OURS, "llama.cpp") else self.unpacked()
        return Opening(engine, model, self.threads, requests, context, kv or self.kv, prefix)

    @contextmanager
    def opened(self, peers: Sequence[Peer], requests: int, context: int) -> Iterator[Engines]:
        """All of ``peers`` opened side by side, without a prefix cache."""
        with Engines() as engines:
            for peer in peers:
                self.progress(f"opening {peer.engine}")
                engines.open(self.opening(peer.engine, requests, context), peer.python)
            yield engines


def make_load(vocab_size: int, requests: int, prompt_len: int, output_len: int, seed: int) -> Load:
    """Random prompts, the same every time; the lowest ids (control tokens, bytes) are left out."""
    draw = random.Random(seed)
    low = min(1000, vocab_size // 2)
    prompts = tuple(
        tuple(draw.randrange(low, vocab_size) for _ in range(prompt_len)) for _ in range(requests)
    )
    return Load(prompts, output_len)


def in_rounds(
    settings: Settings,
    engines: Engines,
    case: Mapping[str, int | str],
    sample: Callable[[Worker, int], dict[str, float]],
) -> list[Result]:
    """``sample(engine, round)`` of every engine in every round, as one result per engine."""
    results = {
        id(engine): Result(engine.engine, engine.name, engine.kv, case) for engine in engines.opened
    }
    said = ", ".join(f"{name} {value}" for name, value in case.items())
    for number in range(settings.rounds):
        for engine in engines.interleaved(number):
            results[id(engine)].add(**sample(engine, number))
        settings.progress(f"{said or 'all engines'}: round {number + 1} of {settings.rounds}")
    return list(results.values())


def same_load(
    settings: Settings,
    engines: Engines,
    case: Mapping[str, int | str],
    load: Load,
    sample: Callable[[Worker, Load], dict[str, float]],
) -> list[Result]:
    """:func:`in_rounds` on one load, after a first run of its prompts that is not counted."""
    for engine in engines.opened:
        engine.measure(Load(load.prompts, 2))
    return in_rounds(settings, engines, case, lambda engine, number: sample(engine, load))
