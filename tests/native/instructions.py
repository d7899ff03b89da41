"""Instructions per multiplication of the integer products' inner loops, from the disassembly.

python instructions.py LIBRARY [--objdump TOOL] [--symbol NAME]

For every instruction-set level in the library and every kind of product: how many instructions
one pass of the loop over 32 k has, per weight and per multiplication. ``--symbol``: the loops of
another library's function instead, such as llama.cpp's ``ggml_vec_dot_q4_0_q8_0``.

Counted are all instructions between the first and the last of a loop: also those that prefetch, and
the few that only run before second terms of activations. Fails if a loop of an ARM level keeps sums
on the stack or has more instructions than it had when it was written.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

#: Multiplications of 8-bit numbers that an instruction makes, by its name and its widest register.
MULTIPLICATIONS = (
    (r"(s|u|us|su)dot\s", 16),
    (r"(s|u|us)mmla\s.*16b", 32),
    (r"(s|u)ml(al|sl|l|ull)2?\s+v\d+\.8h", 8),
    (r"(s|u)mull2?\s+v\d+\.8h", 8),
    (r"vpdpbusd\s.*%zmm", 64),
    (r"({vex} )?vpdpbusd\s.*%ymm", 32),
    (r"vpmaddubsw\s.*%zmm", 64),
    (r"vpmaddubsw\s.*%ymm", 32),
    (r"v?pmaddubsw\s.*%xmm", 16),
)
#: A vector register that goes to the stack, or comes from there.
STACK = re.compile(r"(ld|st)[a-z]+\s+q\d+.*\[sp|[xyz]mm.*\(%r[sb]p|\(%r[sb]p.*[xyz]mm")
BRANCH = re.compile(r"(?:b|b\.\w+|cbn?z|tbn?z|j\w+)\s+(?:\S+,\s*)*(?:0x)?([0-9a-f]+) <")
#: What ``panel_int`` is instantiated for: bits (native/bit_planes.hpp), k of a subgroup, minimum.
FORMATS = {
    "Q4_0, int4 symmetric": (4, 32, "false"),
    "Q4_1, Q4_K, int4-g128 with zeros": (4, 32, "true"),
    "Q8_0": (8, 32, "false"),
    "Q6_K": (6, 16, "false"),
    "expanded": (32 + 7, 32, "false"),
    "expanded, 4 bits": (32 + 4, 32, "false"),
    "expanded, matrix products": (64, 32, "false"),
    "expanded, matrix products, minimum": (64, 32, "true"),
}
#: Most instructions per multiplication of the ARM levels with 1, 2 and 4 rows of x: about 3 % more
#: than g++ 12 has.
_Q4, _Q4_MINIMUM, _Q8, _Q6, _EXPANDED, _EXPANDED_4, _MATRIX, _MATRIX_MINIMUM = FORMATS
_DOTPROD = {
    _Q4: (0.322, 0.22, 0.182),
    _Q4_MINIMUM: (0.346, 0.236, 0.195),
    _Q8: (0.355, 0.236, 0.193),
    _Q6: (0.556, 0.359),
    _EXPANDED: (0.29, 0.204, 0.165),
}
MOST: dict[str, dict[str, tuple[float, ...]]] = {
    "neon": {
        _Q4: (0.455, 0.372),
        _Q4_MINIMUM: (0.467, 0.372),
        _Q8: (0.592, 0.501),
        _Q6: (0.83, 0.59),
        _EXPANDED: (0.528, 0.469),
        _EXPANDED_4: (0.427, 0.366),
    },
    "neon_dotprod": _DOTPROD,
    "neon_i8mm": {
        **{title: most for title, most in _DOTPROD.items() if title != _EXPANDED},
        _Q8: (0.29, 0.204, 0.165),
        _MATRIX: (0.165, 0.199, 0.158),
        _MATRIX_MINIMUM: (0.171, 0.205, 0.16),
    },
}


@dataclass(frozen=True)
class Loop:
    """The instructions of one pass, without their addresses."""

    lines: tuple[str, ...]

    @property
    def multiplications(self) -> int:
        return sum(
            next((n for pattern, n in MULTIPLICATIONS if re.match(pattern, line)), 0)
            for line in self.lines
        )

    @property
    def stack(self) -> int:
        return sum(STACK.search(line) is not None for line in self.lines)


def functions(path: str, objdump: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Name and instructions, each with its address, of every function."""
    command = [objdump, "-d", "-C", "--no-show-raw-insn", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for part in text.split("\n\n"):
        head = re.match(r"\s*[0-9a-f]+ <(.*)>:", part)
        if head:
            lines = re.findall(r"^\s*([0-9a-f]+):\s+(.*)$", part, re.MULTILINE)
            yield head[1], [(int(at, 16), line) for at, line in lines]


def inner_loops(code: list[tuple[int, str]]) -> list[Loop]:
    """Loops that multiply and hold no other loop that does."""
    found: list[tuple[int, int, Loop]] = []
    for at, line in code:
        branch = BRANCH.match(line)
        if branch and code[0][0] <= int(branch[1], 16) < at:
            begin = int(branch[1], 16)
            loop = Loop(tuple(text for place, text in code if begin <= place <= at))
            if loop.multiplications:
                found.append((begin, at, loop))
    return [
        loop
        for begin, end, loop in found
        if not any((b, e) != (begin, end) and begin <= b and e <= end for b, e, _ in found)
    ]


def show(name: str, rows: int, loop: Loop) -> None:
    each = len(loop.lines) / loop.multiplications
    weights = loop.multiplications // rows
    print(
        f"{name:56} {rows:4} {len(loop.lines):6} {weights:7} {each * rows:8.3f} {each:8.3f}"
        f" {loop.stack:6}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--objdump", default="objdump")
    parser.add_argument("--symbol")
    args = parser.parse_args()
    code = dict(functions(args.library, args.objdump))
    print(f"{'':56} {'rows':>4} {'instr':>6} {'weights':>7} {'/weight':>8} {'/mult':>8} stack")
    if args.symbol:
        for name in sorted(code):
            for loop in inner_loops(code[name]) if args.symbol in name else ():
                show(name.partition("(")[0], 1, loop)
        return
    failures = []
    for level in sorted({name[1] for name in map(_panel, code) if name}):
        for title, kind in FORMATS.items():
            limits = dict(zip((1, 2, 4), MOST.get(level, {}).get(title, ()), strict=False))
            for rows in (1, 2, 4, 5, 8):
                # and any way to read scales
                symbol = f"{level}::panel_int<{kind[0]}, {kind[1]}, {kind[2]}, {rows}, "
                loops = [
                    loop for name in code if symbol in name for loop in inner_loops(code[name])
                ]
                if not loops and rows in limits:
                    failures.append(f"{symbol}: no loop that multiplies")
                for loop in sorted(loops, key=lambda loop: -len(loop.lines))[:1]:
                    show(f"{level}: {title}", rows, loop)
                    most = limits.get(rows)
                    if most and (loop.stack or len(loop.lines) > most * loop.multiplications):
                        failures.append(f"{symbol}: at most {most} per multiplication, no stack")
    if failures:
        raise SystemExit("\n".join(failures))


def _panel(name: str) -> re.Match[str] | None:
    return re.search(r"(\w+)::panel_int<", name)


if __name__ == "__main__":
    main()
