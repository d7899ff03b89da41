"""The hot loops as the compiler wrote them: a slow one computes the same numbers.

Read from the built library with objdump, which every machine with a compiler has. Only x86 has the
instructions asked for here.
"""

from __future__ import annotations

import platform
import re
import subprocess
from functools import cache
from importlib.util import find_spec

import pytest

from sdk.kernels.cpu import levels
from sdk.kernels.kv.kv_types import KV_TYPES

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="x86 instructions"
)

#: Moves between registers and the stack, and among registers, per vpdpbusd. Measured with g++ 12:
#: at most 0.58 (7 bits, units of 16) and 0.82 (one or two rows: each sum starts as a copy of zero).
#: When an array of sums is not taken apart into registers, every product brings two or more.
MOST_STACK_MOVES = 0.75
MOST_REGISTER_MOVES = 1.0


@cache
def disassembly() -> str:
    spec = find_spec("sdk.kernels.cpu._native")
    assert spec is not None and spec.origin is not None, "not built: run `make build`"
    command = ["objdump", "-d", "--no-show-raw-insn", spec.origin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions_of(level: str) -> dict[str, list[str]]:
    """Instructions of the inner functions of a level, by symbol. Skips the test if the library has
    no function of that level: `make run` compiles that of this CPU alone."""
    found, functions = {}, 0
    for part in disassembly().split("\n\n"):
        name = re.match(rf"\s*[0-9a-f]+ <(\S*\d{level}L?\d+\S*)>:", part)
        functions += name is not None
        if name and re.search(r"panel_|_vectors|pair_s", name[1]):
            found[name[1]] = part.splitlines()[1:]
    if not functions:
        assert level not in levels()
        pytest.skip(f"the level {level} is not built: run `make build`")
    return found


@pytest.fixture(scope="module")
def functions() -> dict[str, list[str]]:
    """Of the AVX-512 level."""
    return functions_of("avx512_vnni")


@pytest.fixture(scope="module")
def avx2() -> dict[str, list[str]]:
    return functions_of("avx2")


def inner(functions: dict[str, list[str]], name: str) -> dict[str, list[str]]:
    return {symbol: lines for symbol, lines in functions.items() if name in symbol}


def count(lines: list[str], pattern: str) -> int:
    return sum(re.search(pattern, line) is not None for line in lines)


def test_integer_products_are_vnni_instructions(functions: dict[str, list[str]]) -> None:
    products = inner(functions, "panel_int")
    assert len(products) >= 80  # bits, unit, minimum and rows make a function each
    for symbol, lines in products.items():
        # 8 per 32 k, for each row of x (after bits, unit and minimum in the symbol) and both row
        # blocks; twice where the compiler made two loops of it, as there may be nothing to prefetch
        rows = int(re.findall(r"L[ib](\d+)E", symbol)[3])
        assert count(lines, r"\bvpdpbusd\b") in (16 * rows, 32 * rows), symbol


def test_sums_stay_in_registers(functions: dict[str, list[str]]) -> None:
    for symbol, lines in inner(functions, "panel_int").items():
        dots = count(lines, r"\bvpdpbusd\b")
        stack = count(lines, r"zmm.*\(%r[sb]p\)|\(%r[sb]p.*zmm")
        moves = count(lines, r"\bvmov(dqa|ap|up)\S*\s+%zmm\d+,%zmm\d+")
        assert stack <= MOST_STACK_MOVES * dots, symbol
        assert moves <= MOST_REGISTER_MOVES * dots, symbol


def test_float_products_are_fused_and_stay_in_registers(functions: dict[str, list[str]]) -> None:
    products = inner(functions, "panel_float")
    assert len(products) >= 20  # five types, 1, 2, 4 and 8 rows
    for symbol, lines in products.items():
        rows = int(re.findall(r"Li(\d+)E", symbol)[-1])
        assert count(lines, r"\bvfmadd\d+ps\b.*zmm") >= 2 * rows, symbol
        assert count(lines, r"zmm.*\(%r[sb]p\)|\(%r[sb]p.*zmm") == 0, symbol


def test_avx2_sums_products_of_short_codes_in_16_bits(avx2: dict[str, list[str]]) -> None:
    """Codes of 4 bits take two instructions for 32 products, of which one is a multiplication, and
    their sums stay in registers: g++ would turn each into a tree, whose parts go to the stack."""
    for bits in (4, 32 + 4):  # as stored, and expanded to bytes
        # with scales that are floats, and as the weight stores them
        floats, halves = inner(avx2, f"panel_intILi{bits}ELi32ELb0ELi4E").values()
        for lines in (floats, halves):
            products = count(lines, r"\bvpmaddubsw\b")
            assert products in (64, 128), bits
            assert count(lines, r"\bvpmaddwd\b") * 8 == products, bits
            assert count(lines, r"%ymm\d+,\S*\(%r[sb]p\)") <= 0.5 * products, bits


def test_avx2_multiplies_bytes_of_several_rows_as_words(avx2: dict[str, list[str]]) -> None:
    """Two multiplications and two additions for 32 products, without changing signs."""
    floats, halves = inner(avx2, "panel_intILi8ELi32ELb0ELi4E").values()
    for lines in (floats, halves):
        assert count(lines, r"\bvpmaddwd\b") in (128, 256)
        assert not count(lines, r"\bvpsignb\b|\bvpmaddubsw\b")
    for one in inner(avx2, "panel_intILi8ELi32ELb0ELi1E").values():
        assert count(one, r"\bvpsignb\b") in (16, 32)


def test_avx2_attention_keeps_its_sums_in_registers(avx2: dict[str, list[str]]) -> None:
    """Three rows, four vectors of float16 keys: 12 sums, 3 factors and a vector take all 16
    registers. With one more, a sum goes to the stack and back for each key: 1.5 times slower."""
    (lines,) = inner(avx2, f"score_vectorsILi{KV_TYPES['float16'].cpu_element}ELi3ELi4E").values()
    assert count(lines, r"\bvfmadd\d+ps\b") >= 12
    around = 4  # outside the loop; 27 with a sum on the stack
    assert count(lines, r"ymm.*\(%r[sb]p\)|\(%r[sb]p.*ymm") <= around


@pytest.mark.parametrize("name", ["pair_scores", "pair_sums"])
def test_attention_of_codes_keeps_its_sums_in_registers(
    functions: dict[str, list[str]], name: str
) -> None:
    """Six rows, four vectors of copied codes. With the intrinsic of vpdpwssd each product brought
    two moves among registers, and prompts took 1.4 times as long."""
    (lines,) = inner(functions, f"{name}ILi6ELi4ELin1E").values()
    dots = count(lines, r"\bvpdpwssd\b")
    assert dots in (24, 48)
    assert count(lines, r"zmm.*\(%r[sb]p\)|\(%r[sb]p.*zmm") <= 0.5 * dots
    assert count(lines, r"\bvmovdqa\S*\s+%zmm\d+,%zmm\d+") <= dots


def test_products_in_bfloat16_keep_their_sums_in_registers() -> None:
    """Eight rows of a product; six rows of attention with four vectors of keys or values."""
    functions = functions_of("avx512_bf16")
    expected = {
        "panel_bf16ILi8E": 16,
        "pair_scores_bf16ILi6ELi4E": 24,
        "pair_sums_bf16ILi6ELi4E": 24,
    }
    for name, sums in expected.items():
        (lines,) = inner(functions, name).values()
        dots = count(lines, r"\bvdpbf16ps\b")
        assert dots in (sums, 2 * sums), name
        assert count(lines, r"zmm.*\(%r[sb]p\)|\(%r[sb]p.*zmm") == 0, name
        numbers = [i for i, line in enumerate(lines) if "vdpbf16ps" in line]
        loop = lines[numbers[0] : numbers[-1]]  # a sum that is kept elsewhere has two moves
        assert count(loop, r"\bvmov(dqa|ap)\S*\s+%zmm\d+,%zmm\d+") <= 2, name
