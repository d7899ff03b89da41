"""How the pages of a KV ladder are named: see :class:`sdk.kernels.kv_pages.KVPages`."""

from __future__ import annotations

#: Tokens of a page: what native attention multiplies at once, and so of one type.
LADDER_PAGE_SIZE = 128
MAX_LEVELS = 3
#: Of each request, pages at its beginning and full ones at its end that keep their type.
KEPT_PAGES = (1, 0)
_LEVEL_SHIFT = 28


def page_id(level: int, index: int) -> int:
    """How page tables name page ``index`` of a level, 0 being the first."""
    return index | level << _LEVEL_SHIFT


def page_level(page: int) -> tuple[int, int]:
    """The inverse of :func:`page_id`: level and index."""
    return page >> _LEVEL_SHIFT, page & (1 << _LEVEL_SHIFT) - 1
