"""The page ids of a tiered KV cache: see :class:`sdk.kernels.kv_pages.KVPages`."""

from __future__ import annotations

#: Tokens of a page. Native attention computes this many keys at once, so they need one type.
LADDER_PAGE_SIZE = 128
MAX_LEVELS = 3
#: How many pages at a request's beginning, and full ones at its end, stay in their tier.
KEPT_PAGES = (1, 0)
_LEVEL_SHIFT = 28


def page_id(level: int, index: int) -> int:
    """The id in page tables of page ``index`` of a level; 0 is the first."""
    return index | level << _LEVEL_SHIFT


def page_level(page: int) -> tuple[int, int]:
    """The inverse of :func:`page_id`: level and index."""
    return page >> _LEVEL_SHIFT, page & (1 << _LEVEL_SHIFT) - 1
