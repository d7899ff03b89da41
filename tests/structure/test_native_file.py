"""What .ci reads in native libraries, on headers made by hand: what it finds decides on a wheel."""

from __future__ import annotations

import fnmatch
import importlib
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ABI = "embedlm_abi_version"


@pytest.fixture(scope="module")
def ci() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The modules .ci/native_file.py and .ci/wheels.py."""
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        yield importlib.import_module("native_file"), importlib.import_module("wheels")
    finally:
        sys.path.remove(str(ROOT / ".ci"))
        for name in ("native_file", "wheels"):
            sys.modules.pop(name, None)


def strings(*names: str) -> tuple[bytes, list[int]]:
    """A table of strings, and where each begins."""
    table, places = b"\0", []
    for name in names:
        places.append(len(table))
        table += name.encode() + b"\0"
    return table, places


def elf(
    libraries: tuple[str, ...] = ("libc.so.6",),
    exports: tuple[str, ...] = (ABI,),
    versions: tuple[str, ...] = ("GLIBC_2.4", "GLIBC_2.27", "GLIBC_PRIVATE", "CXXABI_1.3"),
    machine: int = 62,
) -> bytes:
    names, places = strings(*libraries, *exports, *versions, "undefined")
    needed = [struct.pack("<QQ", 1, at) for at in places[: len(libraries)]]
    here = places[len(libraries) : len(libraries) + len(exports)]
    symbols = [struct.pack("<IBBHQQ", at, 0x12, 0, 1, 0, 0) for at in here]
    symbols.append(struct.pack("<IBBHQQ", places[-1], 0x12, 0, 0, 0, 0))
    there = places[len(libraries) + len(exports) : -1]
    # one library for each version: the chains of libraries and of versions end with 0
    wanted = [
        struct.pack("<HHIII", 1, 1, 0, 16, 0 if i + 1 == len(there) else 32)
        + struct.pack("<IHHII", 0, 0, 2, at, 0)
        for i, at in enumerate(there)
    ]
    parts = [(3, names), (6, b"".join(needed)), (11, b"".join(symbols))]
    parts = [part for part in [*parts, (0x6FFFFFFE, b"".join(wanted))] if part[1]]
    body, headers = b"", b""
    for kind, data in parts:
        at = 64 + len(body)
        headers += struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, len(data), 0, 0, 1, 0)
        body += data
    head = struct.pack("<4s12sHHIQQQ", b"\x7fELF", b"\2\1\1", 3, machine, 1, 0, 0, 64 + len(body))
    return head + struct.pack("<IHHHHHH", 0, 64, 0, 0, 64, len(parts), 0) + body + headers


def pe(
    libraries: tuple[str, ...] = ("KERNEL32.dll",),
    exports: tuple[str, ...] = (ABI,),
    machine: int = 0x8664,
) -> bytes:
    names, places = strings(*libraries, *exports)
    start, at = 0x1000, 0x200  # of the section: in memory, in the file
    imports = start + len(names)
    imported = [struct.pack("<5I", 1, 0, 0, start + one, 1) for one in places[: len(libraries)]]
    table = b"".join(imported) + bytes(20)
    pointers = b"".join(struct.pack("<I", start + one) for one in places[len(libraries) :])
    directory = imports + len(table) + len(pointers)
    # NumberOfNames at 24, AddressOfNames at 32
    exported = struct.pack("<24xI4xI4x", len(exports), imports + len(table))
    section = names + table + pointers + exported
    optional = struct.pack("<48xHH60xIIII", 6, 2, directory, len(exported), imports, len(table))
    head = struct.pack("<2s58xI", b"MZ", 64)
    head += struct.pack("<4sHHIIIHH", b"PE\0\0", machine, 1, 0, 0, 0, len(optional), 0)
    head += optional + struct.pack("<8sIIII16x", b".data", len(section), start, len(section), at)
    return head.ljust(at, b"\0") + section


def mach(
    libraries: tuple[str, ...] = ("/usr/lib/libSystem.B.dylib",),
    exports: tuple[str, ...] = (ABI,),
    least: tuple[int, int] = (11, 0),
    machine: int = 0x0100000C,
    command: int = 0xC,
) -> bytes:
    kinds = [0x0F] * len(exports) + [0x01, 0x1F, 0x64]  # undefined, private, a debugger's
    names, places = strings(*(f"_{one}" for one in exports), "_used", "_hidden", "source.cpp")
    commands = [struct.pack("<6I", 0x32, 24, 1, least[0] << 16 | least[1] << 8, 0, 0)]
    for library in libraries:
        text = (library.encode() + b"\0").ljust(-(-len(library) // 8) * 8 + 8, b"\0")
        commands.append(struct.pack("<6I", command, 24 + len(text), 24, 0, 0, 0) + text)
    at = 32 + sum(map(len, commands)) + 24
    symbols = [struct.pack("<IBBHQ", p, k, 0, 0, 0) for p, k in zip(places, kinds, strict=True)]
    data = b"".join(symbols)
    commands.append(struct.pack("<6I", 0x2, 24, at, len(symbols), at + len(data), len(names)))
    size = sum(map(len, commands))
    head = struct.pack("<8I", 0xFEEDFACF, machine, 0, 6, len(commands), size, 0, 0)
    return head + b"".join(commands) + data + names


def test_of_each_system_it_reads_machine_libraries_exports_and_the_oldest_release(
    ci: tuple[ModuleType, ModuleType],
) -> None:
    read = ci[0].read
    found = read(elf(("libm.so.6", "libc.so.6"), (ABI, "b")))
    assert found == ("Linux", "x86_64", ("libm.so.6", "libc.so.6"), {ABI, "b"}, "2.27")
    assert read(elf(machine=183, versions=())) == ("Linux", "aarch64", ("libc.so.6",), {ABI}, "")
    found = read(pe(("KERNEL32.dll", "ntdll.dll"), (ABI, "b")))
    assert found == ("Windows", "x86_64", ("KERNEL32.dll", "ntdll.dll"), {ABI, "b"}, "6.2")
    assert read(pe(machine=0xAA64)).machine == "aarch64"
    found = read(mach(("/a.dylib", "/usr/b.dylib"), (ABI, "b"), (12, 3)))
    assert found == ("macOS", "aarch64", ("/a.dylib", "/usr/b.dylib"), {ABI, "b"}, "12.3")
    assert read(mach(machine=0x01000007)).machine == "x86_64"
    weak = read(mach(command=0x80000018))
    assert weak.libraries == ("/usr/lib/libSystem.B.dylib",)


def test_what_it_does_not_know_is_refused_in_words(ci: tuple[ModuleType, ModuleType]) -> None:
    read = ci[0].read
    with pytest.raises(ValueError, match="expected a native library, found a file that begins"):
        read(b"#!/bin/sh")
    for data in (elf(machine=3), pe(machine=0x14C), mach(machine=7)):
        with pytest.raises(ValueError, match="expected a library for x86_64, aarch64, found 0x"):
            read(data)
    with pytest.raises(ValueError, match="without dynamic symbols"):
        read(elf(libraries=()))
    damaged = bytearray(pe())
    struct.pack_into("<I", damaged, 64 + 24 + 120, 0x9000)
    with pytest.raises(ValueError, match="address 0x9000 lies in no section"):
        read(bytes(damaged))


@pytest.mark.parametrize("make", [elf, pe, mach])
def test_a_library_that_is_cut_off_anywhere_is_refused_or_read_in_part(
    ci: tuple[ModuleType, ModuleType], make: Callable[[], bytes]
) -> None:
    whole = make()
    refused = 0
    for size in range(4, len(whole)):
        try:
            ci[0].read(whole[:size])
        except ValueError:
            refused += 1
    assert refused > (len(whole) - 4) * 0.9


FINE = {
    "win_amd64": pe(("KERNEL32.dll", "api-ms-win-crt-heap-l1-1-0.dll")),
    "macosx_11_0_arm64": mach(exports=(ABI, "__dso_handle", "_mh_dylib_header")),
    "macosx_11_0_x86_64": mach(machine=0x01000007),
    "musllinux_1_2_x86_64": elf(("libc.so",), versions=()),
    "manylinux_2_28_aarch64": elf(machine=183, versions=("GLIBC_2.28", "GLIBC_2.9")),
}
WRONG = {
    "win_amd64": [
        (pe(("libstdc++-6.dll",)), r"needs libstdc\+\+-6.dll, which not every Windows has"),
        (pe(machine=0xAA64), "is for aarch64 Windows"),
    ],
    "macosx_11_0_arm64": [
        (mach(least=(12, 0)), "needs macOS 12.0, expected 11.0"),
        (mach(("/opt/libomp.dylib",)), "needs /opt/libomp.dylib, which not every macOS has"),
        (mach(exports=("other",)), "does not export embedlm_abi_version"),
        (mach(exports=(ABI, "_Znwm")), "exports _Znwm to the whole process"),
    ],
    "macosx_11_0_x86_64": [(mach(), "is for aarch64 macOS")],
    "musllinux_1_2_x86_64": [
        (elf(), "needs libc.so.6, which not every Linux has"),
        (elf(("libc.so",), (ABI, "_Znwm"), ()), "exports _Znwm to the whole process"),
    ],
    "manylinux_2_28_aarch64": [
        (
            elf(machine=183, versions=("GLIBC_2.28", "GLIBC_2.30")),
            "needs glibc 2.30, expected 2.28",
        ),
        (elf(("libc.so.6",)), "is for x86_64 Linux"),
    ],
}


def test_a_module_of_each_target_that_needs_more_than_its_tag_says_is_refused(
    ci: tuple[ModuleType, ModuleType],
) -> None:
    wheels = ci[1]
    assert {*FINE} == {*WRONG} == {*wheels.OTHERS}
    for tag, data in FINE.items():
        assert wheels.wrong(data, wheels.OTHERS[tag]) == "", tag
    for tag, cases in WRONG.items():
        for data, message in cases:
            found = wheels.wrong(data, wheels.OTHERS[tag])
            assert re.search(message, found), (tag, found)


def test_a_wheel_without_the_native_module_or_of_another_name_is_refused(
    ci: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    check, needed = ci[1].check, ci[1].NEEDED
    wheel = tmp_path / "embedlm-1-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name in needed:
            files.writestr(name, "")
    with pytest.raises(SystemExit, match=r"sdk/kernels/cpu/_native.pyd missing"):
        check(wheel, "linux_x86_64", "_native.pyd")
    with pytest.raises(SystemExit, match="expected py3-none-linux_aarch64"):
        check(wheel, "linux_aarch64", "_native.so")
    with zipfile.ZipFile(wheel, "a") as files:
        files.writestr("sdk/kernels/cpu/_native.so", "")
    check(wheel, "linux_x86_64", "_native.so")


def test_only_names_tags_that_there_are_compilers_for(
    ci: tuple[ModuleType, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wheels = ci[1]
    monkeypatch.setattr(wheels, "zig", lambda: "/zig")
    monkeypatch.setattr(wheels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(wheels.shutil, "which", lambda _: None)
    assert wheels.chosen(None) == ["linux_x86_64", *wheels.OTHERS]
    assert wheels.chosen(["win_amd64", "sdist"]) == ["win_amd64"]
    assert wheels.chosen(["sdist"]) == []
    with pytest.raises(SystemExit, match=r"expected some of sdist, linux_x86_64, .*found win32"):
        wheels.chosen(["win32"])
    monkeypatch.setattr(wheels.shutil, "which", lambda _: "/usr/bin/g++")
    others = [tag for tag in wheels.OTHERS if tag != "manylinux_2_28_aarch64"]
    assert wheels.chosen(None) == ["linux_x86_64", "linux_aarch64", *others]
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(wheels, "zig", lambda: "")
    monkeypatch.setattr(wheels.shutil, "which", lambda _: None)
    assert wheels.chosen(None) == ["linux_x86_64"]
    said = capsys.readouterr().out
    assert "no wheel for aarch64: aarch64-linux-gnu-g++ is missing (apt install" in said
    assert "no wheels for win_amd64, macosx_11_0_arm64" in said
    assert "zig is missing (pip install ziglang)" in said


@pytest.mark.parametrize(
    ("flow", "pattern"), [("wheels", r"ls (dist/.+\.whl)\)"), ("systems", r"pytest (dist/.+\.whl)")]
)
def test_each_machine_of_a_workflow_installs_one_of_the_wheels(
    ci: tuple[ModuleType, ModuleType], flow: str, pattern: str
) -> None:
    tags = [*ci[1].OTHERS, "manylinux_2_27_x86_64"]
    text = (ROOT / ".github" / "workflows" / f"{flow}.yml").read_text()
    [files] = re.findall(pattern, text)
    if flow == "wheels":
        globs = [files.replace("$(uname -m)", machine) for machine in ("x86_64", "aarch64")]
    else:
        wheels = re.findall(r"wheel: (\w+)", text)
        globs = [files.replace("${{ matrix.wheel }}", wheel) for wheel in wheels]
    assert len(globs) >= 2
    for glob in globs:
        names = [f"dist/embedlm-1-py3-none-{tag}.whl" for tag in tags]
        assert len(fnmatch.filter(names, glob)) == 1, glob


def test_a_source_archive_of_more_than_ten_megabytes_is_refused(
    ci: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheels = ci[1]
    monkeypatch.setattr(wheels, "backend", lambda *_: "embedlm-1.tar.gz")
    with open(tmp_path / "embedlm-1.tar.gz", "wb") as file:
        file.truncate(10_000_001)
    with pytest.raises(SystemExit, match=r"has 10\.0 MB, expected at most 10: leave files out"):
        wheels.source_archive(tmp_path)
    with open(tmp_path / "embedlm-1.tar.gz", "wb") as file:
        file.truncate(10_000_000)
    assert wheels.source_archive(tmp_path).name == "embedlm-1.tar.gz"


def test_the_hashes_are_those_that_sha256sum_reads(
    ci: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "embedlm-1.whl").write_bytes(b"abc")
    (tmp_path / "other").write_bytes(b"")
    ci[1].write_hashes(tmp_path)
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert (tmp_path / "SHA256SUMS").read_text() == f"{digest}  embedlm-1.whl\n"
