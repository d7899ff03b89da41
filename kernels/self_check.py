"""Checks kernels against the reference while weights are loaded.

A compiler, a driver or a SIMD unit can be wrong in a way that no test on another machine shows. So
the first weight of every kind is multiplied with random rows, and the result is compared, in
float64, with that of its dequantized values. If a kernel fails, the next one that accepts the
weight is used, and the layer's report gives the reason. Checks of a 135M model take 2 ms on a CPU.

On a card other kernels multiply more tokens, up to the library that gets a dequantized weight.
They are checked once for each kind of weight, and what is right is written down
(``known_answers/check.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.backend import Backend, Choice, Problem
from sdk.kernels.context import Answers, Context
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.reference.linear import slice_rows
from sdk.kernels.registry import choose
from sdk.kernels.weights.layouts import Layout, check_layout, inputs_of

#: The beginning of the reason of a kernel that failed.
FAILED = "failed its self-check"
#: Numbers of tokens to check: a single token and a few tokens use different kernels.
_TOKENS = (1, 3)
#: The same for a kind of weight on a card: a small tile, a large one, and so many tokens that a
#: weight is dequantized for the library (``Tuning.dense_from``).
_MORE_TOKENS = (16, 64, 300)
#: Rows of the weight that more tokens are multiplied with, at most: tiles of every size.
_MORE_ROWS = 2048
#: Rows of a weight that are compared at each end.
_ROWS = 16
#: The allowed distance from the reference, as a share of the norm. 8-bit activations are at 0.006;
#: a wrong scale, zero point or order of codes gives more than 0.3.
LIMITS = {"auto": 0.05, "exact": 1e-3}


class SelfCheck:
    """The checks of one engine: each kind of weight is checked once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._compiled: set[tuple[str, Problem]] = set()
        self._passed: set[tuple[str, Problem]] = set()
        self._failed: dict[tuple[str, Problem], str] = {}

    def choose(self, backends: Sequence[Backend], problem: Problem, layout: Layout) -> Choice:
        """Like :func:`sdk.kernels.registry.choose`, without kernels that fail with ``layout``.

        :raises KernelError: the layout is invalid, or all kernels reject it.
        """
        check_layout(layout)
        return choose(backends, problem, lambda kernel: self._reason(kernel, problem, layout))

    def _reason(self, kernel: Any, problem: Problem, layout: Layout) -> str | None:
        if kernel.name.startswith("reference."):
            return None
        # On a CPU, kernels are the same for any number of rows.
        whole = self._context.device.type == "cuda"
        key = (kernel.name, problem if whole else replace(problem, out_features=0))
        if key not in self._passed and key not in self._failed:
            part = layout if whole else slice_rows(layout, 0, min(layout.shape[0], _ROWS))
            given = self._context.device, self._context.activations
            self._compile(kernel, problem, layout)
            found = _difference(kernel, problem, part, *given)
            answers = self._context.answers
            if found is None and answers is not None and kernel.name.startswith("gpu."):
                found = self._with_more_tokens(answers, kernel, problem, layout)
            if found is None:
                self._passed.add(key)
            else:
                self._failed[key] = f"{FAILED}: {found}"
        return self._failed.get(key)

    def _compile(self, kernel: Any, problem: Problem, layout: Layout) -> None:
        """For a new kind of weight on a card: several kernels at a time, if that is possible."""
        kind = kernel.name, replace(problem, in_features=0, out_features=0)
        if self._context.card is None or kind in self._compiled:
            return
        self._compiled.add(kind)
        part = slice_rows(layout, 0, min(layout.shape[0], _MORE_ROWS))
        given: dict[str, Any] = {"device": self._context.device, "dtype": self._context.activations}
        with self._context.only_compiling() as compiles, suppress(Exception):  # the check will say
            if compiles:
                for weight, several in ((layout, _TOKENS), (part, _MORE_TOKENS)):
                    packed = kernel.pack(weight)
                    for tokens in several:
                        x = torch.zeros(tokens, layout.shape[1], **given)
                        kernel.matmul(packed, x, torch.empty(tokens, weight.shape[0], **given))

    def _with_more_tokens(
        self, answers: Answers, kernel: Any, problem: Problem, layout: Layout
    ) -> str | None:
        """Once for each kind of weight, not for each shape."""
        from sdk.kernels.known_answers.file import Answer

        kind = replace(problem, in_features=0, out_features=0)
        about = " ".join(f"{f.name}={getattr(kind, f.name)}" for f in fields(kind))
        part = slice_rows(layout, 0, min(layout.shape[0], _MORE_ROWS))
        given = self._context.device, self._context.activations, _MORE_TOKENS

        def check() -> Answer:
            why = _difference(kernel, problem, part, *given)
            return Answer(math.nan if why else 0.0, why or "")

        return answers.ask(f"{kernel.name} {_MORE_TOKENS} {about}", str(kernel.name), check)


def _difference(
    kernel: Any,
    problem: Problem,
    layout: Layout,
    device: torch.device,
    dtype: torch.dtype,
    several: Sequence[int] = _TOKENS,
) -> str | None:
    """The error of the kernel's products with ``layout``, or ``None`` if they are right."""
    rows, columns = layout.shape
    ends = ends_of(rows)
    values = [_numbers(decode(slice_rows(layout, end.start, end.stop))) for end in ends]
    random = Random(columns)  # numpy's takes 6 ms to import
    scheme = inputs_of(layout) if problem.inputs else None
    try:
        packed = kernel.pack(layout)
        for tokens in several:
            noise = np.frombuffer(random.randbytes(2 * tokens * columns), np.int16)
            x = torch.from_numpy((noise / 2.0**15).astype(np.float32).reshape(tokens, columns))
            x = x.to(device, dtype)
            out = torch.full((tokens, rows), math.nan, dtype=dtype, device=device)
            kernel.matmul(packed, x, out)
            seen = _numbers(x if scheme is None else fake_quantize(x.float(), scheme))
            for end, value in zip(ends, values, strict=True):
                distance = _distance(_numbers(out[:, end]), seen, value)
                if not distance <= LIMITS[problem.compute]:
                    many = "1 token" if tokens == 1 else f"{tokens} tokens"
                    return f"{distance:.3g} of the norm from the reference for {many}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def ends_of(rows: int) -> list[slice]:
    """Of a weight with this many rows, what is compared."""
    ends = [slice(max(0, rows - _ROWS), rows)]
    if rows > _ROWS:
        ends.append(slice(0, _ROWS))
    return ends


def away_from(found: Tensor, x: Tensor, w: Tensor) -> float:
    """How far ``found`` is from ``x w^T``: see :func:`_distance`."""
    return _distance(_numbers(found), _numbers(x), _numbers(w))


def _numbers(x: Tensor) -> NDArray[np.float64]:
    """For numpy: torch's threads take 15 to 40 ms for a small product while others are busy."""
    found: NDArray[np.float64] = x.double().cpu().numpy()
    return found


def _distance(found: NDArray[np.float64], x: NDArray[np.float64], w: NDArray[np.float64]) -> float:
    """The distance from ``x w^T``, as a share of the norm expected for random x, because the norm
    of a single product may be almost 0. It is 0 if the weight itself is not finite."""
    norm = _norm(x) * _norm(w) / math.sqrt(w.shape[1])
    if not math.isfinite(norm):
        return 0.0
    away = _norm(found - np.einsum("mk,nk->mn", x, w))
    return away / norm if norm else away


def _norm(x: NDArray[np.float64]) -> float:
    """Without BLAS, whose threads would then wait actively for 30 ms beside those that pack."""
    return math.sqrt(float(np.einsum("mk,mk->", x, x)))


def failures(declined: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The kernels, with reasons, that rejected a weight only because of a failed check."""
    return [(name, why) for name, why in declined if why.startswith(FAILED)]
