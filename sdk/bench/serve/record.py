"""What a load generator notes about one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Record:
    """Times of one request, in seconds of one monotonic clock.

    ``due``: when the request was to arrive. Latencies count from there, so that a client or server
    that falls behind cannot hide it (coordinated omission). ``sent``: when the client sent it.
    ``first`` and ``last``: when the first and the last piece of text arrived; ``gaps``: the times
    between pieces. ``queue_s``: how long the engine let it wait, where it says so. ``error``: what
    went wrong, in a few words that are the same for the same kind of failure.
    """

    due: float
    sent: float = 0.0
    first: float | None = None
    last: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    output_tokens: int = 0
    queue_s: float | None = None
    error: str | None = None
    text: list[str] = field(default_factory=list)

    def add(self, now: float, text: str) -> None:
        """Note a piece of the answer that arrived at ``now``."""
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now
        self.text.append(text)

    def end(self, now: float) -> None:
        """The answer is complete. One without text, of control tokens only, has its time now."""
        if self.first is None:
            self.first = self.last = now

    @property
    def answer(self) -> str:
        return "".join(self.text)

    @property
    def ttft(self) -> float:
        """Time to first token."""
        assert self.first is not None
        return self.first - self.due

    @property
    def e2e(self) -> float:
        """End-to-end latency: until the last piece of text."""
        return self.last - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first one; ``None`` if there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    def to_json(self, begin: float) -> dict[str, Any]:
        """Times in seconds after ``begin``."""

        def after(time: float) -> float:
            return round(time - begin, 6)

        found: dict[str, Any] = {"due": after(self.due), "sent": after(self.sent)}
        if self.error is not None:
            return found | {"error": self.error}
        return found | {
            "first": None if self.first is None else after(self.first),
            "last": after(self.last),
            "gaps": [round(gap, 6) for gap in self.gaps],
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "queue_s": self.queue_s,
        }
