"""The batch of attention for sequences that are read in the step that writes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops

#: Tokens of a page, and where sequences are short: windows of an image have 64 patches or fewer.
#: Attention over 1,024 patches takes as long with pages of 64 as with larger ones, and 5 % longer
#: with pages of 16.
PAGE_SIZE, SHORT = 64, 16
#: On a CPU a value has room for whole vectors of this many numbers, so that it is read where it is.
_VECTOR = 16


def value_room(head_dim: int) -> int:
    """Numbers that a value occupies in the pages of a CPU."""
    return -(-head_dim // _VECTOR) * _VECTOR


def num_pages(lengths: Sequence[int], page_size: int) -> int:
    """Pages of sequences with these lengths."""
    return sum(-(-length // page_size) for length in lengths)


def sequence_batch(
    lengths: Sequence[int],
    page_size: int,
    ops: Ops,
    rows: tuple[int, int] | None = None,
    *,
    whole: bool = True,
) -> AttentionBatch:
    """Sequences of these lengths, one after the other, each in pages of its own.

    ``rows``: only these, of all sequences together. They see ``whole`` sequences, or what is up to
    themselves: in the latter batch their keys and values are written.
    """
    each = [-(-length // page_size) for length in lengths]
    table = np.zeros((len(lengths), max(each)), np.int32)
    first = 0
    for row, count in zip(table, each, strict=True):
        row[:count] = np.arange(first, first + count)
        first += count
    ends = np.cumsum(lengths)
    begin, end = rows or (0, int(ends[-1]))
    low, high = np.maximum(ends - lengths, begin), np.minimum(ends, end)
    some = low < high
    table, counts = table[some], (high - low)[some].astype(np.int32)
    context = (np.array(lengths) if whole else high - (ends - lengths))[some].astype(np.int32)
    tokens = end - begin

    def sent(values: object) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(ops.device)

    batch = AttentionBatch(
        positions=sent(np.zeros(tokens, np.int64)),
        query_start=sent(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        context_len=sent(context),
        page_table=sent(table),
        slots=sent(np.zeros(tokens, np.int64)),
        page_size=page_size,
        max_query_len=int(counts.max()),
        max_context_len=int(context.max()),
        lengths=tuple(zip(counts.tolist(), context.tolist(), strict=True)),
    )
    ops.find_places(batch)
    return batch


def sequence_pages(pages: int, page_size: int, heads: int, head_dim: int, ops: Ops) -> KVPages:
    """Empty pages: float32 on a CPU, where 16 bits would be converted for each use, but bfloat16
    where that is multiplied."""
    dtype = torch.bfloat16 if ops.rounded else ops.activations
    kind = KV_TYPES[str(dtype).removeprefix("torch.")]
    shape = (pages, heads, page_size, head_dim)
    if ops.keys_transposed:
        turned = torch.zeros(pages, heads, head_dim, page_size, dtype=dtype, device=ops.device)
        k, room = turned.transpose(2, 3), value_room(head_dim)
    else:
        k, room = torch.zeros(*shape, dtype=dtype, device=ops.device), head_dim
    v = torch.zeros(*shape[:3], room, dtype=dtype, device=ops.device)
    return KVPages(k, v[..., :head_dim], kind, kind)
