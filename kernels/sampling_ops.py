"""Tokens from logits: the operators behind :mod:`sdk.kernels.sampling`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdk.kernels.checks import expect
from sdk.kernels.errors import KernelError
from sdk.kernels.sampling import DRAW, Draws, Penalties, SampleBuffers, Tokens


class SamplingOps:
    """The part of :class:`sdk.kernels.ops.Ops` that chooses tokens. Logits are float32."""

    _sampling: Any = None

    def _kernel(self, op: str, **fields: Any) -> Any:
        raise NotImplementedError

    def argmax(self, logits: Tensor) -> Tokens:
        """The first best token of each row of ``logits [R, V]`` float32; no probabilities."""
        out = SampleBuffers(logits.shape[0])
        self._sample(logits, None, out)
        return out.read(logits.shape[0])

    def penalize(self, logits: Tensor, penalties: Penalties) -> None:
        """Lower what was there already in ``logits [R, V]`` float32: :class:`Penalties`."""
        expect("penalize logits", logits, torch.float32, None, None)
        rows, ids, counts, factors = penalties
        expect("penalize rows", rows, torch.int64, None)
        expect("penalize ids", ids, torch.int64, rows.shape[0])
        expect("penalize counts", counts, torch.float32, rows.shape[0])
        expect("penalize factors", factors, torch.float32, logits.shape[0], 3)
        if rows.shape[0]:
            self._kernel("penalize").run(logits, penalties)

    def sample(self, logits: Tensor, draws: Draws) -> Tokens:
        """One token per row of ``logits [R, V]`` float32, as ``draws [R]`` say.

        See :mod:`sdk.kernels.sampling`. A row whose maximum is not finite gets no draw.
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
        """As :meth:`sample`, the draws taken from ``buffers`` and the outcome left there."""
        if len(buffers.tokens) < logits.shape[0]:
            raise KernelError(
                f"sample: expected buffers for {logits.shape[0]} rows, found {len(buffers.tokens)}"
            )
        self._sample(logits, buffers.draws, buffers)

    def sample_rows(self, logits: Tensor, draws: Tensor) -> Tensor:
        """As :meth:`sample`, without leaving a GPU: float64 ``[R, 3]``, token, best, probability.

        ``draws`` float64 ``[R, 8]``: the bytes of a DRAW for each row.
        """
        expect("sample logits", logits, torch.float32, None, None)
        expect("sample draws", draws, torch.float64, logits.shape[0], 8)
        found: Tensor = self._kernel("sample").rows(logits, draws)
        return found

    def _sample(self, logits: Tensor, draws: Draws | None, out: SampleBuffers) -> None:
        if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
            raise KernelError(
                f"sample: expected float32 logits [R, V], found {logits.dtype} {list(logits.shape)}"
            )
        expect("sample logits", logits, torch.float32)
        if not logits.shape[0]:
            return
        if self._sampling is None:  # once: making and looking up a Problem takes 2 us
            self._sampling = self._kernel("sample")
        self._sampling.run(logits, draws, out)
