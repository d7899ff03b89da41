"""The Triton kernels without a GPU: this folder runs in a pytest process of its own.

Triton decides when it is imported whether it interprets, so the variable is set here, before; a
process that has imported it without cannot run these tests.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/gpu needs a process of its own: pytest tests/gpu")
os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter


def _loaded(name: str, *path: str) -> Any:
    """A module of another folder of tests, which are not packages: by path, once."""
    file = Path(__file__).parents[1].joinpath(*path)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The layouts of the CPU's kernel tests are these tests' layouts too.
kernel_cases = _loaded("kernel_cases", "kernels", "conftest.py")
_loaded("fake_cuda", "engine", "fake_cuda.py")
_loaded("fake_card", "engine", "fake_card.py")

# numpy 2.4 does not turn an array of one element into a number any more, which the interpreter of
# Triton 3.6 does for the bounds of a loop.
_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, *scope: Any) -> None:
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_index

# A conversion from float32 to bfloat16 rounds on every target (seen in the code for sm_80, sm_90,
# gfx90a and gfx942); the interpreter's cuts off.
_convert_float = interpreter._convert_float


def _convert_rounding(x: Any, given: Any, wanted: Any, mode: Any) -> Any:
    if (given, wanted) != (tl.float32, tl.bfloat16):
        return _convert_float(x, given, wanted, mode)
    bits = torch.from_numpy(np.array(x, np.float32)).bfloat16().view(torch.int16)
    return bits.numpy().view(np.uint16)


interpreter._convert_float = _convert_rounding


# A row of a product has the same bits in every place of a tile: a matrix instruction sums all its
# elements in one order. OpenBLAS for AVX2 sums 12 rows at a time and the last of 16 otherwise, so
# each row is a product of its own.
class _RowByRow:
    """numpy with another ``matmul``, as the interpreter's products see it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        return np.matmul(a[..., :, None, :], b[..., None, :, :], dtype=dtype)[..., 0, :]


interpreter.np = _RowByRow()

one_torch_thread = kernel_cases.one_torch_thread


@pytest.fixture(scope="session")
def cases() -> Any:
    return kernel_cases.Cases
