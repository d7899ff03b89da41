"""The HTTP interface of :class:`sdk.LLM`: an ASGI application, and ``embedlm serve``.

``import sdk`` does not import this package. It needs the extra ``server`` (fastapi, uvicorn).
"""

from __future__ import annotations

from sdk.server.access import (
    Access as Access,
    Admission as Admission,
    Caller as Caller,
    Demand as Demand,
    Open as Open,
    Outcome as Outcome,
    Refused as Refused,
)
from sdk.server.app import create_app as create_app
