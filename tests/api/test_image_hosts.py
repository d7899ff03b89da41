"""Images by URL: from allowed hosts only, and never from inside a network (SSRF)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sdk import ImageHosts, RequestError

LOOPBACK = ("127.0.0.0/8", "::1/128")
PICTURE = b"\x89PNG of some bytes"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.hosts.append(self.headers["Host"])
        kind, _, rest = self.path[1:].partition("/")
        if kind == "to":
            self._start(302, Location=rest)
        elif kind == "status":
            self._start(int(rest))
        elif kind == "endless":
            self._start(200, close=True)
            self._drip(b"x" * 65536)
        elif kind == "slow-body":
            self._start(200, length=10**6)
            self._drip(b"x")
        elif kind == "slow-header":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            self._drip(b"x")
        elif kind == "short":
            self._start(200, length=1000, close=True)
            self.wfile.write(b"x")
        elif kind == "long":
            self._start(200, length=int(rest))
        else:
            self._start(200, length=len(PICTURE))
            self.wfile.write(PICTURE)

    def _start(
        self, status: int, length: int | None = None, close: bool = False, **headers: str
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if close:
            self.send_header("Connection", "close")
        if length is not None or not close:
            self.send_header("Content-Length", str(length or 0))
        self.end_headers()

    def _drip(self, part: bytes) -> None:
        """Send without an end, until the client goes or the test has ended."""
        pause = 0.0 if len(part) > 1 else 0.02
        try:
            while not self.server.over.wait(pause):
                self.wfile.write(part)
        except OSError:
            pass

    def log_message(self, *args: Any) -> None:
        pass


class Site(ThreadingHTTPServer):
    """A web server of this machine."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []
        self.hosts: list[str] = []
        self.over = threading.Event()
        self.port = self.server_address[1]

    def url(self, path: str = "/a.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.over.set()
    made.shutdown()
    thread.join()
    made.server_close()


def allowed(site: Site, **options: Any) -> ImageHosts:
    """The site's address as an allowed host inside a network that may be reached."""
    return ImageHosts([f"127.0.0.1:{site.port}"], networks=LOOPBACK, **options)


def test_an_allowed_host_gives_its_image(site: Site) -> None:
    assert allowed(site)(site.url("/pictures/a.png?size=1#part")) == PICTURE
    assert site.asked == ["/pictures/a.png?size=1"]
    assert site.hosts == [f"127.0.0.1:{site.port}"]


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "2130706433", "0x7f.1", "0177.0.0.1", "127.1"),
        *("[::ffff:127.0.0.1]", "[::1]", "0.0.0.0", "[::]"),
    ],
)
def test_no_spelling_of_this_machine_is_reached(site: Site, host: str) -> None:
    fetch = ImageHosts([f"*:{site.port}"])
    with pytest.raises(RequestError, match=r"an address inside a network|has no address"):
        fetch(site.url(host=host))
    assert not site.asked


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "192.0.2.9"),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "203.0.113.7"),
        *("[fe80::1]", "[fc00::1]", "[fd00:ec2::254]", "[ff02::1]", "[::10.0.0.1]"),
        *("[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "[2002:a00:1::]", "[2001:0:1::1]"),
        "[2001:db8::1]",
    ],
)
def test_an_address_inside_a_network_is_refused_before_a_connection(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("connected"))
    with pytest.raises(RequestError, match="an address inside a network"):
        ImageHosts(["*"])(f"http://{address}/a.png")


def _addresses(*found: str) -> list[tuple[Any, ...]]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]


def test_one_private_address_among_public_ones_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = _addresses("93.184.215.14", "192.168.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: answers)
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("connected"))
    with pytest.raises(RequestError, match="an address inside a network"):
        ImageHosts(["img.example.org"])("https://img.example.org/a.png")


def test_a_name_server_that_answers_twice_differently_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DNS rebinding: the address that was checked is the one that is connected to."""
    answers = [_addresses("93.184.215.14"), _addresses("127.0.0.1")]
    reached = []

    def connect(self: socket.socket, address: Any) -> None:
        reached.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: answers.pop(0))
    monkeypatch.setattr(socket.socket, "connect", connect)
    with pytest.raises(RequestError, match="cannot be fetched: ConnectionRefusedError"):
        ImageHosts(["img.example.org"])("http://img.example.org/a.png")
    assert reached == [("93.184.215.14", 0)]
    assert len(answers) == 1


def test_a_redirect_obeys_the_same_rules(site: Site) -> None:
    fetch = allowed(site)
    assert fetch(site.url(f"/to/{site.url('/b.png')}")) == PICTURE
    assert fetch(site.url("/to//b.png")) == PICTURE
    asked = len(site.asked)
    for target, why in (
        (site.url(host="localhost"), "is not among the allowed hosts"),
        ("http://169.254.169.254/latest/meta-data", "is not among the allowed hosts"),
        ("file:///etc/passwd", "expected http or https, found the scheme 'file'"),
    ):
        with pytest.raises(RequestError, match=why):
            fetch(site.url(f"/to/{target}"))
    assert len(site.asked) == asked + 3  # each redirect was read, and none was followed


def test_a_redirect_into_the_network_is_refused(site: Site) -> None:
    # every host is allowed, and of the networks inside only that of the first answer
    fetch = ImageHosts(["*", f"*:{site.port}"], networks=["127.0.0.1/32"])
    for target in ("http://10.0.0.1/", f"http://127.0.0.2:{site.port}/", "http://[::1]/"):
        with pytest.raises(RequestError, match="an address inside a network"):
            fetch(site.url(f"/to/{target}"))


def test_redirects_end(site: Site) -> None:
    with pytest.raises(RequestError, match="more than 3 redirects"):
        allowed(site)(site.url("/to/" * 9 + "a.png"))
    assert len(site.asked) == 4


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "expected http or https, found the scheme 'file'"),
        ("ftp://127.0.0.1/a", "found the scheme 'ftp'"),
        ("data:image/png;base64,AA", "found the scheme 'data'"),
        ("/etc/passwd", "found the scheme ''"),
        ("http://me:secret@127.0.0.1/a.png", "expected a URL without a user name"),
        ("http://127.0.0.1@evil.example/a.png", "expected a URL without a user name"),
        ("http:///a.png", "is not among the allowed hosts"),
        ("http://127.0.0.1/a.png", "is not among the allowed hosts"),  # another port
        ("http://127.0.0.1.evil.example/a.png", "is not among the allowed hosts"),
        ("http://127.0.0.1:99999/a.png", "cannot be fetched: ValueError"),
        ("http://[::1/a.png", "cannot be fetched: ValueError"),
    ],
)
def test_other_urls_are_refused(site: Site, url: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        allowed(site)(url)
    assert str(caught.value).startswith("image ")
    assert not site.asked


@pytest.mark.parametrize("path", ["/a b HTTP/1.1", "/a.png HTTP/1.1\r\nX-Injected: 1"])
def test_a_url_cannot_add_a_header(site: Site, path: str) -> None:
    with pytest.raises(RequestError, match="cannot be fetched: InvalidURL"):
        allowed(site)(site.url(path))
    assert not site.asked


def test_patterns_of_hosts() -> None:
    fetch = ImageHosts(["IMG.example.org.", "*.cdn.example", "other.example:8080"])
    for url in (
        "http://img.example.org/a",
        "https://img.example.org:443/a",
        "http://Img.Example.org./a",
        "http://a.b.cdn.example/a",
        "http://other.example:8080/a",
    ):
        fetch._allowed(url)
    for url in (
        "http://img.example.org:8080/a",
        "http://cdn.example/a",
        "http://xcdn.example/a",
        "http://other.example/a",
        "http://example.org/a",
    ):
        with pytest.raises(RequestError, match="is not among the allowed hosts"):
            fetch._allowed(url)


@pytest.mark.parametrize("path", ["/endless", f"/long/{10**9}"])
def test_a_large_file_is_not_read(site: Site, path: str) -> None:
    with pytest.raises(RequestError, match="more than 100000 bytes"):
        allowed(site, max_bytes=100_000)(site.url(path))


@pytest.mark.parametrize("path", ["/slow-body", "/slow-header"])
def test_a_slow_host_is_left(site: Site, path: str) -> None:
    """Each byte comes soon enough; together they would take minutes."""
    with pytest.raises(RequestError, match=r"cannot be fetched: not within 0\.3 s"):
        allowed(site, timeout=0.3)(site.url(path))


def test_a_name_server_that_does_not_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [over.wait(60)])
    try:
        with pytest.raises(RequestError, match=r"not within 0\.2 s"):
            ImageHosts(["img.example.org"], timeout=0.2)("http://img.example.org/a.png")
    finally:
        over.set()


def test_an_answer_that_ends_early_is_an_error(site: Site) -> None:
    with pytest.raises(RequestError, match="cannot be fetched: IncompleteRead"):
        allowed(site)(site.url("/short"))


@pytest.mark.parametrize("status", [404, 500, 302])
def test_another_status_is_an_error(site: Site, status: int) -> None:
    with pytest.raises(RequestError, match=f"its host answered {status}"):
        allowed(site)(site.url(f"/status/{status}"))


def test_a_proxy_of_the_environment_is_not_asked(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert allowed(site)(site.url()) == PICTURE


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hosts": []}, "hosts: expected a list"),
        ({"hosts": "img.example.org"}, "hosts: expected a list"),
        ({"hosts": ["http://img.example.org"]}, "hosts: expected names"),
        ({"hosts": ["a/b"]}, "hosts: expected names"),
        ({"hosts": [""]}, "hosts: expected names"),
        ({"hosts": [3]}, "hosts: expected names"),
        ({"hosts": ["a*b"]}, "hosts: expected names"),
        ({"hosts": ["a"], "networks": ["10.0.0.1/8"]}, "networks: expected networks"),
        ({"hosts": ["a"], "max_bytes": 0}, "max_bytes: expected an integer"),
        ({"hosts": ["a"], "timeout": float("inf")}, "timeout: expected seconds"),
        ({"hosts": ["a"], "timeout": True}, "timeout: expected seconds"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        ImageHosts(**options)
