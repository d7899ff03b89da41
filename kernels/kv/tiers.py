"""The page ids of a tiered KV cache: see :class:`sdk.kernels.kv.pages.KVPages`."""

from __future__ import annotations

#: Tokens of a page. Native attention computes this many keys at once, so they need one type.
TIER_PAGE_SIZE = 128
MAX_TIERS = 3
#: How many pages at a request's beginning, and full ones at its end, stay in their tier.
KEPT_PAGES = (1, 0)
_TIER_SHIFT = 28


def page_id(tier: int, index: int) -> int:
    """The id in page tables of page ``index`` of a tier; 0 is the first."""
    return index | tier << _TIER_SHIFT


def page_tier(page: int) -> tuple[int, int]:
    """The inverse of :func:`page_id`: tier and index."""
    return page >> _TIER_SHIFT, page & (1 << _TIER_SHIFT) - 1
