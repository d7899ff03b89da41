"""Which replicas hold which prefixes.

Replicas report the digests of the pages in their caches. Digests are chained over the tokens
(``sdk/engine/pages/page_pool.py``), so a prompt is looked up page by page until no replica holds
the next one: the cost does not depend on the number of replicas. A set of replicas is an int with
a bit for each of them.

Between reports the index also contains what was promised: pages that a request will publish on the
replica it was sent to. So requests with a common prefix that arrive together go together.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sdk.api.errors import RequestError
from sdk.engine.pages.page_pool import page_digest, root_digest

#: Pages of a request that are promised after those that are known. 256 of 16 tokens cost 0.25 ms.
_MOST_PROMISED = 256


class Level(NamedTuple):
    """The replicas (bits) that hold the first ``num_pages`` pages of a prompt, and not the next."""

    replicas: int
    num_pages: int


class Prompt:
    """A prompt and the digests of its first pages, as far as they were needed."""

    def __init__(self, token_ids: Sequence[int], root: bytes, page_size: int) -> None:
        self.digests: list[bytes] = []
        # the last token always runs, so a page that ends with it is never used
        self.most_pages = (len(token_ids) - 1) // page_size
        self._bytes = array("q", list(token_ids)).tobytes() if self.most_pages else b""
        self._page_bytes = 8 * page_size
        self._last = root

    def digest(self, index: int) -> bytes:
        """That of page ``index``, at most the number of those known."""
        if index == len(self.digests):
            begin = index * self._page_bytes
            page = self._bytes[begin : begin + self._page_bytes]
            self._last = page_digest(self._last, page)
            self.digests.append(self._last)
        return self.digests[index]


class PrefixIndex:
    """See the module. ``page_size`` and ``kv_type`` are those of all replicas."""

    def __init__(self, page_size: int, kv_type: str) -> None:
        self.page_size = page_size
        self.kv_type = kv_type
        self._holders: dict[bytes, int] = {}
        self._promised: dict[int, dict[bytes, str]] = {}  # replica -> digest -> request id
        self._publishers = 0  # replicas that have published pages

    def prompt(self, token_ids: Sequence[int], adapter: str | None, salt: str | None) -> Prompt:
        """A prompt to look up. :raises RequestError: a token id is not a 64-bit integer."""
        try:
            return Prompt(token_ids, root_digest(adapter, self.kv_type, salt), self.page_size)
        except (TypeError, OverflowError) as error:
            raise RequestError(f"token ids: expected integers of 64 bits: {error}") from None

    def find(self, prompt: Prompt) -> list[Level]:
        """The replicas that hold at least one page, the longest prefixes first."""
        levels: list[Level] = []
        before, index = 0, 0
        while index < prompt.most_pages:
            holders = self._holders.get(prompt.digest(index), 0)
            if index:
                holders &= before
                if gone := before & ~holders:
                    levels.append(Level(gone, index))
            before = holders
            if not holders:
                break
            index += 1
        if before:
            levels.append(Level(before, index))
        return levels[::-1]

    def publish(self, replica: int, digests: Iterable[bytes]) -> None:
        """A replica holds these pages now."""
        bit, holders, promised = 1 << replica, self._holders, self._promised.get(replica)
        for digest in digests:
            self._publishers |= bit
            holders[digest] = holders.get(digest, 0) | bit
            if promised:
                promised.pop(digest, None)

    def evict(self, replica: int, digests: Iterable[bytes]) -> None:
        """A replica does not hold these pages any more."""
        promised = self._promised.get(replica, {})
        for digest in digests:
            if digest not in promised:
                self._remove(replica, digest)

    def _remove(self, replica: int, digest: bytes) -> None:
        left = self._holders.get(digest, 0) & ~(1 << replica)
        if left:
            self._holders[digest] = left
        else:
            self._holders.pop(digest, None)

    def promise(self, replica: int, request_id: str, prompt: Prompt) -> list[bytes]:
        """A request was sent to a replica: returns the pages that it will publish there."""
        bit, holders = 1 << replica, self._holders
        promised = self._promised.setdefault(replica, {})
        found: list[bytes] = []
        for index in range(prompt.most_pages):
            digest = prompt.digest(index)
            known = holders.get(digest, 0)
            if not known & bit:
                holders[digest] = known | bit
                promised[digest] = request_id
                found.append(digest)
                if len(found) == _MOST_PROMISED:
                    break
        return found

    def withdraw(self, replica: int, request_id: str, digests: Iterable[bytes]) -> None:
        """A request has ended: forget what it promised and did not publish."""
        promised = self._promised.get(replica, {})
        for digest in digests:
            if promised.get(digest) == request_id:
                del promised[digest]
                self._remove(replica, digest)

    def clear(self, replica: int, *, promised: bool = True) -> None:
        """A replica holds nothing. ``promised``: nor will it. Looks at all pages of the index."""
        kept = {} if promised else self._promised.get(replica, {})
        if promised:
            self._promised.pop(replica, None)
        bit = 1 << replica
        if not self._publishers & bit and not promised:
            return
        self._publishers &= ~bit
        for digest in [one for one, holders in self._holders.items() if holders & bit]:
            if digest not in kept:
                self._remove(replica, digest)
