"""Paged attention: ``native/attention.hpp``."""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.elementwise import floats
from sdk.kernels.cpu.library import OpKind, PlacesArgs
from sdk.kernels.cpu.page_args import AttentionArgs, PageLevel
from sdk.kernels.cpu.pages import check_levels, inner_contiguous, page_sides, reject
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.errors import KernelError
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.kv.tiers import MAX_TIERS
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch

#: Numbers of a vector of the kernels in bfloat16.
_VECTOR = 16


class Attention:
    """See :meth:`sdk.kernels.operators.ops.Ops.attention`."""

    name = "cpu.attention"
    rounds_inputs = False

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def rounds(self, pages: KVPages) -> bool:
        """Whether queries and probabilities are rounded to bfloat16 over these pages."""
        return False

    def reject(self, problem: Problem) -> str | None:
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
        _, heads, head_dim = q.shape
        kv_heads = pages.k.shape[1]
        inner_contiguous(q, torch.float32, "attention q")
        value_dim = out.shape[1] // heads
        check_levels(pages, kv_heads, head_dim, value_dim)
        sinks, slopes = _by_head("sinks", sinks, heads), _by_head("slopes", slopes, heads)
        if biases is not None:
            biases = floats(biases, "attention biases")
            if len(biases) != heads:
                raise KernelError(
                    f"attention: expected biases of {heads} heads, found {len(biases)}"
                )
        if window is not None and window < 1:
            raise KernelError(f"attention: expected a window of at least 1, found {window}")
        if ahead is not None:
            inner_contiguous(ahead, torch.int32, "attention ahead")
        index = [batch.query_start, batch.context_len, batch.page_table]
        for i, x in enumerate(index):
            if x.dtype != torch.int32:
                raise KernelError(f"attention: expected int32 index tensors, found {x.dtype}")
            index[i] = x.contiguous()
        args = AttentionArgs(
            q.data_ptr(),
            out.data_ptr(),
            (PageLevel * MAX_TIERS)(*map(page_sides, pages.tiers)),
            *(x.data_ptr() for x in index),
            None if sinks is None else sinks.data_ptr(),
            None if slopes is None else slopes.data_ptr(),
            None if biases is None else biases.data_ptr(),
            None if ahead is None else ahead.data_ptr(),
            None,
            *q.stride()[:2],
            index[2].shape[1],
            pages.k.shape[0],
            q.shape[0],
            window or 0,
            batch.num_requests,
            heads,
            kv_heads,
            head_dim,
            pages.page_size,
            len(pages.tiers),
            scale,
            softcap or 0.0,
            0,
            0,
            not causal,
            0 if biases is None else biases.shape[1] // 2,
            chunked,
            value_dim,
            pages.latent,
            0,
            self.rounds(pages),
        )
        self._runtime.run(OpKind.ATTENTION, args, batch.num_requests, "attention")


class RoundedAttention(Attention):
    """Attention in bfloat16: ``native/attention_bf16.hpp``."""

    name = "cpu.attention_bf16"
    rounds_inputs = True

    def reject(self, problem: Problem) -> str | None:
        if problem.format != "both ways" or problem.kv_dtype != "bfloat16":
            return (
                f"{problem.format or 'causal'} attention over pages of {problem.kv_dtype}: "
                "expected both ways over bfloat16"
            )
        return super().reject(problem)

    def rounds(self, pages: KVPages) -> bool:
        """Only where keys and values are read as whole vectors: pages of 16, 32, 64, ... slots,
        whose values have room for whole vectors. Other pages are read as by :class:`Attention`."""
        slots, width, room = pages.page_size, pages.v.shape[3], pages.v.stride(2)
        powers = not slots % _VECTOR and not slots & (slots - 1)
        return powers and room >= -(-width // _VECTOR) * _VECTOR


def _by_head(name: str, values: Tensor | None, heads: int) -> Tensor | None:
    if values is None:
        return None
    values = floats(values, f"attention {name}")
    if values.shape != (heads,):
        raise KernelError(f"attention: expected {name} [{heads}], found {list(values.shape)}")
    return values


class Places:
    """See :meth:`sdk.kernels.operators.ops.Ops.find_places`."""

    name = "cpu.find_places"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, batch: AttentionBatch) -> None:
        inner_contiguous(batch.positions, torch.int64, "positions")
        inner_contiguous(batch.slots, torch.int64, "slots")
        for x in (batch.query_start, batch.context_len, batch.page_table):
            inner_contiguous(x, torch.int32, "index tensors")
        args = PlacesArgs(
            batch.query_start.data_ptr(),
            batch.context_len.data_ptr(),
            batch.page_table.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            batch.page_table.stride(0),
            min(batch.positions.shape[0], batch.slots.shape[0]),
            batch.page_size,
        )
        self._runtime.run(OpKind.PLACES, args, batch.num_requests, "find_places")
