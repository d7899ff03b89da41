"""Which cached page to evict first, by what it saves to keep it: ``prefix_eviction="cost"``.

GreedyDual-Size with frequency (GDSF: Cherkasova 1998, HP Labs report HPL-98-69R1). A cached page
has the value::

    value = clock + uses * cost

``uses``: how many requests have used the page since it was computed. ``cost``: the time to compute
it, which grows with its position, because its tokens read all keys before them. All pages take the
same memory. The page of the smallest value is evicted, and ``clock`` becomes its value. So pages
that are not used any more are overtaken in the end, the later the more often they were used.

The pages of a prefix are useless without those before them. A request that uses a page also uses
those before it, and no value ever falls. So a page's value is never below that of the next one, and
of equal values the end of a prefix goes first, as with LRU.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

#: More uses than this do not count: a page that is not used any more stays for at most about so
#: many times as long as one that was used once. With 8 or 16, prefixes that had been popular stayed
#: too long in traces of conversations and of documents that change (docs/scheduling.md).
_MOST_USES = 4
#: The position at which a token takes twice as long to compute as at the beginning. SmolLM2 135M on
#: two cores: about 550, by the times in sdk/requests/driving/step_sizes.py; a model of 7e9 weights:
#: 25,000, by arithmetic.
_DOUBLE_COST = 4096


class CostOrder:
    """The cached pages, with the methods of a dict that ``PagePool`` needs. Constant time to look
    a page up, O(log n) to add or evict one."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._uses = [0] * num_pages
        self._values = [0.0] * num_pages
        self._entries = [0] * num_pages  # of the heap; 0: the page is not cached
        self._heap: list[tuple[float, int, int]] = []  # value, entry, page; also outdated entries
        self._num_entries = 0
        self._count = 0
        self._clock = 0.0
        self._page_cost = page_size / _DOUBLE_COST

    def used(self, pages: Sequence[int]) -> None:
        """A request uses these pages, the first pages of its prefix."""
        for page in pages:
            self._uses[page] += 1

    def released(self, pages: Sequence[int]) -> None:
        """A request gives back its pages: the values of those that stay in the cache."""
        least, values = 0.0, self._values
        for index in range(len(pages) - 1, -1, -1):
            page = pages[index]
            uses = min(self._uses[page] + 1, _MOST_USES)
            value = self._clock + uses * (1 + index * self._page_cost)
            values[page] = least = max(value, values[page], least)

    def forget(self, page: int) -> None:
        """The page has no content any more."""
        self._uses[page], self._values[page] = 0, 0.0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, page: object) -> bool:
        return isinstance(page, int) and self._entries[page] > 0

    def __iter__(self) -> Iterator[int]:
        """The pages, first to be evicted first."""
        return (page for _, entry, page in sorted(self._heap) if self._entries[page] == entry)

    def __setitem__(self, page: int, value: None) -> None:
        """Add a page that was released."""
        self._num_entries += 1
        self._entries[page] = self._num_entries
        self._count += 1
        heapq.heappush(self._heap, (self._values[page], self._num_entries, page))
        if len(self._heap) > 2 * self._count + 64:
            entries = self._entries
            self._heap = [one for one in self._heap if entries[one[2]] == one[1]]
            heapq.heapify(self._heap)

    def __delitem__(self, page: int) -> None:
        self._entries[page] = 0
        self._count -= 1

    def popitem(self, last: bool = True) -> tuple[int, None]:
        """Remove the page of the smallest value."""
        while True:
            value, entry, page = heapq.heappop(self._heap)
            if self._entries[page] == entry:
                self._clock = max(self._clock, value)
                del self[page]
                return page, None

    def clear(self) -> None:
        """Remove all pages."""
        for page in list(self):
            del self[page]
        self._heap.clear()
