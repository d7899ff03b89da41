"""The keys and values of a model that drafts, in pages with the ids of the model's pages.

Both models use one page table: wherever the model shares, evicts or moves a page, the page of the
one that drafts follows, and there is nothing to allocate. But the latter does not run every token:
it runs prompts and, when it drafts, what it has missed. So this class knows what is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sdk.engine.plan import Copy, Duplicate, Move
from sdk.engine.rank.kv_cache import KVCache
from sdk.engine.rank.request import RankRequest
from sdk.kernels.operators.ops import Ops


class _Page(NamedTuple):
    """The ``tokens`` that are held in a page; ``before`` is the key of all tokens before them."""

    before: int
    tokens: tuple[int, ...]

    @property
    def key(self) -> int:
        """The key of all tokens up to these."""
        return hash(self)


class _Held:
    """What is held of one request."""

    __slots__ = ("expected", "key", "num", "num_keyed")

    def __init__(self) -> None:
        #: The first tokens whose keys and values are held.
        self.num = 0
        #: Drafts behind them that were run, but are not known to be right yet.
        self.expected: Sequence[int] = ()
        #: The key of the first ``num_keyed`` pages.
        self.key, self.num_keyed = 0, 0


class DraftingPages:
    """Which tokens have keys and values in ``kv``.

    What a page holds is known by its tokens and a hash of all before them, so that another request
    with the same prefix finds it, and a page that was given to other tokens in the meantime is not
    mistaken for it. A wrong answer would only cost drafts: the model verifies all of them.
    """

    def __init__(self, kv: KVCache, page_size: int) -> None:
        self.kv = kv
        self._size = page_size
        self._pages: dict[int, _Page] = {}
        self._requests: dict[str, _Held] = {}

    def knows(self, request_id: str) -> bool:
        """Whether :meth:`num_held` was asked about the request."""
        return request_id in self._requests

    def num_held(self, request_id: str, request: RankRequest) -> int:
        """How many of the first tokens are held, at most ``num_computed``."""
        held = self._requests.get(request_id)
        if held is None:
            held = self._requests[request_id] = _Held()
            self._find_shared(held, request)
        tokens, expected = request.token_ids, held.expected
        held.expected = ()
        for token in expected:
            if held.num >= request.num_computed or tokens[held.num] != token:
                break
            held.num += 1
        held.num = min(held.num, request.num_computed)  # more, if a step was given up
        self._note_pages(held, request)
        return held.num

    def _find_shared(self, held: _Held, request: RankRequest) -> None:
        """What was run for another request, or for this one before a preemption: full pages, and
        the first tokens of the page after them.
        """
        for page in request.pages[: -(-request.num_computed // self._size)]:
            found = self._pages.get(page)
            if found is None or found.before != held.key:
                return
            own = request.token_ids[held.num : held.num + self._size]
            same = _num_equal(found.tokens, own)
            held.num += same
            if same < self._size:
                return
            held.key = found.key
            held.num_keyed += 1

    def _note_pages(self, held: _Held, request: RankRequest) -> None:
        """Note what the pages of a request hold from the first one on that was not full."""
        size = self._size
        while (begin := held.num_keyed * size) < held.num:
            end = min(begin + size, held.num)
            noted = _Page(held.key, tuple(request.token_ids[begin:end]))
            self._pages[request.pages[held.num_keyed]] = noted
            if end < begin + size:
                return
            held.key = noted.key
            held.num_keyed += 1

    def begin_to_write(self, request_id: str, request: RankRequest, end: int) -> None:
        """The tokens from the first one that is not held up to ``end`` are about to be run."""
        held = self._requests[request_id]
        for page in request.pages[held.num // self._size : -(-end // self._size)]:
            self._pages.pop(page, None)

    def hold(
        self, request_id: str, request: RankRequest, num: int, expected: Sequence[int] = ()
    ) -> None:
        """The first ``num`` tokens were run, and drafts ``expected`` behind them."""
        held = self._requests[request_id]
        held.num, held.expected = num, expected
        self._note_pages(held, request)

    def move(self, copies: Iterable[Copy], ops: Ops) -> None:
        """Follow pages that move or are copied. Swapped pages are not kept."""
        for one in copies:
            if isinstance(one, Move) or (isinstance(one, Duplicate) and one.group is None):
                held = self._pages.get(one.source)
                if isinstance(one, Move):
                    self._pages.pop(one.source, None)
                self._pages.pop(one.target, None)
                if held is not None:
                    self._pages[one.target] = held
                self.kv.copy([one], ops)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, or start again with other pages."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def vacate(self, pages: Sequence[int]) -> None:
        """Return the memory of pages that are not in use."""
        self._pages.clear()
        self.kv.vacate(pages)


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common beginning."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
