"""Stop strings and stop patterns across token boundaries.

An automaton (``automaton.py``) matches all stop strings of a request at once, character by
character. Its state is the longest end of the text that begins a stop string, which is exactly the
text that must not be shown yet. The result does not depend on token boundaries: the match that ends
first, and the longest of those that end together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.api.stop_regex import RegexRun, StopRegex
from sdk.text.automaton import StringAutomaton

MAX_STOPS = 256
MAX_STOP_LEN = 1024
MAX_PATTERNS = 16


class StopUpdate(NamedTuple):
    """The result of new text."""

    text: str
    """Text that may be shown now."""
    stop: str | None = None
    """The stop string or pattern that was found."""
    dropped: int = 0
    """Characters at the end of all text so far that must not be shown: the stop string (unless it
    is included) and the text after it in the same token."""


class StopStrings:
    """The compiled stop strings and patterns of one request, shared by all its answers."""

    def __init__(self, stop: Sequence[str] = (), stop_regex: Sequence[str] = ()) -> None:
        """:raises RequestError: too many, too long or empty strings, or unsupported patterns."""
        for name, values, most in (
            ("stop", stop, MAX_STOPS),
            ("stop_regex", stop_regex, MAX_PATTERNS),
        ):
            if isinstance(values, str):
                raise RequestError(f"{name}: expected a list of strings, found a string")
            if len(values) > most:
                raise RequestError(f"{name}: expected at most {most}, found {len(values)}")
        for text in stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LEN:
                size = len(text) if isinstance(text, str) else type(text).__name__
                raise RequestError(
                    f"stop: expected strings of 1 to {MAX_STOP_LEN} characters, found {size}"
                )
        self.patterns = tuple(StopRegex(pattern) for pattern in stop_regex)
        self.strings = StringAutomaton(stop)

    def __bool__(self) -> bool:
        return bool(self.strings or self.patterns)


def stop_strings(params: SamplingParams) -> StopStrings | None:
    """The stop strings and patterns of one request; None if it has none."""
    patterns = () if params.stop_regex is None else (params.stop_regex,)
    stops = StopStrings(tuple(params.stop or ()), patterns)
    return stops if stops else None


class StopMatcher:
    """Matches stop strings in the text of one answer. Not shared between threads."""

    def __init__(self, stops: StopStrings, include_stop_str_in_output: bool = False) -> None:
        self._stops = stops
        self._include = include_stop_str_in_output
        self._state = 0
        self._runs: list[RegexRun] = [pattern.start() for pattern in stops.patterns]
        self._held = ""

    def push(self, text: str, can_stop: bool = True) -> StopUpdate:
        """Take new text. With ``can_stop=False`` (before ``min_tokens``) a stop that ends in this
        text is ignored; one that only begins in it still counts later.

        Must not be called again once a stop was found.
        """
        if not self._stops:
            return StopUpdate(text)
        before = len(self._held)
        everything = self._held + text
        for index, character in enumerate(text):
            stop, length = self._read(character)
            if stop is not None and can_stop:
                end = before + index + 1
                keep = end if self._include else end - length
                self._held = ""
                return StopUpdate(everything[:keep], stop, len(everything) - keep)
        held = self._stops.strings.depth[self._state]
        for run in self._runs:
            held = max(held, run.held)
        cut = len(everything) - held
        self._held = everything[cut:]
        return StopUpdate(everything[:cut])

    def finish(self) -> str:
        """The text that was held back; nothing follows."""
        held, self._held = self._held, ""
        return held

    def copy(self) -> StopMatcher:
        """A copy that reads on independently."""
        other = copy.copy(self)
        other._runs = [copy.copy(run) for run in self._runs]
        return other

    def _read(self, character: str) -> tuple[str | None, int]:
        stops = self._stops
        self._state = stops.strings.follow(self._state, character)
        stop = stops.strings.found[self._state]
        length = 0 if stop is None else len(stop)
        for pattern, run in zip(stops.patterns, self._runs, strict=True):
            matched = run.read(character)
            if matched is not None and matched > length:
                stop, length = pattern.pattern, matched
        return stop, length
