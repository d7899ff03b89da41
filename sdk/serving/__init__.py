"""The HTTP interface of :class:`sdk.LLM`: an ASGI application, and ``embedlm serve``.

``import sdk`` does not import this package. ``create_app`` needs the extra ``server`` (fastapi,
uvicorn) and torch, and is imported when it is used: ``embedlm keys`` needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.serving.access import (
    Access as Access,
    Admission as Admission,
    Caller as Caller,
    Demand as Demand,
    Open as Open,
    Outcome as Outcome,
    Refused as Refused,
)

if TYPE_CHECKING:
    from sdk.serving.app import create_app as create_app


def __getattr__(name: str) -> object:
    if name == "create_app":
        from sdk.serving.app import create_app

        return create_app
    raise AttributeError(f"module 'sdk.serving' has no attribute {name!r}")
