"""One token per row of logits: ``native/sampling.hpp``."""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import OpKind, SampleArgs
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.sampling import Draws, SampleBuffers


class Sample:
    """See :meth:`sdk.kernels.operators.ops.Ops.sample`.

    Agrees with the reference as :mod:`sdk.kernels.operators.sampling` says; weights below e^-87.3
    of the best are 0. A row's token is the same at every AVX level.
    """

    name = "cpu.sample"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, logits: Tensor, draws: Draws | None, out: SampleBuffers) -> None:
        """``logits [R, V]`` float32, R and V at least 1; without ``draws`` the argmax.

        Shapes, masks and mask tasks are read where ``out`` has them, also in a step that was
        recorded.
        """
        if not logits.is_cpu:
            raise KernelError(f"sample: expected logits on cpu, found {logits.device}")
        rows, width = logits.shape
        if width >= 2**31:
            raise KernelError(f"sample: expected less than 2**31 logits a row, found {width}")
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        args = SampleArgs(
            logits.data_ptr(),
            None if draws is None else draws.ctypes.data,
            out.rows_address,
            out.mask_tasks.address,
            out.tokens.ctypes.data,
            out.best.ctypes.data,
            out.probabilities.ctypes.data,
            width,
            logits.stride(0),
        )
        self._runtime.run(OpKind.SAMPLE, args, rows, "sample")
