"""The files of an unfinished quantization: damaged, replaced, foreign, and a disk that fills."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sdk
from sdk import CheckpointError, LoadCancelled, QuantizationError
from sdk.loaders.writers.parts import copy_data, new_file, read_parts, write_part
from tests.scripts import run_python

#: One that looks at weights alone, and one that runs text through the model.
SCHEMES = ("rtn-w8s", "gptq-w4g32")
TEXT = torch.randint(3, 448, (4, 16), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def llama(golden: Path) -> Path:
    return golden / "arch-llama3" / "hf"


@pytest.fixture(scope="module")
def expected(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What each scheme makes when nothing goes wrong."""
    folder = tmp_path_factory.mktemp("whole")
    return {scheme: make(llama, folder / scheme, scheme) for scheme in SCHEMES}


def make(model: Path, out: Path, scheme: str, **options: Any) -> bytes:
    sdk.quantize(model, out, scheme, calibration=TEXT, tokens=16, **options)
    return (out / "model.safetensors").read_bytes()


def stop_after(layers: int) -> Callable[[str, int, int], bool]:
    return lambda stage, done, total: done < layers


def begin(model: Path, out: Path, scheme: str, layers: int = 1) -> Path:
    """A job stopped after this many layers; its folder."""
    with pytest.raises(LoadCancelled):
        make(model, out, scheme, on_progress=stop_after(layers))
    return out.with_name(out.name + ".partial")


# Damage


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _long_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 1 << 62) + data[8:])


def _wrong_offsets(path: Path) -> None:
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    name = next(key for key in header if key != "__metadata__")
    begin, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = [begin + (1 << 40), end + (1 << 40)]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def _of_another_layer(path: Path) -> None:
    shutil.copyfile(path.with_name("part-00001.safetensors"), path)


@pytest.mark.parametrize(
    ("scheme", "damage"),
    [
        ("rtn-w8s", _cut),
        ("rtn-w8s", _empty),
        ("rtn-w8s", _long_header),
        ("rtn-w8s", _wrong_offsets),
        ("rtn-w8s", _of_another_layer),
        ("gptq-w4g32", _cut),
    ],
)
def test_a_damaged_part_is_made_again_and_the_result_is_the_same(
    scheme: str,
    damage: Callable[[Path], None],
    llama: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = begin(llama, tmp_path / "made", scheme, layers=2)
    damage(folder / "part-00000.safetensors")
    assert make(llama, tmp_path / "made", scheme) == expected[scheme]
    assert "part-00000.safetensors" in caplog.text and "making it again" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


@pytest.mark.parametrize("damage", [_cut, _empty, Path.unlink])
def test_a_job_whose_inputs_are_damaged_begins_anew(
    damage: Callable[[Path], None],
    llama: Path,
    tmp_path: Path,
    expected: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = begin(llama, tmp_path / "made", "gptq-w4g32")
    damage(folder / "inputs-00001.bin")
    assert make(llama, tmp_path / "made", "gptq-w4g32") == expected["gptq-w4g32"]
    assert "inputs-00001.bin: missing or damaged; the job starts over" in caplog.text


@pytest.mark.parametrize("text", ["", '{"model": "/so'])
def test_a_note_that_was_cut_off_does_not_stop_a_job(
    text: str, llama: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    folder = begin(llama, tmp_path / "made", "gptq-w4g32")
    (folder / "job.json").write_text(text)
    assert make(llama, tmp_path / "made", "gptq-w4g32") == expected["gptq-w4g32"]


def test_parts_of_another_job_are_made_again_where_the_note_is_lost(
    llama: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    folder = begin(llama, tmp_path / "made", "rtn-w4g32")
    (folder / "job.json").unlink()
    assert make(llama, tmp_path / "made", "rtn-w8s") == expected["rtn-w8s"]


def test_a_part_that_is_cut_while_it_is_joined_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "part"
    write_part(path, {"a": torch.arange(100)}, {})
    [tensor], _ = read_parts([path])
    os.truncate(path, path.stat().st_size - 100)
    message = "part: a: the last 100 bytes are missing"
    with pytest.raises(CheckpointError, match=message), new_file(tmp_path / "out") as out:
        copy_data(tensor, out)
    assert list(tmp_path.iterdir()) == [path], "nothing half-written"


# Links and foreign files


@pytest.mark.parametrize(
    "name", ["part-00000.safetensors", "part-00001.safetensors.part", "made", "job.json"]
)
def test_a_link_in_the_folder_is_refused_and_not_followed(
    name: str, llama: Path, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("mine")
    folder = begin(llama, tmp_path / "made", "rtn-w8s")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(foreign)
    with pytest.raises(
        QuantizationError, match=f"{name}: expected .* found a link; remove {folder}"
    ):
        make(llama, tmp_path / "made", "rtn-w8s")
    assert foreign.read_text() == "mine" and (folder / name).is_symlink()


def test_a_file_is_made_anew_and_never_through_a_link(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("mine")
    for link in (tmp_path / "new", tmp_path / "new.part"):
        link.symlink_to(foreign)
    with new_file(tmp_path / "new") as out:
        out.write(b"ours")
    assert foreign.read_text() == "mine"
    assert (tmp_path / "new").read_bytes() == b"ours" and not (tmp_path / "new").is_symlink()


@pytest.mark.parametrize("kind", ["folder of files", "link to a folder", "file"])
def test_what_no_job_has_made_is_refused_and_stays(kind: str, llama: Path, tmp_path: Path) -> None:
    theirs, partial = tmp_path / "theirs", tmp_path / "made.partial"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("mine")
    if kind == "folder of files":
        theirs = theirs.rename(partial)
    elif kind == "file":
        partial.write_text("mine")
    else:
        partial.symlink_to(theirs)
    with pytest.raises(QuantizationError, match=r"made\.partial.*remove .*or name another path"):
        make(llama, tmp_path / "made", "rtn-w8s")
    assert (theirs / "thesis.txt").read_text() == "mine"
    assert kind != "file" or partial.read_text() == "mine"


# Places


def test_a_result_inside_the_model_or_without_a_name_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(llama, tmp_path / "model.partial"))
    before = sorted(model.iterdir())
    with pytest.raises(QuantizationError, match="is inside the model's folder"):
        make(model, model / "made", "rtn-w8s")
    with pytest.raises(QuantizationError, match=r"model\.partial, where the model is"):
        make(model, tmp_path / "model", "rtn-w8s")
    with pytest.raises(QuantizationError, match=r"model\.partial: exists already"):
        make(model, model, "rtn-w8s")
    monkeypatch.chdir(tmp_path)
    for out in ("", ".", "..", "/", "a\0b"):
        with pytest.raises(QuantizationError, match="expected the name of a new file or folder"):
            make(model, Path(out), "rtn-w8s")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    with pytest.raises(QuantizationError, match="broken: exists already"):
        make(model, tmp_path / "broken", "rtn-w8s")
    assert sorted(model.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "model.partial"]


def test_a_folder_that_cannot_be_written_is_named(llama: Path) -> None:
    with pytest.raises(QuantizationError, match="/proc/made: cannot be written"):
        make(llama, Path("/proc/made"), "rtn-w8s")


# Interrupts and a full disk, at every change of the disk


CHANGES = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir")


def failing(patch: pytest.MonkeyPatch, at: int, error: BaseException) -> list[str]:
    """The ``at``-th call that changes the disk raises; the names of the calls so far."""
    calls: list[str] = []

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == at:
                raise error
            return real(*args, **options)

        return call

    for name in CHANGES:
        patch.setattr(os, name, wrapped(name, getattr(os, name)))
    return calls


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_job_interrupted_at_any_moment_goes_on_to_the_same_bytes(
    scheme: str, llama: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    out, at = tmp_path / "made", 0
    while not out.exists():
        at += 1
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, at, KeyboardInterrupt())
            try:
                make(llama, out, scheme)
            except KeyboardInterrupt:
                continue
    assert at > 8
    assert (out / "model.safetensors").read_bytes() == expected[scheme]


def test_a_disk_that_fills_at_any_moment_leaves_a_job_that_goes_on(
    llama: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    out, at = tmp_path / "made", 0
    while not out.exists():
        at += 2
        with pytest.MonkeyPatch.context() as patch:
            calls = failing(patch, at, full)
            try:
                make(llama, out, "gptq-w4g32")
            except QuantizationError as error:
                message = str(error)
                assert str(out) in message and "the disk is full" in message
                assert "more bytes are needed" in message and "continues" in message
                assert not list(tmp_path.rglob("*.part")) or calls[-1] == "unlink"
    assert (out / "model.safetensors").read_bytes() == expected["gptq-w4g32"]


@pytest.mark.slow
def test_a_file_system_that_fills_while_a_part_is_written_is_an_error(
    llama: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    """Of real writes that fail: a limit of the process's, which the system checks like a disk's."""
    code = """
    import resource, signal, sys
    import sdk
    from sdk import QuantizationError
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        sdk.quantize(sys.argv[1], sys.argv[2], "rtn-w8s")
    except QuantizationError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    sdk.quantize(sys.argv[1], sys.argv[2], "rtn-w8s")
    """
    out = tmp_path / "made"
    assert f"{out}: cannot be written: [Errno 27] File too large" in run_python(code, llama, out)
    assert (out / "model.safetensors").read_bytes() == expected["rtn-w8s"]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
