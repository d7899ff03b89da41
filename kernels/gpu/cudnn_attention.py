"""Attention of prompts by cuDNN, through torch's operator for it.

It is chosen only for types of pages and sizes of heads for which the card's table says from how
many queries of a request on it is faster (``libraries`` in ``tuning.py``). Tokens and drafts to
verify are ``attention_decode.py``'s, and so is everything where lengths are not known on the host
(``AttentionBatch.lengths``) or some prompt of the step is shorter.

cuDNN reads no pages, so keys and values are gathered from them. It knows one causal mask, in which
query i sees keys 0 to i. So a run of queries that follows a prefix sees the keys of its own
positions through that mask, and those before them, which all of its queries see, some at a time
without one. The results are merged by the logarithms of their sums. Runs begin and end at multiples
of ``ATTENTION_STEP``, with zeros where there is no token: cuDNN plans each shape anew, in tens of
milliseconds.

torch's own choice of a backend is a setting of the whole process, which belongs to the host; the
operator itself (``aten._scaled_dot_product_cudnn_attention``) is called here instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu.attention import Attention, Step
from sdk.kernels.gpu.scratch import ATTENTION_STEP, keys_at_once, padded_run, queries_at_once
from sdk.kernels.gpu.tuning import NOT_FASTER, Tuning
from sdk.kernels.kv.pages import KVPages

TYPES = ("float16", "bfloat16")
#: The widest head of cuDNN's attention on cards before 9.0; wider ones were not looked at.
MAX_HEAD_DIM = 128


class CudnnAttention(Attention):
    """See :meth:`sdk.kernels.operators.ops.Ops.attention` and the module."""

    def __init__(self, tuning: Tuning, *, fixed: bool = False) -> None:
        super().__init__(False, programs=tuning.programs, fixed=fixed)
        self._tuning = tuning
        self.name = "gpu.cudnn_attention"

    def tuned(self, tuning: Tuning) -> CudnnAttention:
        """This kernel with another table."""
        return CudnnAttention(tuning, fixed=self._fixed)

    def for_any_length(self, pages: KVPages) -> CudnnAttention:
        """This kernel, with which every prompt is the library's: for checks on small inputs."""
        key = "cudnn_attention", pages.dtype, pages.head_dim
        return self.tuned(Tuning(self._programs, libraries={key: 1}))

    def reject(self, problem: Problem) -> str | None:
        if problem.kv_dtype not in TYPES:
            return f"KV pages of {problem.kv_dtype}: expected {', '.join(TYPES)}"
        if problem.format:
            return f"cuDNN's has no {problem.format}"
        if problem.head_dim % 8 or problem.head_dim > MAX_HEAD_DIM:
            return f"head_dim {problem.head_dim}: expected a multiple of 8 up to {MAX_HEAD_DIM}"
        if self._fixed:
            return "the library's order of additions depends on the batch"
        if torch.version.hip is not None or operator() is None:
            return f"torch {torch.__version__} has no cuDNN attention here"
        if self._from(problem.kv_dtype, problem.head_dim) is None:
            return NOT_FASTER
        return super().reject(problem)

    def _from(self, kv_dtype: str, head_dim: int) -> int | None:
        return self._tuning.libraries.get(("cudnn_attention", kv_dtype, head_dim))

    def _prefill(self, step: Step, pages: KVPages, fewest: int) -> None:
        start = self._from(pages.dtype, pages.head_dim)
        lengths = step.batch.lengths
        prompts = [n for n, _ in lengths or () if n >= fewest]
        fits = ATTENTION_STEP % pages.page_size == 0
        if start is None or not fits or not prompts or min(prompts) < start:
            super()._prefill(step, pages, fewest)
            return
        first = 0
        for request, (count, context) in enumerate(lengths or ()):
            if count >= fewest:
                ids = step.batch.page_table[request]
                for run in runs_of(count, context, step.heads, step.head_dim):
                    _attend(step, pages, ids, first, run)
            first += count


@dataclass(frozen=True, slots=True)
class Run:
    """Queries ``begin`` to ``end - 1`` of a step's for a request; ``before``: tokens of its context
    before its first query of the step. ``base``: a multiple of the step up to the first position.
    """

    begin: int
    end: int
    before: int
    base: int

    @property
    def skipped(self) -> int:
        """Positions from ``base`` to the first query."""
        return self.before + self.begin - self.base

    @property
    def length(self) -> int:
        """Positions from ``base`` to the last query."""
        return self.before + self.end - self.base


def runs_of(count: int, context: int, heads: int, head_dim: int) -> Iterator[Run]:
    """The runs of a request with ``count`` queries, the last tokens of its context."""
    before, begin, most = context - count, 0, queries_at_once(heads, head_dim)
    while begin < count:
        base = (before + begin) // ATTENTION_STEP * ATTENTION_STEP
        end = min(count, base + most - before)
        yield Run(begin, end, before, base)
        begin = end


def _attend(step: Step, pages: KVPages, ids: Tensor, first: int, run: Run) -> None:
    """``ids``: the request's row of the table; ``first``: its first query in the step."""
    scale, size = step.numbers[0], padded_run(run.length)
    tokens = slice(first + run.begin, first + run.end)
    own = slice(run.skipped, run.length)
    q = step.q[tokens].to(pages.k.dtype)
    if len(q) < size:
        q, some = q.new_zeros(size, *q.shape[1:]), q
        q[own] = some
    queries = q.transpose(0, 1)[None]

    def part(start: int, count: int, padded: int, causal: bool) -> tuple[Tensor, Tensor]:
        wanted = pages_of(ids, start, count, padded, pages.page_size)
        k, v = (gathered(x, wanted, count) for x in (pages.k, pages.v))
        return attend(queries, k[None], v[None], scale, causal=causal, sums=run.base > 0)

    result, sums = part(run.base, run.length, size, True)
    if run.base:
        result = result.float()
    for start, count in pieces_of(run.base, keys_at_once(step.kv_heads, step.head_dim)):
        other, more = part(start, count, count, False)
        share = torch.sigmoid(more - sums)
        sums = torch.logaddexp(sums, more)
        result.lerp_(other.float(), share)
    out = step.out.view(step.out.shape[0], step.heads, step.head_dim)
    out[tokens] = result[0].transpose(0, 1)[own]


def pieces_of(keys: int, most: int) -> Iterator[tuple[int, int]]:
    """``keys``, a multiple of the step, as starts and counts; those are powers of two of it."""
    start = 0
    while start < keys:
        steps = min(most, keys - start) // ATTENTION_STEP
        count = ATTENTION_STEP << (steps.bit_length() - 1)
        yield start, count
        start += count


def pages_of(ids: Tensor, start: int, count: int, padded: int, size: int) -> Tensor:
    """The pages with a request's tokens ``start`` to ``start + count - 1``, and others for as many
    as ``padded``."""
    some = ids[start // size : -(-(start + count) // size)]
    if len(some) < padded // size:
        some, own = ids.new_zeros(padded // size), some
        some[: len(own)] = own
    return some


def gathered(x: Tensor, wanted: Tensor, count: int) -> Tensor:
    """``count`` keys or values, and zeros, from pages ``x [pages, kv_heads, page_size, head_dim]``:
    ``[kv_heads, padded, head_dim]``.

    The zeros matter though no query sees them: memory that nobody has written may hold NaN.
    """
    padded = len(wanted) * x.shape[2]
    found = x.transpose(0, 1).index_select(1, wanted).view(x.shape[1], padded, x.shape[3])
    if count < padded:
        found[:, count:] = 0
    return found


def operator() -> Any:
    """torch's operator; None if this build does not know it."""
    return getattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    """q ``[1, heads, Q, head_dim]``, k and v ``[1, kv_heads, L, head_dim]``: the result like q, and
    with ``sums`` the logarithms of the sums of its weights, float32 ``[1, heads, Q, 1]``."""
    result, found, *_ = operator()(q, k, v, None, sums, 0.0, causal, False, scale=scale)
    return result, found.reshape(*q.shape[:3], 1) if sums else found
