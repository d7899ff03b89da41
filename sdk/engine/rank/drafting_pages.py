"""The keys and values of a smaller model that drafts, in pages with the ids of the model's pages.

Both models use one page table: wherever the model shares, evicts or moves a page, the smaller
model's page follows, and there is nothing to allocate. But the smaller model does not run every
token: it runs prompts and, when it drafts, what it has missed. So this class knows what is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sdk.engine.plan import Copy, Move
from sdk.engine.rank.kv_cache import KVCache
from sdk.engine.rank.request import RankRequest
from sdk.kernels.ops import Ops


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

    A full page is known by a hash of its tokens and all before them, so that another request with
    the same prefix finds it, and a page that was given to other tokens in the meantime is not
    mistaken for it. A wrong answer would only cost drafts: the model verifies all of them.
    """

    def __init__(self, kv: KVCache, page_size: int) -> None:
        self.kv = kv
        self._size = page_size
        self._keys: dict[int, int] = {}  # of full pages
        self._requests: dict[str, _Held] = {}

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
        self._key_full_pages(held, request)
        return held.num

    def _find_shared(self, held: _Held, request: RankRequest) -> None:
        """Full pages that were run for another request, or for this one before a preemption."""
        for page in request.pages[: request.num_computed // self._size]:
            key = self._next_key(held, request)
            if self._keys.get(page) != key:
                return
            held.key = key
            held.num_keyed += 1
            held.num += self._size

    def _next_key(self, held: _Held, request: RankRequest) -> int:
        begin = held.num_keyed * self._size
        return hash((held.key, *request.token_ids[begin : begin + self._size]))

    def _key_full_pages(self, held: _Held, request: RankRequest) -> None:
        while (held.num_keyed + 1) * self._size <= held.num:
            held.key = self._next_key(held, request)
            self._keys[request.pages[held.num_keyed]] = held.key
            held.num_keyed += 1

    def begin_to_write(self, request_id: str, request: RankRequest, end: int) -> None:
        """The tokens from the first one that is not held up to ``end`` are about to be run."""
        held = self._requests[request_id]
        for page in request.pages[held.num // self._size : -(-end // self._size)]:
            self._keys.pop(page, None)

    def hold(self, request_id: str, num: int, expected: Sequence[int] = ()) -> None:
        """The first ``num`` tokens were run, and drafts ``expected`` behind them."""
        held = self._requests[request_id]
        held.num, held.expected = num, expected

    def move(self, copies: Iterable[Copy], ops: Ops) -> None:
        """Follow the moves of pages. Swapped pages are run again, which costs less memory."""
        for one in copies:
            if isinstance(one, Move):
                key = self._keys.pop(one.source, None)
                self._keys.pop(one.target, None)
                if key is not None:
                    self._keys[one.target] = key
                self.kv.copy([one], ops)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, or start again with other pages."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def vacate(self, pages: Sequence[int]) -> None:
        """Return the memory of pages that are not in use."""
        self._keys.clear()
        self.kv.vacate(pages)
