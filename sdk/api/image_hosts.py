"""``ImageHosts``: fetches images by URL from hosts that were allowed, never from inside a network.

A URL in a request is chosen by whoever wrote the request. Fetching it blindly would let that person
use this process to reach what only this process can reach: services of the machine, of the network
around it, or of a cloud (server-side request forgery, SSRF).
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import math
import re
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias
from urllib.parse import SplitResult, urljoin, urlsplit

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr

#: 32 MiB: a photo of 100 megapixels as JPEG has 30.
MAX_IMAGE_BYTES = 2**25
MAX_SECONDS = 10.0
#: Images often move to the host of a content network once.
MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 2**16
_HOST = re.compile(r"(\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
#: IPv6 addresses that lead to an IPv4 address of their own choice (6to4, Teredo).
_TUNNELS = tuple(map(ipaddress.IPv6Network, ("2001::/32", "2002::/16")))
_UNICAST = ipaddress.IPv6Network("2000::/3")

_Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
_Network: TypeAlias = "ipaddress.IPv4Network | ipaddress.IPv6Network"


class ImageHosts:
    """Fetches images from some hosts: ``LLM(..., image_fetcher=ImageHosts(["img.example.org"]))``.

    ``hosts``: names, ``*.example.org`` for all names below one, ``*`` for every public host; a
    name with ``:port`` allows that port in place of the usual one. ``networks``: private networks
    that may be reached all the same, such as ``"10.1.0.0/16"``. The schemes are ``http`` and
    ``https``.

    A host's name is resolved once, all its addresses must be public, and the connection goes to one
    of these addresses, so that a second answer of the name server changes nothing. The same holds
    for each redirect. ``timeout``: seconds for everything together. The proxy settings of the
    environment are not used. May be called from several threads at once.

    :raises RequestError: a host, a network or a limit is invalid.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        networks: Sequence[str] = (),
        max_bytes: int = MAX_IMAGE_BYTES,
        timeout: float = MAX_SECONDS,
    ) -> None:
        if isinstance(hosts, str) or not hosts:
            raise RequestError(f"hosts: expected a list of host names, found {safe_repr(hosts)}")
        self._hosts = frozenset(map(_checked_host, hosts))
        self._networks = tuple(map(_network, networks))
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise RequestError(
                f"max_bytes: expected an integer of at least 1, found {safe_repr(max_bytes)}"
            )
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not number or not 0 < timeout < math.inf:
            raise RequestError(f"timeout: expected seconds above 0, found {safe_repr(timeout)}")
        self._max_bytes = max_bytes
        self._timeout = timeout

    def __call__(self, url: str) -> bytes:
        """The file at a URL.

        :raises RequestError: the URL is not allowed, or the host does not send the file in time.
        """
        deadline = time.monotonic() + self._timeout
        shown = safe_repr(url)
        try:
            for _ in range(MAX_REDIRECTS + 1):
                parts, host, port = self._allowed(url)
                found = self._get(parts, host, port, deadline)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        except RequestError as error:
            raise RequestError(f"image {shown}: {error}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            late = isinstance(error, TimeoutError)
            why = f"not within {self._timeout:g} s" if late else type(error).__name__
            raise RequestError(f"image {shown}: cannot be fetched: {why}") from None
        raise RequestError(f"image {shown}: more than {MAX_REDIRECTS} redirects")

    # ---- what is allowed -------------------------------------------------------------------------

    def _allowed(self, url: str) -> tuple[SplitResult, str, int]:
        """A URL's parts, host and port. :raises RequestError: it may not be fetched."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS:
            raise RequestError(f"expected http or https, found the scheme {parts.scheme[:20]!r}")
        if "@" in parts.netloc:
            raise RequestError("expected a URL without a user name")
        host, usual = (parts.hostname or "").rstrip("."), _PORTS[parts.scheme]
        port = usual if parts.port is None else parts.port
        names = [host if ":" not in host else f"[{host}]", "*"]
        labels = host.split(".")
        names += [f"*.{'.'.join(labels[at:])}" for at in range(1, len(labels))]
        if port != usual:
            names = [f"{name}:{port}" for name in names]
        else:
            names += [f"{name}:{port}" for name in names]
        if not host or self._hosts.isdisjoint(names):
            raise RequestError(
                f"{safe_repr(parts.netloc)} is not among the allowed hosts; send the image itself "
                "(a data URL)"
            )
        return parts, host, port

    def _addresses(self, host: str, port: int, deadline: float) -> list[tuple[Any, ...]]:
        """What ``socket.getaddrinfo`` knows of a host.

        :raises RequestError: one of its addresses is not public.
        """
        found = _resolved(host, port, deadline)
        for *_, address in found:
            if not self._may_reach(ipaddress.ip_address(address[0].partition("%")[0])):
                raise RequestError("its host has an address inside a network, not a public one")
        return found

    def _may_reach(self, address: _Address) -> bool:
        if isinstance(address, ipaddress.IPv6Address):
            if address.ipv4_mapped is not None:
                return self._may_reach(address.ipv4_mapped)
            public = address in _UNICAST and not any(address in one for one in _TUNNELS)
        else:
            public = not address.is_multicast and not address.is_reserved
        listed = any(address in one for one in self._networks if one.version == address.version)
        return listed or (public and address.is_global)

    # ---- the request -----------------------------------------------------------------------------

    def _get(self, parts: SplitResult, host: str, port: int, deadline: float) -> bytes | str:
        """The file, or the URL of a redirect."""
        connected = _connect(self._addresses(host, port, deadline), deadline)
        try:
            if parts.scheme == "https":
                import ssl

                connected.settimeout(_left(deadline))
                context = ssl.create_default_context()
                connected = context.wrap_socket(connected, server_hostname=host)
            connection = http.client.HTTPConnection(host, port)
            connection.sock = _Timed(connected, deadline)
            path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
            connection.request("GET", path, headers={**_HEADERS, "Host": parts.netloc})
            response = connection.getresponse()
            if response.status in _REDIRECTS and (location := response.getheader("Location")):
                return location
            if response.status != 200:
                raise RequestError(f"its host answered {response.status}")
            return self._body(response)
        finally:
            connected.close()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        too_large = RequestError(f"more than {self._max_bytes} bytes")
        if (response.length or 0) > self._max_bytes:
            raise too_large
        parts: list[bytes] = []
        size = 0
        while part := response.read1(_CHUNK):
            size += len(part)
            if size > self._max_bytes:
                raise too_large
            parts.append(part)
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return b"".join(parts)


_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}


class _Timed:
    """A socket of which each use ends at the deadline, as ``http.client`` uses one."""

    def __init__(self, inner: socket.socket, deadline: float) -> None:
        self._inner = inner
        self._deadline = deadline

    def sendall(self, data: Any) -> None:
        self._inner.settimeout(_left(self._deadline))
        self._inner.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._inner, self._deadline))

    def close(self) -> None:
        """The owner of the socket closes it."""


class _TimedReader(io.RawIOBase):
    """What a socket receives until the deadline, however slowly it comes."""

    def __init__(self, inner: socket.socket, deadline: float) -> None:
        self._inner = inner
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._inner.settimeout(_left(self._deadline))
        return self._inner.recv_into(buffer)


def _left(deadline: float) -> float:
    """The seconds until ``deadline``. :raises TimeoutError: there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _resolved(host: str, port: int, deadline: float) -> list[tuple[Any, ...]]:
    """The addresses of a host. A name server that does not answer is not waited for."""
    found: list[tuple[Any, ...]] = []
    failed: list[Exception] = []

    def ask() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            failed.append(error)

    thread = threading.Thread(target=ask, name="embedlm-image-host", daemon=True)
    thread.start()
    thread.join(_left(deadline))
    if thread.is_alive():
        raise TimeoutError
    if failed or not found:
        raise RequestError("its host has no address")
    return found


def _connect(addresses: Iterable[tuple[Any, ...]], deadline: float) -> socket.socket:
    """A connection to the first address that answers."""
    failed: OSError = OSError()
    for family, kind, protocol, _, address in addresses:
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(_left(deadline))
            made.connect(address)
            return made
        except OSError as error:
            made.close()
            failed = error
    raise failed


def _checked_host(host: object) -> str:
    name = host.lower().rstrip(".") if isinstance(host, str) else ""
    if not _HOST.fullmatch(name):
        raise RequestError(
            "hosts: expected names such as 'img.example.org', '*.example.org' or "
            f"'localhost:8080', without a scheme or a path, found {safe_repr(host)}"
        )
    return name


def _network(given: object) -> _Network:
    try:
        return ipaddress.ip_network(str(given))
    except ValueError:
        raise RequestError(
            f"networks: expected networks such as '10.1.0.0/16', found {safe_repr(given)}"
        ) from None
