"""The GGUF header reader: what it returns, and that no lie in a header gets past it."""

from __future__ import annotations

import logging
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from sdk.loaders.gguf_files.header import METADATA_BUDGET
from sdk.loaders.gguf_files.reader import read_gguf
from sdk.quant.errors import CheckpointError, UnsupportedError

Save = Callable[..., Path]


def check_refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert path.name in str(caught.value)


def test_metadata_and_tensors_equal_those_the_gguf_package_reads(golden: Path) -> None:
    path = golden / "gguf-Q4_K_M" / "model.gguf"
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, entry in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = ours.metadata[key]
        found = value.tolist() if isinstance(value, np.ndarray) else value
        assert found == entry.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert mine.type.name == tensor.tensor_type.name
        assert bytes(ours.data(tensor.name)) == tensor.data.tobytes()


def test_every_type_table_entry_agrees_with_the_gguf_package() -> None:
    from sdk.loaders.formats.gguf_types import GGUF_TYPES

    known = {kind.value: kind for kind in gguf.GGMLQuantizationType}
    both = GGUF_TYPES.keys() & known.keys()
    assert len(both) >= 30
    for number in both:
        mine = GGUF_TYPES[number]
        assert mine.name == known[number].name
        assert (mine.elements, mine.nbytes) == gguf.GGML_QUANT_SIZES[known[number]]


def test_every_metadata_type_survives(files: Any, save: Save) -> None:
    values = {
        0: 200, 1: -5, 2: 65535, 3: -300, 4: 2**32 - 1, 5: -(2**31), 6: 0.5, 7: True, 8: "grüße",
        10: 2**64 - 1, 11: -(2**63), 12: 1e300,
    }  # fmt: skip
    metadata = {f"k{kind}": (kind, value) for kind, value in values.items()}
    metadata |= {f"a{kind}": (9, (kind, [value, value])) for kind, value in values.items()}
    metadata["deep"] = (9, (9, [(4, [1, 2]), (8, ["x"]), (4, [])]))
    found = read_gguf(save(files.Gguf(metadata).build())).metadata
    for kind, value in values.items():
        assert found[f"k{kind}"] == value
        assert type(found[f"k{kind}"]) is type(value)
        assert list(found[f"a{kind}"]) == [value, value]
    assert [list(part) for part in found["deep"]] == [[1, 2], ["x"], []]


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(files: Any, save: Save, version: int) -> None:
    model = files.llama()
    model.version = version
    assert len(read_gguf(save(model.build())).tensors) == 11


def test_a_big_endian_file_is_read_like_its_little_endian_twin(files: Any, save: Save) -> None:
    model = files.llama()
    model.order = ">"
    originals = {name: data for name, (_, _, data) in model.tensors.items()}
    for name, (dims, kind, data) in model.tensors.items():
        model.tensors[name] = (dims, kind, np.frombuffer(data, "<f4").astype(">f4").tobytes())
    found = read_gguf(save(model.build()))
    assert found.metadata["llama.embedding_length"] == 32
    assert found.metadata["tokenizer.ggml.token_type"].tolist() == [1] * 8
    assert found.metadata["tokenizer.ggml.token_type"].dtype == np.dtype("=i4")
    assert {name: bytes(found.data(name)) for name in found.tensors} == originals


def test_a_type_without_a_big_endian_form_is_refused(files: Any, save: Save) -> None:
    model = files.llama()
    model.order = ">"
    model.tensors["output.weight"] = ((32, 8), 6, bytes(8 * 22))  # Q5_0
    found = read_gguf(save(model.build()))
    with pytest.raises(
        UnsupportedError, match=r"\.gguf: tensor 'output\.weight': the byte order of Q5_0"
    ):
        found.data("output.weight")


def test_another_alignment_is_honoured(files: Any, save: Save) -> None:
    model = files.llama()
    model.alignment = 1024
    model.metadata["general.alignment"] = (4, 1024)
    found = read_gguf(save(model.build()))
    assert all(tensor.start % 1024 == 0 for tensor in found.tensors.values())
    assert bytes(found.data("output_norm.weight")) == model.tensors["output_norm.weight"][2]


def test_bytes_after_the_last_tensor_are_reported(
    files: Any, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sdk"):
        read_gguf(save(files.llama().build() + bytes(100)))
    assert "100 bytes after the last tensor" in caplog.text


# -- files that are no GGUF files ------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    check_refused(tmp_path / "none.gguf", "no such file")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    check_refused(tmp_path, "not a regular file")


def test_a_named_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    check_refused(tmp_path / "pipe.gguf", "not a regular file")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    loop = tmp_path / "loop.gguf"
    loop.symlink_to(loop)
    check_refused(loop, "cannot be read")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\3\4" + bytes(40), "not a GGUF file"),
        (b"GGUF", "version: 4 bytes expected"),
        (b"GGUF\3\0\0\0" + bytes(8), "number of metadata entries: 8 bytes expected"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
    ],
)
def test_files_that_are_no_gguf_files_are_refused(save: Save, raw: bytes, message: str) -> None:
    check_refused(save(raw), message)


# -- headers that lie ------------------------------------------------------------------------------

T = "token_embd.weight"
LIES = [
    ("version", 0, "version 0"),
    ("version", 1, "version 1"),
    ("version", 4, "version 4"),
    ("version", 0x04000000, "version 4"),
    ("n_tensors", 2**40, "number of tensors is 1099511627776"),
    ("n_tensors", 2**63, "number of tensors is"),
    ("n_tensors", 12, "tensor 11"),
    ("n_kv", 2**40, "number of metadata entries is"),
    ("n_kv", 2**64 - 1, "number of metadata entries is"),
    ("n_kv", 13, "name of tensor 0 is"),
    ("general.architecture.name.length", 2**60, "at most 65535"),
    ("general.architecture.name.length", 0, "empty name"),
    ("general.architecture.type", 13, "unknown type 13"),
    ("general.architecture.type", 99, "unknown type 99"),
    ("general.architecture.value.length", 2**20, "bytes expected"),
    ("general.architecture.value.length", 2**60, "at most 67108864"),
    ("general.architecture.value.length", 2**64 - 1, "at most 67108864"),
    ("tokenizer.ggml.token_type.inner", 14, "array of the unknown type 14"),
    ("tokenizer.ggml.token_type.inner", 0xFFFFFFFF, "array of the unknown type"),
    ("tokenizer.ggml.token_type.count", 2**40, "length of 'tokenizer.ggml.token_type' is"),
    ("tokenizer.ggml.token_type.count", 2**63, "length of 'tokenizer.ggml.token_type' is"),
    ("tokenizer.ggml.tokens.count", 2**40, "length of 'tokenizer.ggml.tokens' is"),
    ("tokenizer.ggml.tokens[3].value.length", 2**63, "string 3 of 'tokenizer.ggml.tokens' ends"),
    (f"{T}.name.length", 64, "at most 63"),
    (f"{T}.name.length", 2**60, "at most 63"),
    (f"{T}.name.length", 0, "empty name"),
    (f"{T}.n_dims", 0, "0 dimensions"),
    (f"{T}.n_dims", 5, "5 dimensions"),
    (f"{T}.n_dims", 1000, "1000 dimensions"),
    (f"{T}.dim0", 0, "expected 1 or more"),
    (f"{T}.dim0", 2**64 - 1, "expected 1 or more"),
    (f"{T}.dim0", 2**62, "truncated"),
    (f"{T}.dim1", 2**32, "truncated"),
    (f"{T}.type", 4, "Q4_2"),
    (f"{T}.type", 37, "IQ4_NL_4_8"),
    (f"{T}.type", 43, "unknown type 43"),
    (f"{T}.type", 999, "unknown type 999"),
    (f"{T}.type", 12, "needs a multiple of 256"),
    (f"{T}.offset", 1, "at offset 1, expected 0"),
    (f"{T}.offset", 2**63, "expected 0"),
    ("output_norm.weight.offset", 0, "without gap or overlap"),
    ("output_norm.weight.offset", 4096, "without gap or overlap"),
    ("blk.0.ffn_down.weight.dim1", 33, "truncated"),
]


@pytest.mark.parametrize(("field", "value", "message"), LIES)
def test_a_header_field_that_lies_is_named(
    files: Any, save: Save, field: str, value: int, message: str
) -> None:
    raw = files.llama().lie(field, value)
    tracemalloc.start()
    try:
        check_refused(save(raw), message)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [0, 3, 48, 2**31])
def test_an_impossible_alignment_is_refused(files: Any, save: Save, value: int) -> None:
    model = files.llama()
    model.metadata["general.alignment"] = (4, value)
    check_refused(save(model.build()), f"general.alignment is {value}")


@pytest.mark.parametrize(("kind", "value"), [(5, 32), (8, "32"), (9, (4, [32]))])
def test_an_alignment_of_the_wrong_type_is_refused(
    files: Any, save: Save, kind: int, value: Any
) -> None:
    model = files.llama()
    model.metadata["general.alignment"] = (kind, value)
    check_refused(save(model.build()), f"general.alignment has the type {kind}, expected 4")


def test_dimensions_whose_product_exceeds_64_bits_are_refused(files: Any, save: Save) -> None:
    model = files.llama()
    _, kind, data = model.tensors[T]
    model.tensors[T] = ((2**32, 2**32), kind, data)
    check_refused(save(model.build()), "truncated")


def test_equal_keys_and_names_are_refused(files: Any, save: Save) -> None:
    keys = files.Gguf({"aaaa": (4, 1), "bbbb": (4, 2)}).build()
    check_refused(save(keys.replace(b"bbbb", b"aaaa")), "'aaaa' occurs twice")
    same = files.llama().build().replace(b"blk.0.attn_k.weight", b"blk.0.attn_v.weight")
    check_refused(save(same), "'blk.0.attn_v.weight' occurs twice")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            b"general.architecture",
            b"general.\xffrchitecture",
            "name of metadata entry 0 is not UTF-8",
        ),
        (b"llama", b"ll\xffma", "'general.architecture' is not UTF-8"),
        (b"llama", b"ll\0ma", "'general.architecture' holds a NUL"),
        (b"t3", b"\xff3", "string 3 of 'tokenizer.ggml.tokens' is not UTF-8"),
        (b"token_embd.weight", b"token_embd\0weight", "name of tensor 0 holds a NUL"),
        (b"token_embd.weight", b"token_embd\xfeweight", "name of tensor 0 is not UTF-8"),
    ],
)
def test_strings_must_be_utf8_without_nul(
    files: Any, save: Save, old: bytes, new: bytes, message: str
) -> None:
    check_refused(save(files.llama().build().replace(old, new, 1)), message)


def test_a_string_array_that_runs_off_the_file_is_refused(save: Save) -> None:
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2)
    check_refused(save(head + struct.pack("<Q", 9) + b"123456789"), "string 1 of 'k' starts past")


@pytest.mark.parametrize("depth", [5, 2000, 200_000])
def test_deep_arrays_are_refused(save: Save, depth: int) -> None:
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9)
    nested = struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)
    check_refused(save(head + nested), "nested more than 4 deep")


def test_metadata_beyond_the_budget_is_refused(save: Save) -> None:
    count = METADATA_BUDGET // 64 + 1
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, count)
    path = save(head)
    with path.open("r+b") as file:  # sparse: zeros are empty strings
        file.truncate(len(head) + 8 * count)
    check_refused(path, "needs more than 128 MiB")


def test_a_string_longer_than_any_real_one_is_refused(save: Save) -> None:
    length = 100 << 20
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IQ", 8, length)
    path = save(head)
    with path.open("r+b") as file:
        file.truncate(len(head) + length)
    tracemalloc.start()
    try:
        check_refused(path, "'k' is 104857600 bytes long, at most 67108864")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_file_cut_anywhere_in_its_header_or_data_is_refused(files: Any, save: Save) -> None:
    model = files.llama()
    raw = model.build()
    for size in [*range(model.header_size), *range(model.header_size, len(raw), 997), len(raw) - 1]:
        path = save(raw[:size])
        with pytest.raises(CheckpointError):
            read_gguf(path)


def test_no_mutation_of_a_header_gets_past_as_anything_but_an_error(files: Any, save: Save) -> None:
    model = files.llama()
    raw = model.build()
    numbers = list(model.fields.items())
    extremes = [0, 1, 2, 31, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
    rng = random.Random(20240817)
    outcomes = {"refused": 0, "read": 0}
    for round_ in range(800):
        mutant = bytearray(raw)
        if round_ % 2:
            for _ in range(rng.randint(1, 4)):
                mutant[rng.randrange(model.header_size)] = rng.randrange(256)
        else:
            start, code = rng.choice(numbers)[1]
            size = struct.calcsize(code)
            value = rng.choice(extremes) % 2 ** (8 * size)
            mutant[start : start + size] = value.to_bytes(size, "little")
        path = save(bytes(mutant))
        try:
            found = read_gguf(path)
            for name in found.tensors:
                found.data(name)
        except CheckpointError as error:
            assert path.name in str(error)
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
    # Both happen: a flipped letter in a token is not visible in the header.
    assert outcomes["refused"] > 300
    assert outcomes["read"] > 50
