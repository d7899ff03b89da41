"""Options that are on or off."""

from __future__ import annotations

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr


def check_flags(**flags: object) -> None:
    """:raises RequestError: one is not a bool: ``"no"``, from a file or a form, would be true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise RequestError(f"{name}: expected True or False, found {safe_repr(value)}")
