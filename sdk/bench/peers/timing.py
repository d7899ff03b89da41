"""When all requests of a load have their first token, and how fast they then decode."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable


class Timing:
    """Decoding is timed from the first token of the last request to the end of the first, so that
    all of them run meanwhile."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._begun: set[Hashable] = set()
        #: Whether one of the requests has ended.
        self.ended = False
        self._tokens = 0.0
        self._start = self._prefilled = self._last = time.perf_counter()

    @property
    def decoding(self) -> bool:
        """Whether all requests have their first token."""
        return len(self._begun) == self._requests

    def step(
        self, outputs: Iterable[tuple[Hashable, float, bool]], now: float | None = None
    ) -> None:
        """What one step of the engine brought: (request, number of new tokens, whether it ended).

        ``now``: when, if that is not the moment of the call.
        """
        now = time.perf_counter() if now is None else now
        all_decoded = self.decoding
        counted = all_decoded and not self.ended
        for request, tokens, ended in outputs:
            if tokens:
                self._begun.add(request)
            if counted:
                self._tokens += tokens
            self.ended = self.ended or ended
        if counted:
            self._last = now
        elif self.decoding and not all_decoded:
            self._prefilled = self._last = now

    def times(self) -> dict[str, float]:
        """The reply to a load; without decoded tokens if not all requests ran at the same time."""
        return {
            "prefill_s": self._prefilled - self._start,
            "decode_s": self._last - self._prefilled,
            "decode_tokens": round(self._tokens),
        }
