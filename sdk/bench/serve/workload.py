"""What is asked: sessions of one or more turns, the same every time for the same seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sdk.bench.serve.arrivals import Arrivals
from sdk.bench.serve.lengths import Lengths
from sdk.bench.serve.texts import make_text

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """One question, and how many tokens its answer may have. ``text``: or only its length in
    tokens, as in a trace without texts."""

    text: str | int
    output_len: int


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation that begins ``at`` seconds after the start; ``opening`` precedes its turns.

    Each turn contains all turns and answers before it, and is asked ``think_s`` after the answer
    to the last one.
    """

    at: float
    opening: tuple[Message, ...]
    turns: tuple[Turn, ...]
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """How sessions are drawn.

    ``input_len`` and ``output_len``: tokens of a turn and of its answer. A ``prefix_share`` of the
    sessions begins with one of ``prefixes`` system prompts of ``prefix_len`` tokens (none if 0).
    """

    input_len: Lengths
    output_len: Lengths
    source: str = "words"
    prefix_len: int = 0
    prefixes: int = 1
    prefix_share: float = 1.0
    turns: int = 1
    think_s: float = 0.0
    seed: int = 0
    trace: tuple[Session, ...] = ()

    def draw(self, run: int) -> Iterator[Session]:
        """The sessions of the trace; without one, as many as are asked for.

        Each ``run`` has other texts, so that none is in a prefix cache already. Everything else is
        the same in all runs: lengths, system prompts, and the pattern of arrivals.
        """
        sizes = random.Random(f"{self.seed} sizes")
        texts = random.Random(f"{self.seed} texts {run}")
        if self.trace:
            return (self._filled(session, texts) for session in self.trace)
        return (self._session(sizes, texts) for _ in itertools.count())

    def timed(self, count: int | None, run: int, arrivals: Arrivals | None) -> list[Session]:
        """The first ``count`` sessions of :meth:`draw`, all of a trace if it is ``None``, at the
        times of ``arrivals``, or those of the trace."""
        drawn = list(itertools.islice(self.draw(run), count))
        if arrivals is None:
            return drawn
        times = arrivals.times(len(drawn), self.seed)
        return [replace(session, at=at) for session, at in zip(drawn, times, strict=True)]

    def _session(self, sizes: random.Random, texts: random.Random) -> Session:
        opening: tuple[Message, ...] = ()
        # Drawn in any case, so that the share does not change lengths.
        chosen, shared = sizes.randrange(self.prefixes), sizes.random() < self.prefix_share
        if self.prefix_len and shared:
            own = random.Random(f"{self.seed} prefix {chosen}")
            text = make_text(self.source, self.prefix_len, own)
            opening = ({"role": "system", "content": text},)
        turns = []
        for _ in range(self.turns):
            tokens = self.input_len.draw(sizes)
            output_len = self.output_len.draw(sizes)
            turns.append(Turn(make_text(self.source, tokens, texts), output_len))
        return Session(0.0, opening, tuple(turns), self.think_s)

    def _filled(self, session: Session, texts: random.Random) -> Session:
        """A session of a trace, with texts for turns that have only a length."""
        turns = (
            Turn(make_text(self.source, turn.text, texts), turn.output_len)
            if isinstance(turn.text, int)
            else turn
            for turn in session.turns
        )
        return replace(session, turns=tuple(turns))


def prompt_of(history: Sequence[Message], *, chat: bool) -> str | list[Message]:
    """What is sent for the last of these messages: all of them, or their texts as one."""
    if chat:
        return list(history)
    return "\n".join(message["content"] for message in history)
