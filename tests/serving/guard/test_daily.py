"""Daily counts survive restarts and crashes, and damage is noticed."""

from __future__ import annotations

import logging
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from sdk.api.errors import RequestError
from sdk.serving.access import Refused
from sdk.serving.guard import daily
from sdk.serving.guard.daily import DailyTokens
from sdk.serving.guard.limits import Limits
from sdk.serving.guard.usage import Meter
from tests.serving.guard.clock import Clock

DAY = 86_400


def test_a_restart_does_not_forget(tmp_path: Path) -> None:
    path, wall = tmp_path / "usage.jsonl", Clock(20_000 * DAY + 5)
    first = DailyTokens(path, wall)
    for name, tokens in (("a", 10), ("b", 7), ("a", -4)):
        first.charge(name, tokens)
    first.close()
    second = DailyTokens(path, wall)
    assert (second.used("a"), second.used("b"), second.used("c")) == (6, 7, 0)
    assert len(path.read_text().splitlines()) == 2  # one line per name after a restart
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    second.close()
    wall.now += DAY
    third = DailyTokens(path, wall)
    assert third.used("a") == 0 and path.read_text() == ""
    third.close()


def test_a_killed_process_does_not_forget(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    code = (
        "import os, signal\n"
        "from sdk.serving.guard import Limits, Meter\n"
        f"meter = Meter({str(path)!r}, wall=lambda: 86400.0 * 20_000)\n"
        "limits = Limits(tokens_per_day=100)\n"
        "meter.reserve('a', limits, 30).settle(10)\n"
        "meter.reserve('a', limits, 50)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == -signal.SIGKILL
    meter = Meter(path, wall=lambda: 86400.0 * 20_000)
    limits = Limits(tokens_per_day=100)
    with pytest.raises(Refused):  # 10 used, and 50 that the killed request may have used
        meter.reserve("a", limits, 41)
    meter.reserve("a", limits, 40)
    meter.close()


def test_two_processes_do_not_share_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    first = DailyTokens(path, Clock())
    with pytest.raises(RequestError, match="in use by another process"):
        DailyTokens(path, Clock())
    first.close()
    first.close()
    DailyTokens(path, Clock()).close()


def test_damaged_lines_are_ignored_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.jsonl"
    good = '["1970-01-01", "a", 5]\n'
    path.write_text(good + "[[[\n" + '["1970-01-01", "a"]\n{}\n' + good + '["1970-01-01", "a", 9')
    with caplog.at_level(logging.WARNING, "sdk.serving"):
        counts = DailyTokens(path, Clock())
    assert counts.used("a") == 10
    assert "4 damaged lines were ignored" in caplog.text
    counts.close()


def test_the_journal_is_rewritten_before_it_grows_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daily, "MOST_JOURNAL_BYTES", 1000)
    path = tmp_path / "usage.jsonl"
    counts = DailyTokens(path, Clock())
    for _ in range(500):
        counts.charge("a", 3)
        assert path.stat().st_size <= 1030
    counts.close()
    assert DailyTokens(path, Clock()).used("a") == 1500


def test_a_new_day_begins_an_empty_journal(tmp_path: Path) -> None:
    path, wall = tmp_path / "usage.jsonl", Clock()
    counts = DailyTokens(path, wall)
    counts.charge("a", 5)
    wall.now += DAY
    counts.charge("b", 1)
    assert path.read_text() == '["1970-01-02", "b", 1]\n'
    counts.close()


def test_a_full_disk_keeps_the_counts_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = DailyTokens(tmp_path / "usage.jsonl", Clock())

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    counts.charge("a", 5)
    counts.charge("a", 6)
    monkeypatch.undo()
    assert counts.used("a") == 11
    assert caplog.text.count("No space left") == 1
    counts.close()


def test_names_cannot_break_a_line(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    counts = DailyTokens(path, Clock())
    counts.charge('x", 9]\n["1970-01-01", "a', 5)  # a host may choose any names
    counts.close()
    again = DailyTokens(path, Clock())
    assert again.used("a") == 0
    assert again.used('x", 9]\n["1970-01-01", "a') == 5
    again.close()


def test_only_callers_with_a_daily_limit_are_written(tmp_path: Path) -> None:
    meter = Meter(tmp_path / "usage.jsonl")
    meter.reserve("a", Limits(tokens_per_minute=100), 10).settle(5)
    assert (tmp_path / "usage.jsonl").read_text() == ""
    meter.close()
