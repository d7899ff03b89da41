"""Protection of the HTTP server: keys, limits, quotas, the audit log, and the edge of the network.

Each part works alone. :class:`GuardedAccess` puts keys, limits and the audit log behind the
protocol that the routes ask (:class:`sdk.serving.access.Access`); :class:`Edge` is an ASGI
application around the routes; :func:`uvicorn_options` limits connections. docs/security.md says
what they protect, and what they do not.
"""

from sdk.serving.guard.audit import AuditLog
from sdk.serving.guard.authenticate import Anyone, Authenticate, ByKey, KnownCaller
from sdk.serving.guard.body_limits import BodyLimits
from sdk.serving.guard.connections import uvicorn_options
from sdk.serving.guard.edge import Edge, protected
from sdk.serving.guard.gate import Gate
from sdk.serving.guard.guarded import GuardedAccess
from sdk.serving.guard.http_limits import HttpLimits
from sdk.serving.guard.key_file import KeyFile
from sdk.serving.guard.limits import Limits
from sdk.serving.guard.origins import Origins
from sdk.serving.guard.usage import Meter

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
