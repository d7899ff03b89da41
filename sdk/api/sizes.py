"""Parses and formats numbers of bytes: ``"2GiB"``."""

from __future__ import annotations

import re

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr

GIB = 2**30
#: ``weight_cache=True``.
WEIGHT_CACHE_BYTES = 32 * GIB
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: object, name: str = "size") -> int:
    """``"2GiB"``, ``"500 MB"`` or a number -> bytes. :raises RequestError: naming ``name``."""
    count: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        count = value
    elif isinstance(value, str):
        found = _SIZE.fullmatch(value)
        if found and found[2].upper() in _UNITS:
            count = float(found[1]) * _UNITS[found[2].upper()]
    if count is None or not 1 <= count < 2**63:
        raise RequestError(
            f"{name}: expected a size such as '2GiB' or '500MB', at least one byte, "
            f"found {safe_repr(value)}"
        )
    return int(count)


def cache_bytes(value: object, device: str = "auto") -> int:
    """The option ``weight_cache`` as the most bytes of all files in the cache; 0: none is used.

    :raises RequestError: it is neither a truth value nor a size, or the ``device`` has no cache.
    """
    if value is None or value is False or value == 0:
        return 0
    if device == "cuda":
        raise RequestError(
            f"weight_cache={safe_repr(value)}: with device='cuda' weights are packed on the card, "
            "and none are kept; leave it out"
        )
    return WEIGHT_CACHE_BYTES if value is True else parse_bytes(value, "weight_cache")


def format_bytes(count: int) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
