"""The safetensors header reader: what it returns, and that no lie in a header gets past it."""

from __future__ import annotations

import json
import logging
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sdk.loaders.folders import safetensors_reader
from sdk.loaders.folders.safetensors_reader import SafetensorsFiles, read_index
from sdk.loaders.json_file import MAX_BRACKETS
from sdk.quant.errors import CheckpointError, UnsupportedError

Save = Callable[..., Path]
NAME = "model.safetensors"
GOLDEN = Path(__file__).parents[1] / "golden"


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def check_refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFiles([path])
    assert path.name in str(caught.value)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/hf/model.safetensors")), ids=str)
def test_tensors_equal_those_the_library_reads(path: Path) -> None:
    ours, theirs = SafetensorsFiles([path]), load_file(path)
    assert ours.tensors.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours.tensor(name).dtype == values.dtype
        assert torch.equal(ours.tensor(name), values)


def test_every_dtype_torch_has_is_read(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, (_, dtype) in safetensors_reader.DTYPES.items():
        kind = getattr(torch, dtype or "", None)
        if kind is not None and name not in ("F8_E8M0", "C64"):
            raw = torch.randint(0, 2, (2, 48), dtype=torch.uint8, generator=generator)
            values[name] = raw.view(kind) if kind is not torch.bool else raw.to(torch.bool)
    assert len(values) == 15
    save_file(values, tmp_path / NAME, metadata={"format": "pt"})
    found = SafetensorsFiles([tmp_path / NAME])
    for name, expected in values.items():
        assert found.tensors[name].dtype == name
        assert torch.equal(found.tensor(name).view(torch.uint8), expected.view(torch.uint8))


def test_data_may_begin_at_any_byte(files: Any, save: Save) -> None:
    values = np.arange(4, dtype="<f4").tobytes()
    for pad in range(4):
        header = json.dumps({"a": entry("F32", [4], 0, 16)}).encode()
        header += b" " * (-len(header) % 4 + pad)
        found = SafetensorsFiles([save(files.safetensors(header, values), NAME)])
        assert found.tensor("a").tolist() == [0, 1, 2, 3]


def test_a_part_of_a_tensor_is_read_alone(files: Any, save: Save) -> None:
    values = np.arange(24, dtype="<f4")
    header = {"a": entry("F32", [3, 2, 4], 0, 96)}
    found = SafetensorsFiles([save(files.safetensors(header, values.tobytes()), NAME)])
    for index in range(3):
        expected = values.reshape(3, 2, 4)[index].tolist()
        assert found.tensor("a", index).tolist() == expected
    with pytest.raises(
        CheckpointError, match=r"'a': shape \[3, 2, 4\], expected more than 3 parts"
    ):
        found.tensor("a", 3)


def test_empty_tensors_and_scalars_are_read(files: Any, save: Save) -> None:
    header = {"a": entry("F32", [0, 4], 0, 0), "b": entry("F32", [], 0, 4)}
    found = SafetensorsFiles([save(files.safetensors(header, struct.pack("<f", 2)), NAME)])
    assert found.tensor("a").shape == (0, 4)
    assert found.tensor("b").item() == 2


def test_values_torch_has_no_type_for_are_named(files: Any, save: Save) -> None:
    path = save(files.safetensors({"a": entry("F4", [4, 2], 0, 4)}, bytes(4)), NAME)
    with pytest.raises(UnsupportedError, match=r"'a' holds F4"):
        SafetensorsFiles([path]).tensor("a")


BAD_HEADERS: list[tuple[Any, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"[]", "expected a JSON object, found list"),
    (b"\xff\xfe", "not valid JSON"),
    (b'{"a": ' + b"[" * 100_000, "nested too deeply|not valid JSON"),
    (b'{"a": 1' + b"0" * 5000 + b"}", "a number of 5001 digits"),
    (b'{"a": NaN}', "NaN is not allowed in JSON"),
    (b'{"a": {}, "a": {}}', "the key 'a' occurs twice"),
    ({"__metadata__": {"a": 1}}, "__metadata__ must map"),
    ({"__metadata__": []}, "__metadata__ must map"),
    ({"a": 1}, "tensor 'a': expected dtype, shape and data_offsets"),
    ({"a": {"dtype": "F32", "shape": [2]}}, "expected dtype, shape and data_offsets"),
    ({"a": {**entry("F32", [2], 0, 8), "b": 1}}, "expected dtype, shape and data_offsets"),
    ({"a": entry("F128", [1], 0, 8)}, "unknown dtype 'F128'"),
    ({"a": entry(["F32"], [1], 0, 8)}, "unknown dtype"),  # type: ignore[arg-type]
    ({"a": entry("F32", [-2], 0, 8)}, "is not a list of at most 16 sizes"),
    ({"a": entry("F32", [2.0], 0, 8)}, "is not a list of at most 16 sizes"),
    ({"a": entry("F32", [True, 2], 0, 8)}, "is not a list of at most 16 sizes"),
    ({"a": entry("F32", "2", 0, 8)}, "is not a list of at most 16 sizes"),  # type: ignore[arg-type]
    ({"a": entry("F32", [1] * 17 + [2], 0, 8)}, "is not a list of at most 16 sizes"),
    ({"a": entry("F32", [2**63], 0, 8)}, "is not a list of at most 16 sizes"),
    ({"a": entry("F32", [2**62, 2**62], 0, 8)}, "data_offsets give 8"),
    ({"a": entry("F32", [3], 0, 8)}, "takes 12 bytes, data_offsets give 8"),
    ({"a": entry("F4", [3], 0, 2)}, "takes 1.5 bytes"),
    ({"a": entry("F32", [2], 8, 0)}, r"data_offsets \[8, 0\] are not"),
    ({"a": entry("F32", [2], "0", 8)}, "data_offsets"),
    ({"a": entry("F32", [2], 0, 2**63)}, "data_offsets"),
    ({"a": entry("F32", [2], 2**62, 2**62 + 8)}, "begins at byte 4611686018427387904"),
    ({"a": entry("F32", [1], 0, 4)}, "there are bytes after the last tensor"),
    ({"a": entry("F32", [3], 0, 12)}, "it is truncated"),
    ({"a": entry("F32", [1], 4, 8)}, "begins at byte 4 of the data, expected 0"),
    ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, "not overlap"),
    ({}, "bytes after the last tensor"),
]


@pytest.mark.parametrize(("header", "message"), BAD_HEADERS, ids=lambda value: str(value)[:40])
def test_a_header_that_lies_is_refused(files: Any, save: Save, header: Any, message: str) -> None:
    path = save(files.safetensors(header, bytes(8)), NAME)
    tracemalloc.start()
    try:
        check_refused(path, message)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [3, 10**6, 2**40, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_refused(files: Any, save: Save, length: int) -> None:
    header = {"a": entry("F32", [2], 0, 8)}
    path = save(files.safetensors(header, bytes(8), length=length), NAME)
    check_refused(path, "not valid JSON" if length == 3 else f"header length {length}")


@pytest.mark.parametrize("raw", [b"\1", b"1234567"])
def test_a_file_shorter_than_the_header_length_is_refused(save: Save, raw: bytes) -> None:
    check_refused(save(raw, NAME), "too few for a safetensors header")


def test_a_header_longer_than_any_real_one_is_refused(save: Save) -> None:
    path = save(struct.pack("<Q", 65 << 20), NAME)
    with path.open("r+b") as file:
        file.truncate((65 << 20) + 8)
    check_refused(path, "at most 67108864 are allowed")


def test_a_header_of_nothing_but_brackets_is_refused(files: Any, save: Save) -> None:
    check_refused(save(files.safetensors(b"[" * (MAX_BRACKETS + 1)), NAME), "lists and objects")


def test_a_file_cut_anywhere_is_refused(files: Any, save: Save) -> None:
    raw = files.safetensors({"a": entry("F32", [2], 0, 8)}, bytes(8))
    for size in range(len(raw)):
        with pytest.raises(CheckpointError):
            SafetensorsFiles([save(raw[:size], NAME)])


def test_no_mutation_of_a_header_gets_past_as_anything_but_an_error(files: Any, save: Save) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": entry("F32", [2, 3], 0, 24),
        "b": entry("BF16", [4], 24, 32),
        "c": entry("I64", [1], 32, 40),
    }
    text = json.dumps(header)
    raw = files.safetensors(header, bytes(40))
    extremes = ["0", "-1", "1e3", "2.5", "null", "true", '"x"', "[]", "{}", "NaN", str(2**63)]
    rng = random.Random(20240817)
    numbers = [i for i, letter in enumerate(text) if letter.isdigit()]
    outcomes = {"refused": 0, "read": 0}
    for round_ in range(700):
        if round_ % 2:
            mutant = bytearray(raw)
            for _ in range(rng.randint(1, 3)):
                mutant[rng.randrange(8 + len(text))] = rng.randrange(256)
        else:
            at = rng.choice(numbers)
            lied = text[:at] + rng.choice(extremes) + text[at + 1 :]
            mutant = bytearray(files.safetensors(lied.encode(), bytes(40)))
        path = save(bytes(mutant), NAME)
        try:
            found = SafetensorsFiles([path])
            for name in found.tensors:
                found.tensor(name)
        except CheckpointError as error:
            assert path.name in str(error)
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
    assert outcomes["refused"] > 400
    assert outcomes["read"] > 0


# -- shards ----------------------------------------------------------------------------------------


def write_shards(files: Any, folder: Path, **places: Any) -> Path:
    """Two shards, ``a`` in the first and ``b`` in the second, and an index that says ``places``."""
    one = files.safetensors({"a": entry("F32", [2], 0, 8)}, bytes(8))
    two = files.safetensors({"b": entry("F32", [1], 0, 4)}, bytes(4))
    (folder / "1.safetensors").write_bytes(one)
    (folder / "2.safetensors").write_bytes(two)
    index = folder / "model.safetensors.index.json"
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"} | places
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_shards_are_read_as_one(files: Any, tmp_path: Path) -> None:
    found = read_index(write_shards(files, tmp_path), tmp_path)
    assert {name: len(found.tensor(name)) for name in found.tensors} == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"b": "3.safetensors"}, "shards are missing: 3.safetensors"),
        ({"b": "../2.safetensors"}, "not the plain name"),
        ({"b": "/etc/passwd"}, "not the plain name"),
        ({"b": "/tmp/2.safetensors"}, "not the plain name"),
        ({"b": "..\\2.safetensors"}, "not the plain name"),
        ({"b": "sub/2.safetensors"}, "not the plain name"),
        ({"b": "2.safetensors\0"}, "not the plain name"),
        ({"b": "2.bin"}, "not the plain name"),
        ({"b": ""}, "not the plain name"),
        ({"b": 2}, "not the plain name"),
        ({"c": "1.safetensors"}, "1.safetensors: has no tensor 'c'"),
        ({"b": "1.safetensors"}, "has no tensor 'b'|listed in"),
        ({"a": "2.safetensors", "b": "1.safetensors"}, "listed in 2.safetensors, found in 1"),
    ],
)
def test_an_index_that_lies_is_refused(
    files: Any, tmp_path: Path, places: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_index(write_shards(files, tmp_path, **places), tmp_path)


@pytest.mark.parametrize("document", ["{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_an_index_without_a_map_is_refused(tmp_path: Path, document: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(document)
    with pytest.raises(CheckpointError, match=r"weight_map is missing or empty"):
        read_index(index, tmp_path)


def test_a_tensor_in_two_shards_is_refused(files: Any, tmp_path: Path) -> None:
    index = write_shards(files, tmp_path)
    (tmp_path / "2.safetensors").write_bytes((tmp_path / "1.safetensors").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"2.safetensors: tensor 'a' is also in 1.safetensors"
    ):
        read_index(index, tmp_path)


def test_tensors_the_index_does_not_list_are_reported(
    files: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = write_shards(files, tmp_path)
    more = {"b": entry("F32", [1], 0, 4), "extra": entry("F32", [1], 4, 8)}
    (tmp_path / "2.safetensors").write_bytes(files.safetensors(more, bytes(8)))
    with caplog.at_level(logging.WARNING, "sdk"):
        read_index(index, tmp_path)
    assert "'extra'" in caplog.text
