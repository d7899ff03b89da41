"""GGUF models split over several files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdk.loaders.gguf_files.reader import read_gguf
from sdk.quant.errors import CheckpointError

Save = Callable[..., Path]


def check_refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert path.name in str(caught.value)


# -- split models ----------------------------------------------------------------------------------


def write_split(files: Any, folder: Path, also_in_last: str = "") -> list[Path]:
    whole = files.llama()
    names = list(whole.tensors)
    paths = []
    count = 3
    for index in range(count):
        part = files.Gguf(dict(whole.metadata) if index == 0 else {})
        part.metadata |= {
            "split.no": (2, index),
            "split.count": (2, count),
            "split.tensors.count": (5, len(names)),
        }
        held = [*names[index::count], *([also_in_last] if index == 2 and also_in_last else [])]
        part.tensors = {name: whole.tensors[name] for name in held}
        paths.append(folder / f"tiny-{index + 1:05d}-of-{count:05d}.gguf")
        paths[-1].write_bytes(part.build())
    return paths


def patch(path: Path, old: bytes, new: bytes) -> None:
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new))


def test_a_split_model_reads_like_the_whole(files: Any, tmp_path: Path) -> None:
    whole = files.llama()
    found = read_gguf(write_split(files, tmp_path)[0])
    assert found.tensors.keys() == whole.tensors.keys()
    for name, (_, _, data) in whole.tensors.items():
        assert bytes(found.data(name)) == data


def test_a_later_part_names_the_first(files: Any, tmp_path: Path) -> None:
    check_refused(write_split(files, tmp_path)[1], "part 2 of 3.*open tiny-00001-of-00003.gguf")


def test_a_missing_part_is_named(files: Any, tmp_path: Path) -> None:
    paths = write_split(files, tmp_path)
    paths[2].unlink()
    check_refused(paths[0], "missing: tiny-00003-of-00003.gguf")


def test_a_part_under_another_name_is_refused(files: Any, tmp_path: Path) -> None:
    paths = write_split(files, tmp_path)
    check_refused(paths[0].rename(tmp_path / "model.gguf"), "its name must end in -00001-of-00003")


def test_a_part_in_the_place_of_another_is_refused(files: Any, tmp_path: Path) -> None:
    paths = write_split(files, tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"00003-of-00003.*\(1, 3\), expected \(2, 3\)"):
        read_gguf(paths[0])


def test_a_tensor_in_two_parts_is_refused(files: Any, tmp_path: Path) -> None:
    paths = write_split(files, tmp_path, also_in_last="token_embd.weight")
    patch(paths[0], b"split.tensors.count\5\0\0\0\x0b", b"split.tensors.count\5\0\0\0\x0c")
    with pytest.raises(
        CheckpointError, match=r"00003-of.*'token_embd.weight' is also in .*00001-of"
    ):
        read_gguf(paths[0])


def test_a_wrong_total_of_tensors_is_refused(files: Any, tmp_path: Path) -> None:
    paths = write_split(files, tmp_path)
    key = b"split.tensors.count" + struct.pack("<I", 5)
    patch(paths[0], key + struct.pack("<i", 11), key + struct.pack("<i", 12))
    check_refused(paths[0], "split.tensors.count is 12, but the 3 files hold 11")


@pytest.mark.parametrize(("key", "value"), [("split.count", 2000), ("split.no", 60000)])
def test_impossible_split_numbers_are_refused(files: Any, save: Save, key: str, value: int) -> None:
    model = files.llama()
    model.metadata |= {"split.no": (2, 0), "split.count": (2, 2)} | {key: (2, value)}
    check_refused(save(model.build()), f"{key} is {value}, expected 0 to 1024")
