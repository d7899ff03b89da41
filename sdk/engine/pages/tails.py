"""Tails: the first tokens of a page that is not full, which another request may copy.

Requests share only full pages, because nobody writes those any more. Two requests with the same
prompt still differ in the page after the last full one: each writes its own answer there. But what
the first tokens of that page hold does not change, so the page is copied instead of computing these
tokens again. There are two sources: a running request (the answers of one prompt), and a request
that has ended (the next step of a beam). The page of the latter stays in the pool like a full page,
under the key of its tokens, until it is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sdk.engine.pages.page_pool import PageKey, PagePool, page_key
from sdk.engine.scheduling.request import Request
from sdk.kernels.kv.tiers import page_tier

#: Pages kept of requests that have ended. More would only touch more memory: the next step of a
#: beam comes at once.
_MOST_KEPT = 64


class Tail(NamedTuple):
    """A page whose first ``num_tokens`` tokens are those that are needed. ``whole``: these are all
    that are known of it. ``writer``: the running request that writes it."""

    page: int
    num_tokens: int
    whole: bool = False
    writer: Request | None = None


class Tails:
    """Finds tails by the digest of the full page before them."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        #: How many pages are kept of requests that have ended; 0: ``_MOST_KEPT``.
        self.most_kept = 0
        #: Digest of a full page -> the running request that has published it.
        self.writers: dict[bytes, Request] = {}
        #: Kept tails by their page, the oldest first. The pool may have evicted some.
        self._kept: OrderedDict[int, PageKey] = OrderedDict()
        #: Those that come after a page, by its digest.
        self._after: dict[bytes, list[int]] = {}

    def any_after(self, parent: bytes) -> bool:
        """Whether a page after ``parent`` may have a tail."""
        return parent in self._after or parent in self.writers

    def find(
        self,
        parent: bytes,
        token_ids: Sequence[int],
        index: int,
        may_use: Callable[[Tail], bool] | None = None,
    ) -> Tail | None:
        """The longest tail after ``parent``, the page before page ``index``, with the first of
        ``token_ids``, of those that ``may_use`` accepts."""
        pool, found = self._pool, []
        writer = self.writers.get(parent)
        if writer is not None and len(writer.pages) > index:
            first = index * pool.page_size
            own = writer.key_ids(first, min(first + pool.page_size, writer.num_computed))
            common = _common(own, token_ids)
            found.append(Tail(writer.pages[index], common, False, writer))
        for page in self._after.get(parent, ()):
            key = self._kept[page]
            if pool.key(page) is key:
                common = _common(key.token_ids, token_ids)
                found.append(Tail(page, common, common == len(key.token_ids)))
        found = [one for one in found if one.num_tokens and self._in_first_tier(one.page)]
        if may_use is not None:
            found = [one for one in found if may_use(one)]
        return max(found, key=lambda one: one.num_tokens, default=None)

    def _in_first_tier(self, page: int) -> bool:
        return page_tier(self._pool.location(page))[0] == 0

    def keep(self, sequence: Request, root: bytes) -> int:
        """Keep the last page of a sequence that has ended, if it is not full. Returns the page that
        is known for its tokens, which may be another one; 0: none is."""
        size = self._pool.page_size
        full = sequence.num_computed // size
        token_ids = sequence.key_ids(full * size, sequence.num_computed)
        if not token_ids or full != sequence.num_published:
            return 0
        page, parent = sequence.pages[full], sequence.keys[full - 1].digest if full else root
        key = page_key(parent, token_ids)
        self._pool.publish(page, key)
        if self._pool.key(page) is not key:  # another page has the same tail
            return next(iter(self._pool.match((key,))), 0)
        self._drop(page)
        self._kept[page] = key
        self._after.setdefault(parent, []).append(page)
        if len(self._kept) > (self.most_kept or _MOST_KEPT):
            self._drop(next(iter(self._kept)))
        return page

    def _drop(self, page: int) -> None:
        """Stop keeping a page, if it is kept."""
        key = self._kept.pop(page, None)
        if key is None:
            return
        self._after[key.parent].remove(page)
        if not self._after[key.parent]:
            del self._after[key.parent]
        if self._pool.key(page) is key:
            self._pool.forget([page])

    def forget(self, sequence: Request) -> None:
        """A sequence gives its pages back."""
        for key in sequence.keys[: sequence.num_published]:
            if self.writers.get(key.digest) is sequence:
                del self.writers[key.digest]

    def clear(self) -> None:
        """Forget all tails."""
        self.writers.clear()
        self._kept.clear()
        self._after.clear()


def _common(known: Sequence[int], wanted: Sequence[int]) -> int:
    """How many tokens both begin with."""
    most = min(len(known), len(wanted))
    return next((i for i in range(most) if known[i] != wanted[i]), most)
