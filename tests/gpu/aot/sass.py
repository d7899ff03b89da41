"""What the machine code of an NVIDIA kernel says of its speed: instructions, and its main loop.

The text is that of ``nvdisasm -c``: labels, and instructions with their addresses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

#: Multiply matrices; ``HMMA`` by a warp, ``HGMMA`` and ``QGMMA`` by four, which do not wait.
MATRIX = re.compile(r"[HIQDB]G?MMA\b|UTC[HIQ]?MMA\b")
_LINE = re.compile(r"(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
#: Of which pipe an instruction is; all others only take a turn to be issued.
ALU = (
    *("LOP3", "SHF", "PRMT", "IADD3", "VIADD", "ISETP", "SEL", "FSEL", "FSETP", "FMNMX", "IMNMX"),
    *("VIMNMX", "LEA", "PLOP3", "MOV", "I2FP", "F2FP", "IABS", "SGXT", "BMSK"),
)
FMA = ("FFMA", "FMUL", "FADD", "IMAD", "HFMA2", "HMUL2", "HADD2", "HSET2", "HSETP2")
#: Read or write the card's memory.
GLOBAL = ("LDG", "STG", "LDGSTS", "ATOM", "ATOMG", "RED", "REDG", "UBLKCP", "UTMALDG", "UTMASTG")
#: Waits for earlier kernels (``griddepcontrol.wait``).
_AFTER_EARLIER = "ACQBULK"
#: Waits for the products of four warps to end.
_WAIT = "WARPGROUP.DEPBAR"


class Instruction(NamedTuple):
    name: str
    operands: str


class Code(NamedTuple):
    """Instructions in order, without those that fill up the end, and the places of labels."""

    instructions: Sequence[Instruction]
    labels: dict[str, int]


def read_code(text: str) -> Code:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for label, name, operands in _LINE.findall(text):
        if label:
            labels[label] = len(instructions)
        elif name != "NOP":
            instructions.append(Instruction(name, operands))
    return Code(instructions, labels)


def main_loop(code: Code) -> Sequence[Instruction]:
    """The largest loop without another one inside; empty where there is none.

    With an unrolled loop and one for the rest, the unrolled one. A loop ends with a branch back; a
    branch to itself only fills up the end.
    """
    spans = []
    for at, instruction in enumerate(code.instructions):
        target = re.search(r"\.L_x_\d+", instruction.operands)
        if instruction.name == "BRA" and target and code.labels.get(target[0], at) < at:
            spans.append((code.labels[target[0]], at + 1))
    inner = [
        (begin, end)
        for begin, end in spans
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans)
    ]
    begin, end = max(inner, key=lambda span: span[1] - span[0], default=(0, 0))
    return code.instructions[begin:end]


def count(instructions: Sequence[Instruction], *names: str) -> int:
    """Instructions with such a name, whatever their suffixes."""
    return sum(instruction.name.partition(".")[0] in names for instruction in instructions)


def _is_wide(x: Instruction) -> bool:
    """Whether it loads 16 bytes of the card's memory."""
    return x.name.startswith(("LDG.", "LDGSTS.")) and re.search(r"\.128\b", x.name) is not None


def facts(text: str) -> dict[str, int]:
    """Numbers of one kernel; see ``records.py`` for what fails where they get worse.

    ``early``: accesses to memory before the wait for earlier kernels (``launch.after_earlier``).
    ``lone_waits``: of the main loop, waits right after a product, within eight instructions: the
    matrix units do nothing until the next product. (A product for several tokens takes 16 cycles
    and more.) ``loop_ahead``: instructions of the main loop behind its last load of 16 bytes.
    """
    code = read_code(text)
    loop = main_loop(code)
    products = [at for at, x in enumerate(loop) if MATRIX.match(x.name)]
    waits = [at for at, x in enumerate(loop) if x.name.startswith(_WAIT)]
    names = [x.name for x in code.instructions]
    waited = names.index(_AFTER_EARLIER) if _AFTER_EARLIER in names else len(names)
    return {
        "instructions": len(code.instructions),
        "matrix": sum(bool(MATRIX.match(x.name)) for x in code.instructions),
        "spills": count(code.instructions, "STL", "LDL"),
        "wide": sum(map(_is_wide, code.instructions)),
        "early": count(code.instructions[:waited], *GLOBAL),
        "i2f": count(code.instructions, "I2F"),
        "ldg": count(code.instructions, "LDG", "LDGSTS"),
        "lds": count(code.instructions, "LDS", "LDSM"),
        "sts": count(code.instructions, "STS", "STSM"),
        "bars": count(code.instructions, "BAR"),
        "alu": count(code.instructions, *ALU),
        "fma": count(code.instructions, *FMA),
        "loop": len(loop),
        "loop_alu": count(loop, *ALU),
        "loop_fma": count(loop, *FMA),
        "loop_matrix": len(products),
        "loop_waits": len(waits),
        "loop_bars": count(loop, "BAR"),
        "loop_ahead": min((len(loop) - at for at, x in enumerate(loop) if _is_wide(x)), default=0),
        "lone_waits": sum(any(0 < at - p <= 8 for p in products) for at in waits),
    }
