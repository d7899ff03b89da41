"""Counts what callers use, and refuses what is over their limits."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sdk.serving.access import Refused
from sdk.serving.guard.daily import DailyTokens
from sdk.serving.guard.limits import Limits, format_duration
from sdk.serving.guard.window import Entry, SlidingWindow


class _Usage:
    """What one caller used in the last minute, and how many of its requests are not finished."""

    __slots__ = ("requests", "running", "tokens")

    def __init__(self) -> None:
        self.requests = SlidingWindow()
        self.tokens = SlidingWindow()
        self.running = 0

    def idle(self, now: float) -> bool:
        self.requests.forget(now)
        return self.running == 0 and len(self.requests) == 0


@dataclass(frozen=True, slots=True)
class _Excess:
    """A limit that a request exceeds: which one, and the seconds until it fits (maybe infinite)."""

    what: str
    limit: int
    used: int
    asked: int
    wait: float


class Reservation:
    """What a request may use at most; :meth:`settle` replaces it by what it used."""

    def __init__(
        self, meter: Meter, name: str, charges: tuple[Entry, Entry], tokens: int, day: int
    ) -> None:
        self._meter = meter
        self._name = name
        self._day = day
        self._settled = False
        self.tokens = tokens
        self.charges = charges

    def settle(self, tokens: int) -> None:
        """The request has ended and used ``tokens``. Only the first call counts."""
        self._meter._settle(self, tokens)


class Meter:
    """The usage of all callers, exact under concurrency: check and reservation are one step.

    A request is charged what it may use at most when it is admitted, and corrected to what it used
    when it ends. So the requests admitted in any 60 seconds never use more than a limit, and one is
    refused only if the limit could be exceeded. A long request counts in the minute in which it was
    admitted. Refused requests are not counted.

    ``journal``: file of the daily counts (:class:`~sdk.serving.guard.daily.DailyTokens`); they are
    written for callers with ``tokens_per_day`` only. ``clock`` and ``wall``: seconds; the first
    never runs backwards, the second is that of the calendar.

    May be used from any thread. :raises RequestError: another process uses the journal.
    """

    def __init__(
        self,
        journal: str | os.PathLike[str] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._callers: dict[str, _Usage] = {}
        self._sweep_at = 1024
        self._daily = DailyTokens(journal, wall)

    def reserve(self, name: str, limits: Limits, tokens: int) -> Reservation:
        """Charge a request of at most ``tokens``. :raises Refused: 429, with the time to wait."""
        with self._lock:
            now = self._clock()
            usage = self._callers.get(name)
            if usage is None:
                self._sweep(now)
                usage = self._callers[name] = _Usage()
            excess = self._excess(name, usage, limits, tokens, now)
            if excess is not None:
                raise _refusal(excess, self._headers(usage, limits, now))
            usage.running += 1
            charges = (usage.requests.charge(1, now), usage.tokens.charge(tokens, now))
            day = -1
            if limits.tokens_per_day is not None:
                day = self._daily.charge(name, tokens)
            return Reservation(self, name, charges, tokens, day)

    def headers(self, name: str, limits: Limits) -> dict[str, str]:
        """What is left, as OpenAI's ``x-ratelimit-...`` headers."""
        with self._lock:
            usage = self._callers.get(name) or _Usage()
            return self._headers(usage, limits, self._clock())

    def close(self) -> None:
        """Close the journal. Idempotent; requests that still run may end afterwards."""
        with self._lock:
            self._daily.close()

    def _excess(
        self, name: str, usage: _Usage, limits: Limits, tokens: int, now: float
    ) -> _Excess | None:
        """The limit that takes longest to wait for, if any is exceeded."""
        found = []
        for what, window, asked, limit in (
            ("requests per minute", usage.requests, 1, limits.requests_per_minute),
            ("tokens per minute", usage.tokens, tokens, limits.tokens_per_minute),
        ):
            if limit is not None and (wait := window.wait(asked, limit, now)) > 0:
                found.append(_Excess(what, limit, window.total, asked, wait))
        if limits.concurrent is not None and usage.running >= limits.concurrent:
            found.append(_Excess("concurrent requests", limits.concurrent, usage.running, 1, 1.0))
        if limits.tokens_per_day is not None:
            limit, used = limits.tokens_per_day, self._daily.used(name)
            if used + tokens > limit:
                wait = math.inf if tokens > limit else self._daily.until_midnight()
                found.append(_Excess("tokens per day", limit, used, tokens, wait))
        return max(found, key=lambda excess: excess.wait, default=None)

    def _headers(self, usage: _Usage, limits: Limits, now: float) -> dict[str, str]:
        headers = {}
        for what, window, limit in (
            ("requests", usage.requests, limits.requests_per_minute),
            ("tokens", usage.tokens, limits.tokens_per_minute),
        ):
            if limit is not None:
                reset = window.reset_after(now)
                headers[f"x-ratelimit-limit-{what}"] = str(limit)
                headers[f"x-ratelimit-remaining-{what}"] = str(max(0, limit - window.total))
                headers[f"x-ratelimit-reset-{what}"] = format_duration(reset)
        return headers

    def _settle(self, reservation: Reservation, tokens: int) -> None:
        with self._lock:
            if reservation._settled:
                return
            reservation._settled = True
            usage = self._callers[reservation._name]  # kept while a request of it runs
            usage.running -= 1
            usage.tokens.correct(reservation.charges[1], tokens)
            if reservation._day >= 0:
                change = tokens - reservation.tokens
                self._daily.correct(reservation._name, reservation._day, change)

    def _sweep(self, now: float) -> None:
        """Forget callers that used nothing for a minute, each time their number has doubled."""
        if len(self._callers) < self._sweep_at:
            return
        self._callers = {n: usage for n, usage in self._callers.items() if not usage.idle(now)}
        self._sweep_at = max(1024, 2 * len(self._callers))


def _refusal(excess: _Excess, headers: dict[str, str]) -> Refused:
    what, limit, asked = excess.what, excess.limit, excess.asked
    if excess.wait == math.inf:
        # No waiting helps; openai's client would retry a 429 otherwise.
        headers["x-should-retry"] = "false"
        message = (
            f"Request too large: it may use {asked} tokens, the limit is {limit} {what}. Set a "
            "smaller max_tokens or shorten the prompt."
        )
        return Refused(429, message, "rate_limit_exceeded", headers)
    headers["retry-after"] = str(math.ceil(excess.wait))
    headers["retry-after-ms"] = str(math.ceil(excess.wait * 1000))
    seconds = format_duration(excess.wait)
    if what == "concurrent requests":
        message = f"Too many requests at one time: the limit is {limit}. Wait until one has ended."
        return Refused(429, message, "rate_limit_exceeded", headers)
    message = f"Limit of {what} reached: {limit}, used {excess.used}, this request needs {asked}."
    if what == "tokens per day":
        headers["x-should-retry"] = "false"
        return Refused(429, f"{message} The day ends in {seconds}.", "insufficient_quota", headers)
    message += f" Try again in {seconds}."
    return Refused(429, message, "rate_limit_exceeded", headers)
