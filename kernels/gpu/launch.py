"""Common parts of all launchers: the device of kernels, and checks of their tensors.

Triton recompiles a kernel for numbers that are 1 or multiples of 16. Arguments that change from
step to step are therefore ``do_not_specialize``: nothing is compiled while an engine serves.

*Programmatic dependent launch* (CUDA's programming guide, from compute capability 9.0 on): a kernel
may be made ready, its programs placed on processors that the kernel before it leaves, while that
one still runs. A decode step of a 1B model has 140 kernels, 3.6 us each on average, of which 1.5 us
pass between two kernels without this (predicted: sdk/bench/gpu/roofline.py). Therefore every
kernel begins with :func:`after_earlier`, and :func:`run_kernel` launches it. A program waits there
until the kernels before are complete and their results visible, and only then lets the next kernel
be made ready: at most two overlap, and the later one has written nothing and read only weights
(``product_one.py``), which no kernel writes. Those of offloaded layers are copied from the host in
every step, and so read behind the wait as everything else.

Who measures or debugs turns it off: for a process with ``EMBEDLM_GPU_PDL=0`` in its environment,
for a part of it with :func:`dependent_launch`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.compile_ahead import ONLY_COMPILES

#: True under TRITON_INTERPRET=1: kernels then run as Python, on tensors of the CPU. The
#: interpreter's bfloat16 dot is wrong, so kernels widen its operands (``WIDEN``).
INTERPRETED = bool(triton.knobs.runtime.interpret)
#: The kind of device whose tensors kernels can access.
REACHED = "cpu" if INTERPRETED else "cuda"
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
#: The oldest compute capability with programmatic dependent launch.
OVERLAPS = (9, 0)
_COMPILED = tl.constexpr(not INTERPRETED)
_OVERLAPS = tl.constexpr(OVERLAPS[0])


@triton.jit
def after_earlier():
    """Before anything is written, and read but weights: see the module. Nothing on older cards."""
    if _COMPILED and cuda_capability_geq(_OVERLAPS):
        gdc_wait()
        gdc_launch_dependents()


class _Dependent:
    """Whether this process launches kernels with programmatic dependent launch where it can."""

    __slots__ = ("wanted",)

    def __init__(self, asked: str) -> None:
        if asked not in ("0", "1"):
            raise KernelError(
                f"environment variable {_VARIABLE}: expected 0 (kernels wait for the end of those "
                f"before) or 1 (they are made ready earlier, the default), found {asked!r}"
            )
        self.wanted = asked == "1"


#: Read once, when the first engine on a GPU is opened.
_VARIABLE = "EMBEDLM_GPU_PDL"
_dependent = _Dependent(os.environ.get(_VARIABLE, "1"))


@contextmanager
def dependent_launch(wanted: bool) -> Iterator[None]:
    """With programmatic dependent launch inside, or without: to measure it, or to look for a race.

    It holds for all threads of the process. A step that was recorded as a graph keeps what it was
    recorded with, so an engine is to be opened inside. Triton compiles kernels again for it, to the
    same machine code. Nothing changes on cards without it (:data:`OVERLAPS`).
    """
    before, _dependent.wanted = _dependent.wanted, wanted
    try:
        yield
    finally:
        _dependent.wanted = before


def run_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """Launch a kernel that begins with :func:`after_earlier` on the current device.

    Multiplications and additions are fused unless ``named`` says otherwise: Triton 3.10 would not,
    by default, and 3.9 warns of it; a product of 4-bit weights then has a third more instructions.
    """
    named.setdefault("enable_fp_fusion", True)
    if not INTERPRETED and torch.version.hip is None:
        overlaps = _dependent.wanted and torch.cuda.get_device_capability(None) >= OVERLAPS
        named["launch_pdl"] = overlaps
    if ONLY_COMPILES.get():
        kernel.warmup(*arguments, grid=grid, **named)
    else:
        kernel[grid](*arguments, **named)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with all its arguments."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        run_kernel(self.kernel, self.grid, **self.arguments, **self.constants, **self.options)


def old_card(device: torch.device) -> bool:
    """Whether it is an NVIDIA card before 8.0: Triton has no matrix instructions for it."""
    if INTERPRETED or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) < (8, 0)


def expect_on_device(what: str, *tensors: Tensor | None) -> None:
    """:raises KernelError: the tensors are not all on one device that Triton kernels can access."""
    devices = {x.device for x in tensors if x is not None}
    if len(devices) != 1 or next(iter(devices)).type != REACHED:
        found = ", ".join(sorted(map(str, devices)))
        raise KernelError(f"{what}: expected tensors on one {REACHED} device, found {found}")
