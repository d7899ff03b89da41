"""Protection of the HTTP server: keys, limits, quotas, the audit log, and the edge of the network.

Each part works alone. :class:`GuardedAccess` puts keys, limits and the audit log behind the
protocol that the routes ask (:class:`sdk.server.access.Access`); :class:`Edge` is an ASGI
application around the routes; :func:`uvicorn_options` limits connections. docs/security.md says
what they protect, and what they do not.
"""

from sdk.server.guard.audit import AuditLog
from sdk.server.guard.authenticate import Anyone, Authenticate, ByKey, KnownCaller
from sdk.server.guard.body_limits import BodyLimits
from sdk.server.guard.connections import uvicorn_options
from sdk.server.guard.edge import Edge, protected
from sdk.server.guard.gate import Gate
from sdk.server.guard.guarded import GuardedAccess
from sdk.server.guard.http_limits import HttpLimits
from sdk.server.guard.key_file import KeyFile
from sdk.server.guard.limits import Limits
from sdk.server.guard.origins import Origins
from sdk.server.guard.usage import Meter

__all__ = [
    "Anyone",
    "AuditLog",
    "Authenticate",
    "BodyLimits",
    "ByKey",
    "Edge",
    "Gate",
    "GuardedAccess",
    "HttpLimits",
    "KeyFile",
    "KnownCaller",
    "Limits",
    "Meter",
    "Origins",
    "protected",
    "uvicorn_options",
]
