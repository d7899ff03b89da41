"""The sampling operators: tokens from logits. :mod:`sdk.kernels.operators.sampling` describes the
data."""

from __future__ import annotations

from typing import Any

import numpy as np

from sdk.kernels.context import Context
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.checks import expect
from sdk.kernels.operators.sampling import DRAW, Draws, SampleBuffers, Tokens
from sdk.kernels.packed_shapes import PackedShapes


class SamplingOps:
    """``Ops.sampling``: selects tokens. Logits are float32."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kernel: Any = None

    def argmax(self, logits: Tensor) -> Tokens:
        """The best token of each row of ``logits [R, V]``; the first wins a tie."""
        out = SampleBuffers(logits.shape[0])
        self._sample(logits, None, out)
        return out.read(logits.shape[0])

    def sample(self, logits: Tensor, draws: Draws) -> Tokens:
        """One token per row of ``logits [R, V]`` float32, drawn by ``draws [R]``.

        See :mod:`sdk.kernels.operators.sampling`. Rows whose maximum is not finite are not
        drawn.
        """
        if (
            draws.dtype != DRAW
            or draws.shape != logits.shape[:1]
            or not draws.flags.c_contiguous
            or not draws.flags.aligned
        ):
            raise KernelError(
                f"sample: expected one DRAW for each row of logits {list(logits.shape)}, "
                f"found {draws.dtype} {list(draws.shape)} with strides {draws.strides}"
            )
        out = SampleBuffers(logits.shape[0])
        self._sample(logits, draws, out)
        return out.read(logits.shape[0])

    def sample_into(self, logits: Tensor, buffers: SampleBuffers) -> None:
        """Like :meth:`sample`, with draws, shapes and masks from ``buffers``; results go there too.

        ``logits`` is not changed.
        """
        if len(buffers.tokens) < logits.shape[0]:
            raise KernelError(
                f"sample: expected buffers for {logits.shape[0]} rows, found {len(buffers.tokens)}"
            )
        self._sample(logits, buffers.draws, buffers)

    def sample_rows(
        self, logits: Tensor, draws: Tensor, shapes: PackedShapes | None = None
    ) -> Tensor:
        """Like :meth:`sample`, but the result stays on the GPU: float64 ``[R, 3]``.

        Each row has token, best logit and probability. ``draws`` float64 ``[R, 8]``: the bytes of a
        DRAW for each row. ``shapes``: for at least R rows; the device reads their contents at each
        draw. ``logits`` is not changed.
        """
        expect("sample logits", logits, torch.float32, None, None)
        expect("sample draws", draws, torch.float64, logits.shape[0], 8)
        if shapes is None:
            found: Tensor = self._sampler(logits).rows(logits, draws)
            return found
        expect("sample side", shapes.side, torch.float32, None, logits.shape[1])
        if shapes.rows < logits.shape[0]:
            raise KernelError(
                f"sample: expected shapes for {logits.shape[0]} rows, found {shapes.rows}"
            )
        changed: Tensor = self._sampler(logits).rows(logits, draws, shapes)
        return changed

    def warm_up(self, logits: Tensor) -> None:
        """Draw from ``logits [R, V]`` in every way, so that no kernel is compiled later."""
        rows = logits.shape[0]
        shapes = PackedShapes(logits.device, rows, logits.shape[1], (1, 1, 1, 1))
        draws = torch.zeros(rows, 8, dtype=torch.float64, device=logits.device)
        self.sample_rows(logits, draws, shapes)
        with np.errstate(invalid="ignore"):  # tokens that nobody drew, if it only compiles
            self.argmax(logits)

    def _sample(self, logits: Tensor, draws: Draws | None, out: SampleBuffers) -> None:
        if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
            raise KernelError(
                f"sample: expected float32 logits [R, V], found {logits.dtype} {list(logits.shape)}"
            )
        expect("sample logits", logits, torch.float32)
        if not logits.shape[0]:
            return
        self._sampler(logits).run(logits, draws, out)

    def _sampler(self, logits: Tensor) -> Any:
        if self._kernel is None:  # cached: creating and looking up a Problem takes 2 us
            found = self._context.kernel("sample", (logits,))
            if self._context.only_compiles:
                return found
            self._kernel = found
        return self._kernel
