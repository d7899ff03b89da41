"""Long FP8 products by torch's ``_scaled_mm``, which calls the vendor's library.

It is chosen only for shapes for which the card's table says from how many tokens on it is faster
(``libraries`` in ``tuning.py``); fewer tokens, and results that it cannot write in place, are
multiplied by ``product_bytes.py``. ``use_fast_accum=False``: with it, sums of e4m3 products keep 13
bits on Hopper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.byte_rows import ByteRows
from sdk.kernels.gpu.linear_as_file import TritonLinearAsFile
from sdk.kernels.gpu.packing import Packed
from sdk.kernels.gpu.scratch import rows_of_codes, runs
from sdk.kernels.gpu.tuning import NOT_FASTER
from sdk.kernels.operators.rounding import Rounded, Rows
from sdk.kernels.weights.layouts import ActivationScheme, Layout

#: One scale for each token: what the library multiplies as it is.
SCHEME = ActivationScheme("e4m3")
#: Rows of a weight must be a multiple of this for the library.
_ALIGNED = 16
#: The allowed distance from float64, as a share of the norm: rounding to bfloat16 is at 0.002, a
#: wrong order of scales above 0.1.
_LIMIT = 5e-3
#: Rows of a weight and tokens that are compared.
_CHECKED = 64
#: Types of results that the library writes in place.
WRITTEN = (torch.float32, torch.bfloat16)


class ScaledMM(TritonLinearAsFile):
    """See :class:`sdk.kernels.backend.LinearKernel` and the module."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._checked: set[tuple[int, int]] = set()
        self.name = "gpu.scaled_mm"

    def reject(self, problem: Problem) -> str | None:
        if problem.format != "float8_e4m3fn" or problem.inputs != str(SCHEME):
            found = f"{problem.format} {problem.layout} with {problem.inputs or 'exact'} inputs"
            return f"{found}: expected float8_e4m3fn with {SCHEME} inputs"
        if problem.group < problem.in_features:
            return f"groups of {problem.group}: expected one scale for a row"
        if "e4m3" not in self._codes:
            return "the card multiplies no e4m3"
        if self._fixed:
            return "the library's order of additions depends on the batch"
        if problem.out_features % _ALIGNED:
            return f"{problem.out_features} rows: expected a multiple of {_ALIGNED}"
        if not hasattr(torch, "_scaled_mm"):
            return f"torch {torch.__version__} has no _scaled_mm"
        if self._from(problem.out_features, problem.in_features) is None:
            return NOT_FASTER
        return super().reject(problem)

    def pack(self, layout: Layout) -> Any:
        """:raises KernelError: the library multiplies this shape wrongly."""
        packed = super().pack(layout)
        if isinstance(packed, ByteRows) and packed.shape not in self._checked:
            for dtype in WRITTEN:
                check(packed, dtype)
            self._checked.add(packed.shape)
        return packed

    def matmul(self, packed: Packed | ByteRows, x: Rows, out: Tensor, activation: str = "") -> None:
        start = self._from(*packed.shape)
        fits = not activation and out.is_contiguous() and out.dtype in WRITTEN
        if not isinstance(packed, ByteRows) or start is None or x.shape[0] < start or not fits:
            super().matmul(packed, x, out, activation)
            return
        for rows in runs(x.shape[0], rows_of_codes(packed.values.shape[1])):
            if isinstance(x, Rounded):
                codes, scales = x.codes[rows], x.scales[0, rows]
            else:
                codes, some, _ = self._round(packed, x[rows])
                scales = some[0]
            multiply_scaled(packed, codes, scales, out[rows])

    def _from(self, n: int, k: int) -> int | None:
        return self._tuning.libraries.get(("scaled_mm", n, k))


def multiply_scaled(w: ByteRows, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """``out [M, N]``, contiguous, from codes ``[M, K']`` and scales ``[M]``.

    The library applies scales of rows only where it writes bfloat16. Float32 sums are multiplied
    afterwards.
    """
    rows = scales.view(-1, 1)
    columns = w.scale[0].float().repeat_interleave(w.scale_rows)[: w.shape[0]].view(1, -1)
    short = out.dtype == torch.bfloat16
    one = torch.ones((), device=codes.device)
    torch._scaled_mm(
        codes,
        w.values.t(),
        scale_a=rows.contiguous() if short else one,
        scale_b=columns.contiguous() if short else one,
        out_dtype=out.dtype,
        use_fast_accum=False,
        out=out,
    )
    if not short:
        out.mul_(rows).mul_(columns)


def check(w: ByteRows, dtype: torch.dtype) -> None:
    """Compare the library's product of ``w`` with that of its values in float64.

    :raises KernelError: they differ.
    """
    (n, k), device = w.shape, w.values.device
    random = torch.Generator().manual_seed(k)
    noise = torch.randn(_CHECKED, w.values.shape[1], generator=random)
    noise[:, k:] = 0
    codes = noise.to(device).to(w.values.dtype)
    scales = (torch.rand(_CHECKED, generator=random) + 0.5).to(device)
    out = torch.full((_CHECKED, n), float("nan"), dtype=dtype, device=device)
    multiply_scaled(w, codes, scales, out)
    some = torch.arange(n - min(n, _CHECKED), n, device=device)
    scale = w.scale[0, some // w.scale_rows].double()
    values = w.values[n - len(some) :].double() * scale.view(-1, 1)
    right = codes.double() * scales.double().view(-1, 1) @ values.t()
    away = float((out[:, n - len(some) :].double() - right).norm() / right.norm())
    if not away <= _LIMIT:
        what = str(dtype).removeprefix("torch.")
        raise KernelError(f"_scaled_mm: {away:.3g} of the norm from float64 in {what}")
