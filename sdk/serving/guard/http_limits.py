"""What one HTTP request may look like, before the application sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.serving.access import Headers, Refused

#: The longest body where a model reads images, unless the operator says another: photos of 12 MB
#: and screens come as base64, four bytes for three.
BODY_WITH_IMAGES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of requests and connections; times in seconds.

    Head: ``head_bytes``: all header lines together, ``headers``: how many, ``target_bytes``: path
    and query; ``head_seconds``: from the connection, or the first byte, until it is complete.
    Body: ``body_bytes``; ``body_seconds`` until it is complete; ``json_depth``; ``buffered_bytes``:
    of the bodies of all requests that are inside.
    Requests: ``requests``: inside at one time, running and waiting; ``request_seconds``: until the
    response is complete (``None``: no limit); then the application is told that the client has
    gone, and the client gets an error.
    Connections: ``connections`` at one time; ``idle_seconds`` between two requests (longer
    than clients keep a connection, or they send a request into a closed one);
    ``stalled_seconds``: how long a client may leave the response unread.

    :raises RequestError: a limit is not a positive number.
    """

    head_bytes: int = 32 * 2**10
    headers: int = 100
    target_bytes: int = 4096
    head_seconds: float = 10.0
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    json_depth: int = 64
    buffered_bytes: int = 64 * 2**20
    requests: int = 256
    request_seconds: float | None = None
    connections: int = 2048
    idle_seconds: float = 75.0
    stalled_seconds: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.type == "int"
            number = isinstance(value, int if whole else (int, float))
            if value is None and field.name == "request_seconds":
                continue
            if isinstance(value, bool) or not (number and 0 < value < 2**53):
                raise RequestError(
                    f"{field.name}: expected a {'whole ' if whole else ''}number above 0, "
                    f"found {safe_repr(value)}"
                )

    def check_head(self, target: Sequence[bytes], headers: Headers) -> None:
        """Check sizes, and headers that must not occur twice. ``target``: path and query.

        :raises Refused: 400, 414, 415 (a compressed body could be of any size) or 431.
        """
        if sum(map(len, target)) > self.target_bytes:
            raise Refused(
                414, f"Path and query are longer than {self.target_bytes} bytes.", "uri_too_long"
            )
        if len(headers) > self.headers:
            raise Refused(431, f"More than {self.headers} headers.", "headers_too_large")
        size, single = 0, set()
        for name, value in headers:
            size += len(name) + len(value) + 4  # ": " and the end of the line
            if name in _ONCE:
                if name in single:
                    text = name.decode()
                    raise Refused(400, f"The header {text} occurs more than once.", "bad_header")
                single.add(name)
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise Refused(415, "Bodies must not be compressed.", "unsupported_encoding")
        if size > self.head_bytes:
            raise Refused(
                431, f"The headers are longer than {self.head_bytes} bytes.", "headers_too_large"
            )

    def check_length(self, headers: Headers) -> None:
        """Check the announced length of the body. :raises Refused: 400 or 413."""
        for name, value in headers:
            if name == b"content-length":
                if not value.isdigit():
                    raise Refused(400, "Content-Length is not a number.", "bad_header")
                if len(value) > 16 or int(value) > self.body_bytes:
                    raise self.too_large()

    def too_large(self) -> Refused:
        """The body is too large."""
        return Refused(413, f"The body is larger than {self.body_bytes} bytes.", "body_too_large")


#: Two of these can be read in two ways by two programs on the path of a request (a proxy and this
#: server), which is how requests are smuggled past the first.
_ONCE = frozenset(
    (
        *(b"authorization", b"x-api-key", b"content-length", b"content-type", b"host"),
        *(b"origin", b"transfer-encoding", b"content-encoding"),
    )
)


def check_path(path: str) -> None:
    """Refuse decoded paths that mean another file or route to another program.

    :raises Refused: 400: no slash at the beginning, a control character, a backslash, or a segment
        ``.`` or ``..``.
    """
    if not path.startswith("/"):
        raise Refused(400, "The path must begin with '/'.", "bad_path")
    if path.isascii() and path.isprintable() and "\\" not in path and "/." not in path:
        return
    if "\\" in path or any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) < 0xE000 for c in path):
        raise Refused(400, "The path contains a character that is not allowed.", "bad_path")
    if any(segment in (".", "..") for segment in path.split("/")):
        raise Refused(400, "The path must not contain '.' or '..' as a segment.", "bad_path")
