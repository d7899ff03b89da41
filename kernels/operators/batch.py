"""The index tensors of paged attention: requests, positions and page slots of a step's tokens."""

from __future__ import annotations

from sdk.kernels.dataclass import dataclass
from sdk.kernels.errors import KernelError
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.checks import expect
from sdk.kernels.operators.states import StateBatch


@dataclass(frozen=True, slots=True)
class WorkShape:
    """The shape of ``AttentionBatch.work``: int32 ``[rows, splits + kv_heads]``.

    ``splits``: into how many parts, at most, it divides the keys of a request.
    """

    rows: int
    splits: int
    kv_heads: int

    @property
    def width(self) -> int:
        return self.splits + self.kv_heads

    @property
    def nbytes(self) -> int:
        return 4 * self.rows * self.width


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A flat batch of T tokens of R requests. Prefill, chunked prefill and decode are one case.

    Request r has the tokens ``query_start[r] : query_start[r + 1]``. They are the last of its
    ``context_len[r]`` tokens, whose keys and values are in the pages ``page_table[r]``.

    - ``positions``: int64 ``[T]``.
    - ``query_start``: int32 ``[R + 1]``.
    - ``context_len``: int32 ``[R]``, including this step's tokens.
    - ``page_table``: int32 ``[R, W]``, padded with 0.
    - ``slots``: int64 ``[T]``, the page slot of each token: page * page_size + offset.
    - ``max_query_len``, ``max_context_len``: the largest of each, as Python ints.
    - ``shared_len``: int32 ``[1]``, if known: the number of tokens at the beginning of all requests
      that are in the same pages, less than any ``context_len``. A backend may use it to read them
      once.
    - ``lengths``: for each request the number of its tokens here and of its context, as Python
      ints, if they are known on the host. Kernels of libraries may need them.
    - ``work``: int32 ``[R + 1 or more, n]``, if the backend of the operators uses one: how the
      attention of the step is divided. ``find_places`` writes it, once for all layers.
    - ``splits``: of ``work``, see :class:`WorkShape`.
    - ``token_types``: int64 ``[T]`` for models that tell two texts apart: 0, and 1 in the second.
    - ``windows``: for each window group of the cache the same step with that group's ``page_table``
      and ``slots``. Entries of pages that have left the window are arbitrary ids of pages.
    - ``group``: which of the window groups this is the step of, if it is one of ``windows``.
    - ``states``: for models with recurrent states.
    - ``ahead``: int32 ``[T]`` for models whose images' tokens see one another both ways: how many
      tokens behind itself a token sees, which are in the step too; 0 for all others.
    - ``image_rows``: int32 ``[T]`` for models that see images: the row of the image cache in the
      place of a token's embedding; -1 for tokens of text.
    - ``shifts``: int32 ``[axes, T]`` for models with rotary positions of several axes: what is
      added to a token's position along each of them.
    """

    positions: Tensor
    query_start: Tensor
    context_len: Tensor
    page_table: Tensor
    slots: Tensor
    page_size: int
    max_query_len: int
    max_context_len: int
    shared_len: Tensor | None = None
    work: Tensor | None = None
    lengths: tuple[tuple[int, int], ...] | None = None
    splits: int = 0
    token_types: Tensor | None = None
    windows: tuple[AttentionBatch, ...] = ()
    states: StateBatch | None = None
    group: int | None = None
    ahead: Tensor | None = None
    image_rows: Tensor | None = None
    shifts: Tensor | None = None

    def of_group(self, group: int | None) -> AttentionBatch:
        """The step as the layers of a window group see it. ``None``: of layers that keep all
        tokens. If nothing is given back, all layers have one page table."""
        return self if group is None or not self.windows else self.windows[group]

    def check(self, pages: KVPages | None = None) -> None:
        """Check types and shapes. Operators check the contents when they use them.

        :raises KernelError: a tensor is not as described above.
        """
        tokens, requests = self.num_tokens, self.num_requests
        expect("batch positions", self.positions, torch.int64, tokens)
        expect("batch query_start", self.query_start, torch.int32, requests + 1)
        expect("batch context_len", self.context_len, torch.int32, requests)
        expect("batch page_table", self.page_table, torch.int32, requests, None)
        expect("batch slots", self.slots, torch.int64, tokens)
        if self.shared_len is not None:
            expect("batch shared_len", self.shared_len, torch.int32, 1)
        if self.work is not None:
            expect("batch work", self.work, torch.int32, None, None)
        if self.lengths is not None and len(self.lengths) != requests:
            raise KernelError(
                f"batch lengths: expected those of {requests} requests, found {len(self.lengths)}"
            )
        for x in (self.positions, self.query_start, self.context_len, self.slots):
            if not x.is_contiguous():
                raise KernelError(f"batch: expected contiguous rows, found strides {x.stride()}")
        if self.page_table.stride(1) != 1 and self.page_table.shape[1] > 1:
            raise KernelError(
                f"batch page_table: expected contiguous rows, found {self.page_table.stride()}"
            )
        if self.page_size < 1 or (pages is not None and pages.page_size != self.page_size):
            expected = "at least 1" if pages is None else f"{pages.page_size}, as in KV pages"
            raise KernelError(f"batch page_size: expected {expected}, found {self.page_size}")

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def num_requests(self) -> int:
        return self.context_len.shape[0]
