"""For which system a native library was made, from its first bytes.

Sources: elf(5), Microsoft's "PE Format", and <mach-o/loader.h>.
"""

from __future__ import annotations

from pathlib import Path

from sdk.kernels.system import SYSTEM

_ELF_MACHINES = {62: "x86_64", 183: "aarch64", 3: "x86", 40: "arm"}
_PE_MACHINES = {0x8664: "x86_64", 0xAA64: "aarch64", 0x14C: "x86"}
_MACH_MACHINES = {0x01000007: "x86_64", 0x0100000C: "aarch64"}
_MOST = 4096


def foreign(path: Path) -> str:
    """One line if the library at ``path`` is for another system or processor; else empty."""
    try:
        with path.open("rb") as file:
            made = made_for(file.read(_MOST))
    except OSError:
        return ""  # who loads it says so
    own = f"{SYSTEM.machine()} {SYSTEM.name}"
    if not made or made == own:
        return ""
    return (
        f"native module is for {made}, this is {own} ({path}): install the wheel for this system, "
        "pip install --force-reinstall --no-deps embedlm"
    )


def made_for(data: bytes) -> str:
    """Processor and system, as in ``"aarch64 macOS"``; empty if the file is of another kind."""
    if data[:4] == b"\x7fELF":
        return f"{_ELF_MACHINES.get(_number(data, 18, 2), 'another processor')} Linux"
    if data[:2] == b"MZ":
        header = _number(data, 0x3C, 4)
        return f"{_PE_MACHINES.get(_number(data, header + 4, 2), 'another processor')} Windows"
    if data[:4] == b"\xcf\xfa\xed\xfe":
        return f"{_MACH_MACHINES.get(_number(data, 4, 4), 'another processor')} macOS"
    return ""


def _number(data: bytes, at: int, nbytes: int) -> int:
    return int.from_bytes(data[at : at + nbytes], "little")
