"""Tokens that are learned queries to all patches of a tile (MiniCPM-V up to 4.5).

Patches are projected to the width of the text and normalized; keys also get the sines and cosines
of their column and row. Names of weights begin with ``model.projector``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.models.vision.config import VisionConfig
from sdk.models.vision.portions import queried_rows
from sdk.models.vision.sequences import PAGE_SIZE, num_pages, sequence_batch, sequence_pages
from sdk.models.vision.stored import stored
from sdk.quant.errors import CheckpointError

if TYPE_CHECKING:
    from sdk.kernels.kv.pages import KVPages
    from sdk.kernels.operators.ops import Ops
    from sdk.models.projections import Projection
    from sdk.models.source import Source
    from sdk.models.vision.patches import Places

PATH = "model.projector"
#: Features of a head, whatever the width is.
HEAD = 128
#: Of the norms.
EPS = 1e-6
#: The wavelengths of the sines and cosines are powers of this number up to itself.
_BASE = 10000.0


class InputProjection:
    """The projection to queries, keys or values: one of three matrices, or a third of one."""

    def __init__(self, source: Source, number: int, width: int) -> None:
        name = f"{PATH}.attention.{'qkv'[number]}_proj"
        joined = "projector.attention.in_proj_weight"
        self.linear: Projection
        self.bias: Tensor | None = None
        self.ops = source.ops
        if not source.has(f"model.{joined}"):
            self.linear = source.matrix(name, width, width)  # with its bias
            return
        rows = slice(number * width, (number + 1) * width)

        def third() -> Tensor:
            found = source.checkpoint.tensor(f"model.{joined}")
            if tuple(found.shape) != (3 * width, width):
                raise CheckpointError(
                    f"vision.{joined}: expected shape {[3 * width, width]}, found "
                    f"{list(found.shape)}"
                )
            return found[rows].contiguous()

        self.linear = source.given(name, third)
        self.bias = source.vector(f"{PATH}.attention.in_proj_bias", 3 * width)[rows]

    def __call__(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.bias is None else y + self.bias


class Resampler:
    """See :class:`sdk.models.vision.family.Queries`."""

    def __init__(self, source: Source, config: VisionConfig) -> None:
        self.ops, self.config = source.ops, config
        self.width = width = config.hidden_size
        if width % HEAD:
            raise CheckpointError(
                f"config: hidden_size: expected a multiple of {HEAD}, the features of a head of "
                f"the resampler, found {width}"
            )
        self.heads = width // HEAD
        self.project = source.matrix(f"{PATH}.kv_proj", width, config.tower.hidden_size)
        self.of_patches = source.norm(f"{PATH}.ln_kv", width, EPS)
        self.of_queries = source.norm(f"{PATH}.ln_q", width, EPS)
        self.after = source.norm(f"{PATH}.ln_post", width, EPS)
        self.queries, self.keys, self.values = (InputProjection(source, i, width) for i in range(3))
        self.out = source.matrix(f"{PATH}.attention.out_proj", width, width)
        self.last = source.matrix(f"{PATH}.last", width, width)
        self.learned = stored(source, "projector.query", (config.queries, width)).to(
            source.ops.device
        )

    def of_tile(self, x: Tensor, where: Places) -> Iterator[Tensor | None]:
        """See :class:`sdk.models.vision.family.Queries`."""
        count, size = len(x), queried_rows(self.config)
        pages = sequence_pages(num_pages([count], PAGE_SIZE), PAGE_SIZE, self.heads, HEAD, self.ops)
        for begin in range(0, count, size):
            yield None
            rows = begin, min(begin + size, count)
            self._keep(x[slice(*rows)], where, rows, count, pages)
        yield self._found(count, pages)

    def _keep(
        self, x: Tensor, where: Places, rows: tuple[int, int], count: int, pages: KVPages
    ) -> None:
        """Write keys and values of some of the patches into the pages."""
        ops, (begin, end) = self.ops, rows
        values = ops.norm(self.project(x), self.of_patches)
        at = waves(where.columns[begin:end], where.rows[begin:end], self.width)
        keys = self.keys(ops.add(values.clone(), torch.from_numpy(at).to(x.device)))
        shape = (end - begin, self.heads, HEAD)
        keys, values = keys.view(shape), self.values(values).view(shape)
        batch = sequence_batch([count], PAGE_SIZE, ops, rows, whole=False)
        still = ops.empty(end - begin, 0)
        ops.rope_and_cache(keys.clone(), keys, values, still, still, batch, pages)

    def _found(self, count: int, pages: KVPages) -> Tensor:
        """What the queries find among the patches, float32 ``[queries, hidden]``."""
        ops = self.ops
        asked = self.queries(ops.norm(self.learned, self.of_queries))
        asked = asked.view(-1, self.heads, HEAD)
        batch = _cross_batch(len(asked), count, self.ops)
        found = ops.attention(asked, pages, batch, scale=HEAD**-0.5, causal=False)
        return self.last(ops.norm(self.out(found), self.after))


def _cross_batch(queries: int, keys: int, ops: Ops) -> AttentionBatch:
    """Queries to one sequence, in the first pages, that is not theirs. A request has no more
    tokens than its context, so a short sequence gets several requests."""
    each = min(queries, keys)
    starts = [*range(0, queries, each), queries]
    requests, pages = len(starts) - 1, num_pages([keys], PAGE_SIZE)
    counts = np.diff(starts)

    def sent(values: object) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(ops.device)

    batch = AttentionBatch(
        positions=sent(np.zeros(queries, np.int64)),
        query_start=sent(np.array(starts, np.int32)),
        context_len=sent(np.full(requests, keys, np.int32)),
        page_table=sent(np.tile(np.arange(pages, dtype=np.int32), (requests, 1))),
        slots=sent(np.zeros(queries, np.int64)),
        page_size=PAGE_SIZE,
        max_query_len=int(counts.max()),
        max_context_len=keys,
        lengths=tuple((int(count), keys) for count in counts),
    )
    ops.find_places(batch)
    return batch


def waves(columns: NDArray[np.int64], rows: NDArray[np.int64], width: int) -> NDArray[np.float32]:
    """Sines and cosines of the column of each patch, then of its row, float32 ``[patches,
    width]``, in the arithmetic of the published code."""
    count = width // 4
    exponents = np.arange(count, dtype=np.float32) / np.float32(count)
    turns = np.float32(1) / np.power(np.float32(_BASE), exponents)
    parts = []
    for at in (columns, rows):
        angles = at.astype(np.float32)[:, None] * turns
        parts += [np.sin(angles), np.cos(angles)]
    return np.concatenate(parts, axis=1)
