"""What a terminal shows while a call waits: tokens, and after a while why it takes so long."""

from __future__ import annotations

import io
import itertools
import sys
from typing import Any

import pytest

from sdk import SamplingParams
from sdk.api import load_progress as bars
from sdk.requests import progress
from sdk.testing import FakeLLM

LONG = "word " * 300


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as standard error, and bars that show everything at once. (Not a fixture: pytest
    replaces standard error after fixtures have run.)"""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(bars, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(progress, "_MOST_OF_TIME", 1.0)
    monkeypatch.setattr(progress, "_ADVICE_AFTER_S", 0.0)
    return stream


def numbers(text: str, after: str) -> list[int]:
    """The numbers before ``after`` in what was drawn."""
    words = text.replace("\r", " ").replace("/", " / ").split()
    return [int(a) for a, b in itertools.pairwise(words) if a.isdigit() and b == after]


def test_the_bar_of_one_request_counts_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = show(monkeypatch)
    with FakeLLM(LONG, seconds_per_token=0.002) as llm:
        llm.generate("a", SamplingParams(max_tokens=250))
    found = numbers(terminal.getvalue(), "/")
    assert any(0 < one < 250 for one in found), terminal.getvalue()
    assert "/250" in terminal.getvalue(), "and the most that it may get"


def test_the_bar_of_several_counts_requests_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = show(monkeypatch)
    with FakeLLM({"a": LONG, "b": "word"}, seconds_per_token=0.002) as llm:
        llm.generate(["a", "b"])
    assert "1/2" in terminal.getvalue()
    assert any(one > 1 for one in numbers(terminal.getvalue(), "tokens,"))


def test_a_call_without_max_tokens_gets_one_line_of_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = show(monkeypatch)
    with FakeLLM(LONG, seconds_per_token=0.002, max_model_len=1000) as llm:
        llm.generate("a", SamplingParams(max_tokens=100))
        assert "max_tokens" not in terminal.getvalue()
        for _ in range(2):
            llm.chat([{"role": "user", "content": "a"}])
    [line] = [one for one in terminal.getvalue().splitlines() if "max_tokens" in one]
    assert "SamplingParams(max_tokens=256)" in line and "Ctrl-C" in line
    assert "may take 9" in line, "the room in this context"


def test_elsewhere_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = show(monkeypatch)
    with FakeLLM(LONG, seconds_per_token=0.0005) as llm:
        llm.generate("a", use_tqdm=False)
        assert terminal.getvalue() == ""
        log: Any = io.StringIO()
        monkeypatch.setattr(sys, "stderr", log)
        llm.generate("a")
        assert log.getvalue() == ""
