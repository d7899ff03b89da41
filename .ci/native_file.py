"""What a native library says of itself: its system, and what the system's linker loads with it.

    python .ci/native_file.py FILE...

Sources: elf(5), the generic ABI's "Symbol Versioning", Microsoft's "PE Format", <mach-o/loader.h>.
"""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path
from typing import NamedTuple

_ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
_PE_MACHINES = {0x8664: "x86_64", 0xAA64: "aarch64"}
_MACH_MACHINES = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
_LOAD_DYLIB, _BUILD_VERSION, _SYMTAB = 0xC, 0x32, 0x2
_DYNAMIC, _DYNSYM, _VERNEED, _NEEDED = 6, 11, 0x6FFFFFFE, 1
#: What zig's linker adds to every library for macOS: places in the file, no functions.
_ADDED = {"__dso_handle", "_mh_dylib_header"}
#: Of a symbol's type; the others in _VISIBLE are a debugger's, and private to a library's parts.
_EXTERNAL, _VISIBLE, _TYPE, _UNDEFINED = 0x01, 0xF1, 0x0E, 0x0


class NativeFile(NamedTuple):
    """``least``: the oldest release of the system that loads it, where the file says so.

    Of Linux it is the oldest glibc.
    """

    system: str
    machine: str
    libraries: tuple[str, ...]
    exports: frozenset[str]
    least: str = ""


def read(data: bytes) -> NativeFile:
    """:raises ValueError: not a library for 64-bit Linux, Windows or macOS, or a damaged one."""
    readers = {b"\x7fELF": _elf, b"\xcf\xfa\xed\xfe": _mach}
    reader = _pe if data[:2] == b"MZ" else readers.get(data[:4])
    if reader is None:
        raise ValueError(f"expected a native library, found a file that begins with {data[:4]!r}")
    try:
        return reader(data)
    except struct.error as error:
        raise ValueError(f"the native library is cut off: {error}") from None


def _machine(names: dict[int, str], number: int) -> str:
    if number not in names:
        raise ValueError(f"expected a library for {', '.join(names.values())}, found {number:#x}")
    return names[number]


def _elf(data: bytes) -> NativeFile:
    machine = _machine(_ELF_MACHINES, _number(data, 18, "H"))
    table, count = _number(data, 40, "Q"), _number(data, 60, "H")
    # of each section: type, where it lies, how long it is, and which section has its names
    sections = [struct.unpack_from("<4xI16xQQI", data, table + 64 * i) for i in range(count)]
    places = {kind: (at, size, link) for kind, at, size, link in sections}
    if not {_DYNAMIC, _DYNSYM} <= {*places}:
        raise ValueError("expected a shared library, found an ELF file without dynamic symbols")

    def name(link: int, offset: int) -> str:
        return _text(data, sections[link][1] + offset)

    at, size, link = places[_DYNAMIC]
    entries = [struct.unpack_from("<QQ", data, at + 16 * i) for i in range(size // 16)]
    libraries = tuple(name(link, value) for tag, value in entries if tag == _NEEDED)
    at, size, link = places[_DYNSYM]
    symbols = [struct.unpack_from("<IBBH", data, at + 24 * i) for i in range(size // 24)]
    # those that other libraries may define (st_shndx 0) are not exported
    exports = frozenset(name(link, symbol) for symbol, _, _, section in symbols if section)
    versions = []
    at, size, link = places.get(_VERNEED, (0, 0, 0))
    while size:
        several, entry, following = struct.unpack_from("<2xH4xII", data, at)
        entry += at
        for _ in range(several):
            symbol, after = struct.unpack_from("<8xII", data, entry)
            versions.append(name(link, symbol))
            entry += after
        at, size = at + following, following
    glibc = [one.removeprefix("GLIBC_") for one in versions if re.fullmatch(r"GLIBC_[\d.]+", one)]
    least = max(glibc, key=lambda one: [int(part) for part in one.split(".")], default="")
    return NativeFile("Linux", machine, libraries, exports, least)


def _pe(data: bytes) -> NativeFile:
    header = _number(data, 0x3C, "I")
    number, sections = struct.unpack_from("<HH", data, header + 4)
    machine = _machine(_PE_MACHINES, number)
    optional = header + 24
    size = _number(data, header + 20, "H")
    table = [struct.unpack_from("<8sIIII", data, optional + size + 40 * i) for i in range(sections)]

    def place(address: int) -> int:
        for _, length, start, _, at in table:
            if start <= address < start + max(length, 1):
                return address - start + at
        raise ValueError(f"address {address:#x} lies in no section")

    directories = optional + 112  # PE32+
    exports = set()
    if address := _number(data, directories, "I"):
        at = place(address)
        count, names = _number(data, at + 24, "I"), _number(data, at + 32, "I")
        pointers = place(names) if count else 0
        for i in range(count):
            exports.add(_text(data, place(_number(data, pointers + 4 * i, "I"))))
    libraries = []
    if address := _number(data, directories + 8, "I"):
        at = place(address)
        while name := _number(data, at + 12, "I"):
            libraries.append(_text(data, place(name)))
            at += 20
    least = "{}.{}".format(*struct.unpack_from("<HH", data, optional + 48))
    return NativeFile("Windows", machine, tuple(libraries), frozenset(exports), least)


def _mach(data: bytes) -> NativeFile:
    machine = _machine(_MACH_MACHINES, _number(data, 4, "I"))
    commands = _number(data, 16, "I")
    libraries, exports, least, at = [], set(), "", 32
    for _ in range(commands):
        command, size = struct.unpack_from("<II", data, at)
        if command & 0x7FFFFFFF in (_LOAD_DYLIB, 0x18, 0x1F):  # weak and re-exported ones too
            libraries.append(_text(data, at + _number(data, at + 8, "I")))
        elif command == _BUILD_VERSION:
            version = _number(data, at + 12, "I")
            least = f"{version >> 16}.{version >> 8 & 0xFF}"
        elif command == _SYMTAB:
            symbols, count, strings = struct.unpack_from("<III", data, at + 8)
            for i in range(count):
                name, kind = struct.unpack_from("<IB", data, symbols + 16 * i)
                if kind & _VISIBLE == _EXTERNAL and kind & _TYPE != _UNDEFINED:
                    exports.add(_text(data, strings + name).removeprefix("_"))
            exports -= _ADDED
        at += size
    return NativeFile("macOS", machine, tuple(libraries), frozenset(exports), least)


def _number(data: bytes, at: int, kind: str) -> int:
    return int(struct.unpack_from(f"<{kind}", data, at)[0])


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = read(Path(name).read_bytes())
        print(f"{name}: {found.machine} {found.system} {found.least}".rstrip())
        print("  needs", ", ".join(found.libraries))
        print("  exports", ", ".join(sorted(found.exports)))
