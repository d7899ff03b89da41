"""``embedlm cache``: what it shows and what it removes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sdk.cli import main
from sdk.engine.weight_cache.folder import PREAMBLE, weights_folder

NAMES = [f"{digit * 32}" for digit in "abc"]


@pytest.fixture
def folder() -> Path:
    """Three files of 8 KiB; the first one was used last."""
    found = weights_folder()
    found.mkdir(parents=True)
    for age, name in enumerate(NAMES):
        about = json.dumps({"model": f"{name[0]}.gguf", "level": "avx2"}).encode()
        path = found / f"{name}.weights"
        path.write_bytes(about.ljust(PREAMBLE, b"\0") + bytes(PREAMBLE))
        os.utime(path, (1e9 - age, 1e9 - age))
    (found / "other.txt").write_text("not ours")
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.weights"))


def test_ls_shows_what_was_used_last_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == [name[:12] for name in NAMES]
    assert lines[2].split()[1:3] == ["a.gguf", "avx2"] and lines[2].endswith("8.0 KiB")
    assert lines[-1] == f"3 in {folder}, together 24.0 KiB"


def test_ls_of_nothing_names_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out == f"0 in {weights_folder()}, together 0 B\n"


def test_a_damaged_beginning_is_shown_without_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / f"{NAMES[0]}.weights").write_bytes(b"[1]")
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[1] == "?"


def test_rm_takes_the_beginning_of_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "rm", "aaa", NAMES[2]]) == 0
    assert names(folder) == [NAMES[1]]
    assert capsys.readouterr().out.splitlines()[0] == "removed aaaaaaaaaaaa a.gguf 8.0 KiB"


def test_rm_of_another_name_removes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "rm", "a", "zz"]) == 2
    assert "no weights 'zz'; there are aaaaaaaaaaaa, bbbb" in capsys.readouterr().err
    assert main(["cache", "rm", ""]) == 2
    assert "3 begin with ''" in capsys.readouterr().err
    assert names(folder) == NAMES


def test_prune_removes_what_was_not_used_for_the_longest_time(folder: Path) -> None:
    assert main(["cache", "prune"]) == 0
    assert names(folder) == NAMES
    assert main(["cache", "prune", "--max-size", "17KB"]) == 0
    assert names(folder) == NAMES[:2]
    (folder / f"{NAMES[2]}.part").write_bytes(b"left by a process that was killed")
    assert main(["cache", "prune", "--max-size", "0"]) == 0
    assert [path.name for path in folder.iterdir()] == ["other.txt"]


def test_prune_refuses_what_is_not_a_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "prune", "--max-size", "all"]) == 2
    assert "--max-size: expected a size" in capsys.readouterr().err
    assert names(folder) == NAMES
