"""The audit log: one line per request, whatever is in it and whatever happens to the disk."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sdk.api.errors import RequestError
from sdk.serving.guard import AuditLog, audit


def records(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def wait_until(done: Any) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_record_is_one_line_with_a_time(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write({"name": "alice", "tokens": 5, "seconds": 0.25, "error": None})
    log.close()
    (record,) = records(log.path)
    assert record.pop("time")[:2] == "20"
    assert record == {"name": "alice", "tokens": 5, "seconds": 0.25}
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600


HOSTILE = [
    'x"}\n{"name": "admin", "event": "forged"}',
    "a\r\nb\x00\x1b[2Jc\x7f",
    "line\u2028separators\u2029and\x85",
    "\ud800 a lone surrogate",
    "right\u202eto left",
    "\N{PILE OF POO}" * 1000,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_cannot_forge_a_record(tmp_path: Path, text: str) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write({"model": text, "request": {"prompt": text}})
    log.close()
    data = log.path.read_bytes()
    assert data.isascii() and data.count(b"\n") == 1
    assert all(byte >= 32 for byte in data[:-1])
    (record,) = records(log.path)
    assert len(record["model"]) <= 256 and record["model"][:10] == text[:10]
    assert json.loads(record["request"]) == {"prompt": text}


def test_keys_are_not_written(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    key = "sk-0123456789ab-" + "5" * 48
    log.write({"model": key, "error": f"Bearer {key}", "request": {"prompt": f"my key is {key}"}})
    log.close()
    text = log.path.read_text()
    assert "5" * 48 not in text and "sk-0123456789ab" in text


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write({"seconds": float("nan"), "a": float("inf"), "b": 10**300})
    log.close()
    text = log.path.read_text()
    assert '"seconds":"nan"' in text and '"a":"inf"' in text
    json.loads(text, parse_constant=lambda name: pytest.fail(name))


def test_files_rotate_by_size_and_old_ones_go(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, max_bytes=4096, backups=3)
    for number in range(400):
        log.write({"number": number, "text": "x" * 50})
        if number % 50 == 0:
            wait_until(lambda: not log._waiting)
    log.close()
    files = [tmp_path / f"audit.jsonl.{n}" for n in (3, 2, 1)] + [path]
    assert names(tmp_path) == sorted(file.name for file in files)
    assert all(file.stat().st_size <= 4096 for file in files)
    numbers = [record["number"] for record in records(*files)]
    assert numbers == list(range(400 - len(numbers), 400)) and len(numbers) > 100


def test_without_backups_the_old_file_goes(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", max_bytes=4096, backups=0)
    for number in range(100):
        log.write({"number": number, "text": "x" * 50})
    log.close()
    assert names(tmp_path) == ["audit.jsonl"]
    assert records(log.path)[-1]["number"] == 99


def test_a_record_larger_than_a_file_is_kept(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", max_bytes=4096)
    for _ in range(3):
        log.write({"request": {"prompt": "x" * 10_000}})
    log.close()
    assert len(records(log.path)) == 1 and len(names(tmp_path)) == 3


def test_a_restart_appends(tmp_path: Path) -> None:
    for number in range(2):
        log = AuditLog(tmp_path / "audit.jsonl")
        log.write({"number": number})
        log.close()
    assert [record["number"] for record in records(log.path)] == [0, 1]


def test_a_file_moved_away_by_another_program_is_begun_again(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write({"number": 0})
    wait_until(lambda: not log._waiting)
    log.path.rename(tmp_path / "moved")
    log.write({"number": 1})
    log.close()
    assert [r["number"] for r in records(tmp_path / "moved", log.path)] == [0, 1]


def test_records_of_many_threads_are_all_there(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", max_bytes=20_000, backups=100)

    def write(thread: int) -> None:
        for number in range(250):
            log.write({"thread": thread, "number": number})

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    found = records(*tmp_path.iterdir())
    assert len(found) == 2000
    assert {(r["thread"], r["number"]) for r in found} == {
        (t, n) for t in range(8) for n in range(250)
    }


class Disk:
    """Lets writes fail: all of them, or after a part of the data."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.part = False
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(audit, "_RETRY_SECONDS", 0.02)

    def write(self, file: int, data: bytes) -> int:
        if self.part:
            self._write(file, data[: len(data) // 2])
            return len(data) // 2
        if self.full:
            raise OSError(28, "No space left on device")
        return self._write(file, data)


def test_open_serves_on_and_says_what_was_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit, "_MOST_WAITING", 50)
    disk = Disk(monkeypatch)
    log = AuditLog(tmp_path / "audit.jsonl", on_error="open")
    disk.full = True
    for number in range(80):
        log.write({"number": number})
    assert log.accepting
    wait_until(lambda: log._failing)
    disk.full = False
    wait_until(lambda: not log._failing)
    log.write({"number": 80})
    log.close()
    found = records(log.path)
    numbers = [record["number"] for record in found if "number" in record]
    assert numbers == [*range(50), 80]
    assert [r["records"] for r in found if r.get("event") == "dropped"] == [30]
    assert caplog.text.count("No space left") == 1 and "can be written again" in caplog.text


def test_closed_accepts_nothing_until_it_can_write_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_MOST_WAITING", 50)
    disk = Disk(monkeypatch)
    log = AuditLog(tmp_path / "audit.jsonl", on_error="closed")
    assert log.accepting
    disk.full = True
    for number in range(80):  # of requests that were admitted before
        log.write({"number": number})
    wait_until(lambda: not log.accepting)
    disk.full = False
    wait_until(lambda: log.accepting)
    log.close()
    assert [record["number"] for record in records(log.path)] == list(range(80))


def test_a_line_cut_short_by_a_full_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write({"number": 0})
    wait_until(lambda: not log._waiting)
    disk.part = True
    log.write({"number": 1})
    wait_until(lambda: log._failing)
    disk.part = False
    log.close()
    assert [record["number"] for record in records(log.path)] == [0, 1]


def test_close_ends_the_thread_also_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch)
    log = AuditLog(tmp_path / "audit.jsonl")
    disk.full = True
    log.write({"number": 0})
    wait_until(lambda: log._failing)
    log.close()
    log.close()
    log.write({"number": 1})  # of a request that ends late
    assert "1 records were not written" in caplog.text
    assert not [t for t in threading.enumerate() if t.name == "audit-log"]


def test_no_thread_begins_before_the_first_record(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    assert not [t for t in threading.enumerate() if t.name == "audit-log"]
    log.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 100}, "at least 4.0 KiB per file, found 100"),
        ({"backups": -1}, "0 to 1000 backups, found -1"),
        ({"on_error": "maybe"}, "on_error='open' or 'closed', found 'maybe'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        AuditLog(tmp_path / "audit.jsonl", **options)


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        AuditLog(tmp_path / "none" / "audit.jsonl")
