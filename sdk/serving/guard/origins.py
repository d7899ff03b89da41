"""Which web pages may use the server: the headers Host and Origin."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from sdk.api.errors import RequestError
from sdk.serving.access import Headers, Refused

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class Origins:
    """Checks Host and Origin, which browsers send and pages cannot change.

    ``hosts``: the names under which the server may be addressed, without port; ``None``: any. On a
    loopback address, where anyone on this machine can connect without a key, it should be set: a
    page of a name that its owner lets point to 127.0.0.1 (DNS rebinding) sends that name as Host.

    ``allowed``: origins of pages that may send requests, such as ``https://chat.example.com``;
    besides them only the server's own pages. A request with any other Origin is refused: a page can
    send a request without asking (as ``text/plain``), even if it cannot read the response. Programs
    other than browsers send no Origin.

    :raises RequestError: an origin or a host is invalid.
    """

    def __init__(self, hosts: Iterable[str] | None = None, allowed: Iterable[str] = ()) -> None:
        self.allowed = frozenset(_origin(text) for text in allowed)
        self._hosts = None if hosts is None else frozenset(_host(text) for text in hosts)

    @classmethod
    def for_address(
        cls, address: str, hosts: Iterable[str] = (), allowed: Iterable[str] = ()
    ) -> Origins:
        """For a server bound to ``address``: on loopback only its names and ``hosts`` may be used;
        elsewhere any name, unless ``hosts`` are given."""
        named = tuple(hosts)
        if is_loopback(address):
            return cls((*_LOOPBACK, _bracketed(address), *named), allowed)
        return cls(named or None, allowed)

    def check(self, headers: Headers) -> None:
        """:raises Refused: 400 or 403."""
        host = origin = None
        for name, value in headers:
            if name == b"host":
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origin = value.decode("latin-1").lower()
        if self._hosts is not None and _without_port(host or "") not in self._hosts:
            raise Refused(
                403,
                "The server is not known by the name in the header Host. If it is meant to be, "
                "start it with --allowed-host NAME.",
                "unknown_host",
            )
        if origin is None or origin in self.allowed or "*" in self.allowed:
            return
        # Only the host is compared: behind a proxy that ends TLS the scheme is often not known.
        if not host or origin.partition("://")[2] != host:
            raise Refused(
                403,
                "Pages of this origin may not use the server. If they should, start it with "
                "--allowed-origin ORIGIN.",
                "unknown_origin",
            )


def is_loopback(address: str) -> bool:
    """Whether only programs on this machine can connect to ``address``."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0].rstrip(".")


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _host(text: str) -> str:
    host = _bracketed(text.lower().rstrip(".")) if text.count(":") > 1 else text.lower().rstrip(".")
    if not host or host != _without_port(host) or any(c in host for c in "/@* "):
        raise RequestError(f"allowed host: expected a name such as llm.example.com, found {text!r}")
    return host


def _origin(text: str) -> str:
    if text == "*":
        return text
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.path or parts.query or parts.fragment or "@" in text or "*" in text:
        raise RequestError(
            f"allowed origin: expected one such as https://chat.example.com, found {text!r}"
        )
    return text.lower()
