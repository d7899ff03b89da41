"""What a native library says of itself: its system, and what the system's linker loads with it.

    python .ci/native_file.py FILE...

Sources: elf(5) through pyelftools, Microsoft's "PE Format", <mach-o/loader.h>.
"""

from __future__ import annotations

import io
import struct
import sys
from pathlib import Path
from typing import NamedTuple

_PE_MACHINES = {0x8664: "x86_64", 0xAA64: "aarch64"}
_MACH_MACHINES = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
_LOAD_DYLIB, _BUILD_VERSION, _SYMTAB = 0xC, 0x32, 0x2
_EXTERNAL, _TYPE, _UNDEFINED = 0x01, 0x0E, 0x0


class NativeFile(NamedTuple):
    """``least``: the oldest release of the system that loads it, where the file says so."""

    system: str
    machine: str
    libraries: tuple[str, ...]
    exports: frozenset[str]
    least: str = ""


def read(data: bytes) -> NativeFile:
    """:raises ValueError: it is no library of a system that embedlm has wheels for."""
    if data[:4] == b"\x7fELF":
        return _elf(data)
    if data[:2] == b"MZ":
        return _pe(data)
    if data[:4] == b"\xcf\xfa\xed\xfe":
        return _mach(data)
    raise ValueError(f"expected a native library, found a file that begins with {data[:4]!r}")


def _elf(data: bytes) -> NativeFile:
    from elftools.elf.elffile import ELFFile

    found = ELFFile(io.BytesIO(data))
    dynamic = found.get_section_by_name(".dynamic")
    libraries = tuple(tag.needed for tag in dynamic.iter_tags("DT_NEEDED"))
    symbols = found.get_section_by_name(".dynsym").iter_symbols()
    exports = frozenset(one.name for one in symbols if one["st_shndx"] != "SHN_UNDEF")
    machine = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}[found["e_machine"]]
    return NativeFile("Linux", machine, libraries, exports)


def _pe(data: bytes) -> NativeFile:
    header = _number(data, 0x3C, "I")
    machine, sections = struct.unpack_from("<HH", data, header + 4)
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
    return NativeFile("Windows", _PE_MACHINES[machine], tuple(libraries), frozenset(exports), least)


def _mach(data: bytes) -> NativeFile:
    machine, commands = _number(data, 4, "I"), _number(data, 16, "I")
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
                if kind & _EXTERNAL and not kind & 0x10 and kind & _TYPE != _UNDEFINED:
                    exports.add(_text(data, strings + name).removeprefix("_"))
        at += size
    return NativeFile("macOS", _MACH_MACHINES[machine], tuple(libraries), frozenset(exports), least)


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
