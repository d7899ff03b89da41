"""Paged attention on the GPU: selects the kernels of a step, and their tiles.

``attention_decode.py`` handles requests with one or a few queries in the step (a token, and drafts
to verify), ``attention_prefill.py`` all others; a step with both launches both. With a fixed order
of additions the latter handles all requests: keys are summed from first to last, so that the batch,
chunking and preemption do not change results. Operands of products have the types of the pages
(codes become float16), or float32 with ``exact``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.attention_decode import decode_kernel, shared_kernel
from sdk.kernels.gpu.attention_prefill import prefill_kernel
from sdk.kernels.gpu.attention_work import work_of
from sdk.kernels.gpu.launch import INTERPRETED, expect_on_device, old_card, run_kernel
from sdk.kernels.gpu.page_codes import BYTES, FLOAT8, PORTABLE
from sdk.kernels.gpu.pages import E4M3, E5M2, INT4, PageSide, hadamard_block, page_sides, reject
from sdk.kernels.gpu.scratch import (
    FEW_SPLITS,
    LONGER,
    MOST_QUERIES,
    most_splits,
    part_count,
    requests_at_once,
    runs,
    split_count,
)
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch, WorkShape

_DOTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
#: Rows of a tile of many queries, for two groups of four warps; of any other tile, such as one over
#: a shared prefix; and of a tile without matrix instructions, where 64 rows spill up to 6.7 KiB of
#: registers per thread on sm_75.
_MANY_ROWS, _ROWS, _FEW_ROWS = 128, 64, 16
_FLOAT8_KINDS = {E4M3.value, E5M2.value}
#: Compute capabilities whose processors have 164 KiB of shared memory or more; others have 64, 100.
_ROOMY = ((8, 0), (9, 0), (10, 0))
#: Values of parts that are loaded at a time to be added up, and at most so many parts.
_JOINED, _MOST_LOADS = 4096, 16


class Attention:
    """See :meth:`sdk.kernels.operators.ops.Ops.attention`.

    ``programs``: four for each of the card's processors. ``fixed``: see the module.
    """

    def __init__(self, exact: bool, *, programs: int = 8, fixed: bool = False) -> None:
        self._exact = exact
        self._programs = programs
        self._fixed = fixed
        self.name = "gpu.attention_exact" if exact else "gpu.attention"

    def reject(self, problem: Problem) -> str | None:
        if problem.compute == "exact" and not self._exact:
            return 'its products round to 16 bits, but compute="exact"'
        if "biases" in problem.format.split():
            return "biases of scores by distance (MPNet, T5): expected linear ones or none"
        if "latent" in problem.format.split():
            return "values that are parts of keys (latent attention): it reads both"
        return reject(problem)

    def run(
        self,
        q: Tensor,
        pages: KVPages,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
        out: Tensor,
        causal: bool = True,
        biases: Tensor | None = None,
        chunked: bool = False,
        ahead: Tensor | None = None,
    ) -> None:
        assert biases is None
        sides = page_sides(pages, q.shape[2])
        index = (batch.query_start, batch.context_len, batch.page_table)
        expect_on_device("attention", q, pages.k, out, *index, sinks, slopes)
        if q.stride(2) != 1:
            raise KernelError(f"attention q: expected contiguous heads, found {q.stride()}")
        if window is not None and window < 1:
            raise KernelError(f"attention: expected a window of at least 1, found {window}")
        if scale <= 0:
            raise KernelError(f"attention: expected a scale above 0, found {scale}")
        dots = [self._dot(side) for side in sides]
        step = Step(
            q, sides, dots, batch, out, (sinks, slopes), (scale, softcap, window), chunked=chunked
        )
        if not causal or ahead is not None:
            rows = step.tile if self._fixed else step.prompt_tile
            step.prefill(rows, fewest=1, both=not causal, ahead=ahead)
            return
        if self._fixed:
            step.prefill(step.tile, fewest=1)
            return
        longest = batch.max_query_len
        queries = 1 if longest == 1 else step.most_queries
        if longest > queries:
            self._prefill(step, pages, queries + 1)
        if longest <= queries or batch.num_requests > 1:
            step.decode(queries, self._programs)

    def _prefill(self, step: Step, pages: KVPages, fewest: int) -> None:
        """The requests of the step with ``fewest`` queries or more."""
        step.prefill(step.prompt_tile, fewest=fewest)

    def _dot(self, side: PageSide) -> Any:
        return tl.float32 if self._exact else dot_type(side)


def dot_type(side: PageSide) -> Any:
    """The type of a product's operands; cards before 8.0 do not support bfloat16."""
    dtype = side.codes.dtype
    if dtype == torch.bfloat16 and not INTERPRETED:
        return tl.float32 if old_card(side.codes.device) else tl.bfloat16
    return _DOTS.get(dtype, tl.float16)


class Step:
    """The arguments that all kernels of one call share."""

    def __init__(
        self,
        q: Tensor,
        sides: tuple[PageSide, PageSide],
        dots: Sequence[Any],
        batch: AttentionBatch,
        out: Tensor,
        by_head: tuple[Tensor | None, Tensor | None],
        options: tuple[float, float | None, int | None],
        *,
        chunked: bool = False,
    ) -> None:
        self.q, self.batch, self.out = q, batch, out
        self.heads, self.head_dim = q.shape[1:]
        k, v = sides
        self.kv_heads, page_size = k.codes.shape[1:3]
        sinks, slopes = by_head
        # Without slopes the kernels have no such parameter: they are those of before.
        self.by_head = (sinks if sinks is not None else q, slopes)
        scale, softcap, window = options
        self.numbers = (scale, softcap or 0.0, window or 0)
        self.pages = (k.codes, k.scales, v.codes, v.scales)
        self.group = self.heads // self.kv_heads
        width = max(dot.primitive_bitwidth // 8 for dot in dots)
        self.block_d = max(16, triton.next_power_of_2(self.head_dim))
        # Heads above 256 have the tiles of plain units, which leave most registers: not measured.
        plain = width == 4 or old_card(q.device) or self.block_d > 256
        nibbles = INT4.value in (k.kind, v.kind)
        odd = nibbles and self.block_d != self.head_dim
        self.constants = {
            **_side_constants("K", k, dots[0]),
            **_side_constants("V", v, dots[1]),
            "CONVERT": convert_of(q.device).value,
            "WIDEN": INTERPRETED,
            "PAGE": page_size,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.block_d,
            # Two tiles of keys and of values, as operands, are within 64 KiB of shared memory; on
            # plain units within half of that, or exact products spill 288 bytes on sm_90, as int4
            # of head_dim 80 spills 32.
            "BLOCK_N": max(16, min(64, (2048 if plain else 4096 if odd else 8192) // self.block_d)),
            "WINDOW": 0 if window is None else 2 if chunked else 1,
            "SOFTCAP": softcap is not None,
        }
        self.rows = {"GROUP": self.group, "SINKS": sinks is not None}
        codes = bool(k.kind or v.kind)
        # 64 rows of codes spill 200 to 564 bytes on AMD's cards, 32 with windows and caps up to 508
        half = codes and (self.block_d > 128 or torch.version.hip is not None)
        self.tile = _FEW_ROWS if plain else 32 if half else _ROWS
        # 128 rows of codes spill 640 bytes on gfx942, 40 on sm_89, 56 on sm_120, where a warp
        # multiplies alone; int4 of head_dim 80 72 on sm_90.
        small = odd or (codes and not (9, 0) <= _capability(q.device) < (12, 0))
        few = self.tile < _ROWS or self.block_d > 128 or small
        self.prompt_tile = self.tile if few else _MANY_ROWS
        # Codes of head_dim 256 spill up to 32 bytes with 32 rows.
        rows = self.tile if self.block_d <= 128 else _FEW_ROWS if codes else min(self.tile, 32)
        most = rows // self.group
        #: Of a request in decode attention: as many as rows of one tile, a power of two.
        self.most_queries = min(MOST_QUERIES, 1 << max(0, most.bit_length() - 1))
        self.unmix = hadamard_block(self.head_dim) if v.mixed else 0
        # Where four warps, or with int4 a tile of 64 rows, leave too few registers on sm_90: codes
        # of head_dim 128, nibbles of 80 (24 bytes spilled) and 256 (64), float32 (328).
        self.warps = 8 if self.block_d > 128 or codes or plain else 4
        self.few_warps = 8 if plain or odd else 4
        # Registers and shared memory for one query: at most 168 of a thread on NVIDIA's cards, but
        # 203 with 8-bit floats converted byte by byte; 38 KiB with 128 dimensions.
        slim = self.block_d <= 128 and self.few_warps == 4
        slow = convert_of(q.device).value == BYTES.value and {k.kind, v.kind} & _FLOAT8_KINDS
        fits = self.block_d < 128 or _capability(q.device) in _ROOMY
        #: Programs of decode attention with one query that run on a processor at a time.
        self.resident = 3 if slim and fits and not slow else 2

    def prefill(
        self, rows: int, *, fewest: int, both: bool = False, ahead: Tensor | None = None
    ) -> None:
        """Requests with ``fewest`` queries or more, in tiles of ``rows`` rows. ``both``: they see
        keys after them too, or as many as ``ahead`` says."""
        batch = self.batch
        rows = max(rows, triton.next_power_of_2(self.group))
        tiles = batch.num_tokens // (rows // self.group) + batch.num_requests
        run_kernel(
            prefill_kernel,
            (tiles * self.kv_heads,),
            self.q,
            self.out,
            *self.by_head,
            batch.query_start,
            batch.context_len,
            batch.page_table,
            *self.q.stride()[:2],
            batch.page_table.stride(0),
            *self.numbers,
            batch.num_requests,
            self.kv_heads,
            fewest,
            *self.pages,
            **self.constants,
            **self.rows,
            BLOCK_M=rows,
            UNMIX=self.unmix,
            **({"BOTH": True} if both else {}),
            **({} if ahead is None else {"ahead": ahead}),
            num_warps=8 if rows == _MANY_ROWS else self.warps,
        )

    def decode(self, queries: int, programs: int) -> None:
        """Requests with up to ``queries`` queries; ``programs``: see :class:`Attention`.

        Programs share the list of work in turns, so no more of them are started than run at a time.
        """
        batch, shared = self.batch, self.batch.shared_len
        longest, most = batch.max_context_len, batch.splits
        if batch.work is None:
            most = most_splits(programs, self.heads, self.kv_heads, self.head_dim)
        work = work_of(batch, WorkShape(batch.num_requests + 1, most, self.kv_heads))
        slots = part_count(longest, most, queries, shared=shared is not None)
        count = requests_at_once(batch.num_requests, self.heads, slots, self.head_dim, queries)
        rows = (count, self.heads, slots)
        parts, sums = (
            torch.empty(*rows, width, device=self.out.device) for width in (self.head_dim, 2)
        )
        one, several = (
            max(_FEW_ROWS, triton.next_power_of_2(self.group * n)) for n in (1, queries)
        )
        splits = split_count(longest, most)
        resident = self.resident if queries == 1 else 2
        grid = min(batch.num_requests * self.kv_heads * splits, max(1, programs * resident // 4))
        for some in runs(batch.num_requests, count):
            if shared is not None:
                self._shared(shared, parts, sums, slots, some, queries, most)
            run_kernel(
                decode_kernel,
                (grid,),
                self.q,
                self.out,
                parts,
                sums,
                *self.by_head,
                batch.query_start,
                batch.context_len,
                batch.page_table,
                batch.context_len if shared is None else shared,
                work,
                *self.q.stride()[:2],
                batch.page_table.stride(0),
                work.stride(0),
                *self.numbers,
                splits,
                slots,
                some.start,
                some.stop,
                self.kv_heads,
                *self.pages,
                **self.constants,
                **self.rows,
                SHARED=shared is not None,
                UNMIX=self.unmix,
                QUERIES=queries,
                BLOCK_ONE=one,
                BLOCK_M=several,
                BLOCK_S=max(1, _JOINED // (several * self.block_d)),
                MAX_SPLITS=most,
                **self._joining(most),
                num_warps=self.few_warps,
            )

    def _joining(self, most: int) -> dict[str, int]:
        """Rows of a tile of parts that are added up, and parts loaded at a time; 0 where these are
        the product's tiles. There most rows are padding, and too little would be under way where
        there are more parts than :data:`scratch.FEW_SPLITS`."""
        rows = triton.next_power_of_2(self.group) if most > FEW_SPLITS else 0
        parts = rows and max(1, min(_MOST_LOADS, 2 * _JOINED // (rows * self.block_d)))
        return {"JOIN_M": rows, "JOIN_S": parts}

    def _shared(
        self,
        shared: Tensor,
        parts: Tensor,
        sums: Tensor,
        slots: int,
        some: slice,
        queries: int,
        most: int,
    ) -> None:
        """The prefix that all requests share in the same pages."""
        batch = self.batch
        rows = max(self.tile, triton.next_power_of_2(self.group))
        tiles = triton.cdiv(some.stop - some.start, rows // (self.group * queries))
        coarse = LONGER * (LONGER if queries > 1 else 1)
        splits = split_count(batch.max_context_len, most, coarse)
        run_kernel(
            shared_kernel,
            (tiles, self.kv_heads, splits),
            self.q,
            parts,
            sums,
            *self.by_head,
            batch.query_start,
            batch.context_len,
            batch.page_table,
            shared,
            *self.q.stride()[:2],
            *self.numbers,
            slots,
            some.start,
            some.stop,
            self.kv_heads,
            *self.pages,
            **self.constants,
            **self.rows,
            QUERIES=queries,
            BLOCK_M=rows,
            MAX_SPLITS=most,
            num_warps=self.warps,
        )


def _side_constants(name: str, side: PageSide, dot: Any) -> dict[str, Any]:
    values = {"KIND": side.kind, "GROUPS": side.groups, "GROUP": side.group, "DOT": dot}
    values["STRIDES"] = side.strides
    return {f"{name}_{key}": value for key, value in values.items()}


def _capability(device: torch.device) -> tuple[int, int]:
    """An NVIDIA card's compute capability; (0, 0): it is none."""
    if INTERPRETED or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def convert_of(device: torch.device) -> Any:
    """See ``page_codes.py``."""
    found = _capability(device)
    return FLOAT8 if found >= (8, 9) else BYTES if found > (0, 0) else PORTABLE
