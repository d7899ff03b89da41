"""The instructions of NVIDIA's cards that turn codes of pages into float16 (``page_codes.py``).

Triton's interpreter does not run them, so they are run here, as PTX describes them, for all codes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdk.kernels.gpu import page_codes

_ALL = np.arange(256, dtype=np.uint8)


def run(code: str, *given: int) -> tuple[int, int]:
    """Registers ``$0`` and ``$1`` after ``code`` with ``$2`` and on ``given``."""
    registers = {f"${number}": value for number, value in enumerate(given, 2)}
    for line in code.strip("{} \n").split("\n"):
        name, operands = line.strip(" ;").split(" ", 1)
        if name == ".reg":
            continue
        to, *names = (operand.strip() for operand in operands.split(","))
        values = [registers[x] if x in registers else int(x, 0) for x in names]
        registers[to] = _OPERATIONS[name](*values) & 0xFFFFFFFF
    return registers["$0"], registers["$1"]


def _permuted(a: int, b: int, choice: int) -> int:
    source = (a | b << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(source[choice >> 4 * i & 7] for i in range(4)), "little")


def _halves(a: int, b: int, operation: np.ufunc) -> int:
    both = [np.array([x], np.uint32).view(np.float16) for x in (a, b)]
    return int(operation(*both).view(np.uint32)[0])


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.b32": lambda a, b: a >> b,
    "prmt.b32": _permuted,
    "sub.f16x2": lambda a, b: _halves(a, b, np.subtract),
    "mul.f16x2": lambda a, b: _halves(a, b, np.multiply),
}


def decoded(code: str, *more: int) -> np.ndarray:
    """What becomes of all 256 codes, four at a time."""
    words = [run(code, int(word), *more) for word in _ALL.view(np.uint32)]
    return np.array(words, np.uint32).view(np.float16).reshape(-1)


@pytest.mark.parametrize(
    ("code", "dtype"),
    [
        (page_codes.INT8_CODES, torch.int8),
        (page_codes.E4M3_CODES, torch.float8_e4m3fn),
        (page_codes.E5M2_CODES, torch.float8_e5m2),
    ],
)
def test_all_codes_become_what_they_stand_for(code: object, dtype: torch.dtype) -> None:
    found = torch.from_numpy(decoded(code.value)).float()
    right = torch.from_numpy(_ALL.copy()).view(dtype).float()
    real = ~right.isnan()
    assert real.sum() >= 250
    assert torch.equal(found[real], right[real])


@pytest.mark.parametrize("upper", [0, 0xFFFFFFFF, 0xFF00FF00])
def test_all_nibbles_become_what_they_stand_for(upper: int) -> None:
    shifts = [4 if upper >> 8 * (place % 4) & 1 else 0 for place in range(256)]
    assert decoded(page_codes.NIBBLES.value, upper).tolist() == (_ALL >> shifts & 15).tolist()
