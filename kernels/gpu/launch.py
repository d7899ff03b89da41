"""Common parts of all launchers: the device of kernels, and checks of their tensors.

Triton recompiles a kernel for numbers that are 1 or multiples of 16. Arguments that change from
step to step are therefore ``do_not_specialize``: nothing is compiled while an engine serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from sdk.kernels.errors import KernelError

#: True under TRITON_INTERPRET=1: kernels then run as Python, on tensors of the CPU. The
#: interpreter's bfloat16 dot is wrong, so kernels widen its operands (``WIDEN``).
INTERPRETED = bool(triton.knobs.runtime.interpret)
#: The kind of device whose tensors kernels can access.
REACHED = "cpu" if INTERPRETED else "cuda"


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with all its arguments."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.constants, **self.options)


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
