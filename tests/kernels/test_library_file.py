"""A native library of another system or processor is named, not a crash or a riddle."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from sdk.kernels.cpu import library
from sdk.kernels.cpu.library_file import made_for
from sdk.kernels.system import SYSTEM


def elf(machine: int) -> bytes:
    return b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HH", 3, machine)


def pe(machine: int) -> bytes:
    return (
        b"MZ".ljust(0x3C, b"\0") + struct.pack("<I", 0x40) + b"PE\0\0" + struct.pack("<H", machine)
    )


def mach(machine: int) -> bytes:
    return struct.pack("<II", 0xFEEDFACF, machine)


@pytest.mark.parametrize(
    ("data", "made"),
    [
        (elf(62), "x86_64 Linux"),
        (elf(183), "aarch64 Linux"),
        (elf(243), "another processor Linux"),
        (pe(0x8664), "x86_64 Windows"),
        (mach(0x0100000C), "aarch64 macOS"),
        (mach(0x01000007), "x86_64 macOS"),
        (b"", ""),
        (b"MZ", "another processor Windows"),
        (b"#!/bin/sh", ""),
    ],
)
def test_the_first_bytes_say_what_a_library_is_for(data: bytes, made: str) -> None:
    assert made_for(data) == made


#: Of each system one; this one's is left out.
FOREIGN = [
    data
    for data in (pe(0x8664), mach(0x0100000C), elf(62), elf(3))
    if made_for(data) != f"{SYSTEM.machine()} {SYSTEM.name}"
]


@pytest.mark.parametrize("data", FOREIGN, ids=made_for)
def test_a_library_of_another_system_is_named_with_what_to_do(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "_native.so"
    path.write_bytes(data.ljust(4096, b"\0"))
    found = library.load_library(str(path))
    assert isinstance(found, str) and "\n" not in found
    assert found.startswith(f"native module is for {made_for(data)}, this is ")
    assert "install the wheel for this system" in found


def test_the_library_of_this_system_is_not_foreign() -> None:
    machine = SYSTEM.machine()
    assert made_for(elf({"x86_64": 62, "aarch64": 183}[machine])) == f"{machine} Linux"


def test_where_another_suffix_is_looked_for_the_file_that_is_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel of Windows, unpacked on Linux, or the other way round: no file is found."""
    there, data = "_native.pyd", pe(0x8664)
    if SYSTEM.name == "Windows":
        there, data = "_native.so", elf(62)
    (tmp_path / there).write_bytes(data)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    found = library.find_library()
    assert isinstance(found, str) and f"is for {made_for(data)}, this is" in found
