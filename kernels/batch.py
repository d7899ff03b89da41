"""Where each token of a step stands: the index tensors paged attention runs on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A flat batch of T tokens of R requests; prefill, chunk and decode are one case.

    Request r owns the tokens ``query_start[r] : query_start[r + 1]``; they are the last ones of its
    ``context_len[r]`` tokens, whose keys and values lie in the pages ``page_table[r]``.

    ``positions`` int64 ``[T]``; ``query_start`` int32 ``[R + 1]``; ``context_len`` int32 ``[R]``,
    including this step's tokens; ``page_table`` int32 ``[R, W]``, padded with 0; ``slots`` int64
    ``[T]``, page * page_size + offset, where each token's key and value go; ``max_query_len`` and
    ``max_context_len`` are the largest of each, as Python ints.
    """

    positions: Tensor
    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    slots: Tensor
    page_size: int
    max_query_len: int
    max_context_len: int

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        return self.context_len.shape[0]
