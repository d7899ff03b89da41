"""The file of known answers: what is damaged or cannot be written only means more checks."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import stat
from pathlib import Path

import pytest

from sdk.kernels.gpu_driver import gpu_driver
from sdk.kernels.known_answers.file import VERSION, Answer, AnswerFile

MACHINE = {"card": "a card", "triton": "3.6.0"}


def test_what_is_written_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "known_answers"
    AnswerFile(folder, MACHINE).add({"a": Answer(0.25), "b": Answer(math.nan, "NaN")})
    AnswerFile(folder, MACHINE).add({"c": Answer(1.5, "wrong")})
    found = AnswerFile(folder, MACHINE).read()
    assert found.pop("b").reason == "NaN"
    assert found == {"a": Answer(0.25), "c": Answer(1.5, "wrong")}
    (path,) = folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_another_machine_has_another_file(tmp_path: Path) -> None:
    AnswerFile(tmp_path, MACHINE).add({"a": Answer(0.25)})
    other = AnswerFile(tmp_path, MACHINE | {"driver": "2"})
    assert other.read() == {}
    # also if the names of two machines were the same
    AnswerFile(tmp_path, MACHINE).path.replace(other.path)
    assert other.read() == {}


def damaged(text: str) -> str:
    content = {"version": VERSION, "machine": MACHINE, "answers": {"a": [0.25, ""]}}
    return {
        "cut": json.dumps(content)[:-9],
        "other version": json.dumps(content | {"version": VERSION + 1}),
        "list": "[1, 2]",
        "null": "null",
        "number": "3",
        "deep": "[" * 100_000,
        "not text": "\udcff",
        "empty": "",
        "no answers": json.dumps({"version": VERSION, "machine": MACHINE}),
        "answers of another kind": json.dumps(content | {"answers": [1]}),
        "an answer of another kind": json.dumps(content | {"answers": {"a": ["x", ""]}}),
        "an answer without a reason": json.dumps(content | {"answers": {"a": [1.0, None]}}),
        "an answer that is true": json.dumps(content | {"answers": {"a": [True, ""]}}),
        "too many": json.dumps(content | {"answers": {"a": [0.25, "x" * (1 << 22)]}}),
    }[text]


@pytest.mark.parametrize(
    "text",
    [
        *("cut", "other version", "list", "null", "number", "deep", "not text", "empty"),
        *("no answers", "answers of another kind", "an answer of another kind"),
        *("an answer without a reason", "an answer that is true", "too many"),
    ],
)
def test_a_damaged_file_is_written_anew(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = AnswerFile(tmp_path, MACHINE)
    file.path.write_bytes(damaged(text).encode(errors="surrogateescape"))
    with caplog.at_level(logging.INFO):
        assert file.read() == {}
        file.add({"b": Answer(0.5)})
    assert file.read() == {"b": Answer(0.5)} and caplog.text == ""


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is in the place of the folder: root may write everywhere."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    file = AnswerFile(blocked / "known_answers", MACHINE)
    assert file.read() == {}
    file.add({"a": Answer(0.25)})
    file.add({"b": Answer(0.25)})
    (record,) = caplog.records
    assert "cannot be written, so the kernels are checked at every load" in record.message


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = AnswerFile(tmp_path, MACHINE)
    file.path.mkdir()
    file.add({"a": Answer(0.25)})
    assert len(caplog.records) == 1 and list(tmp_path.iterdir()) == [file.path]


def _add(folder: Path, number: int) -> None:
    for i in range(20):
        AnswerFile(folder, MACHINE).add({f"{number}.{i}": Answer(0.25)})


def test_two_processes_at_once_leave_a_whole_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add, args=(tmp_path, n)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = AnswerFile(tmp_path, MACHINE).read()
    # the last to write has all of its own; of the other's some may be lost
    assert {f"{n}.19" for n in range(2)} & set(found)
    assert len(found) >= 20 and list(tmp_path.iterdir()) == [AnswerFile(tmp_path, MACHINE).path]


def test_drivers_that_only_show_a_device_are_found(tmp_path: Path) -> None:
    assert gpu_driver(tmp_path, tmp_path) is None
    (tmp_path / "dxg").touch()
    assert gpu_driver(tmp_path, tmp_path) == "of Windows (WSL)"
    (tmp_path / "nvidiactl").touch()
    assert gpu_driver(tmp_path, tmp_path) == "NVIDIA, its version cannot be read"
