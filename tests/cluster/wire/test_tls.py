"""Who may connect, and that nobody else can say or read anything: over real loopback sockets."""

from __future__ import annotations

import importlib
import select
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdk.api.errors import EngineDeadError, RequestError
from sdk.api.remote_workers import Address
from sdk.cluster.wire import listener as listeners, stream as streams, tls
from sdk.cluster.wire.certificate import key_pair
from sdk.cluster.wire.codec import Codec
from sdk.cluster.wire.listener import MAX_STRANGERS, Listener
from sdk.cluster.wire.stream import FrameError, Stream
from sdk.cluster.wire.tls import HandshakeError, SecureStream, SharedToken
from sdk.kernels.system import SYSTEM
from sdk.kernels.system.services import Services

TOKEN = SharedToken(b"a token of these tests", "tests/1")
WRONG = SharedToken(b"a wrong token of 22 ch", "tests/1")
NOTHING = Codec([])
HERE = Address("127.0.0.1", 0)
End = Stream | Exception


def both(worker: SharedToken, listening: SharedToken) -> tuple[End, End]:
    """What both ends get of a connection: the stream, or the error."""
    found: list[End] = [EOFError(), EOFError()]

    def attempt(index: int, call: Callable[[], Stream]) -> None:
        try:
            found[index] = call()
        except Exception as error:
            found[index] = error

    with socket.create_server(HERE) as server:
        address = Address(*server.getsockname())
        other = threading.Thread(
            target=attempt, args=(1, lambda: listening.accept(server.accept()[0], 5))
        )
        other.start()
        attempt(0, lambda: worker.connect(address, 5))
        other.join()
    return found[0], found[1]


@pytest.fixture
def pair() -> Iterator[tuple[SecureStream, SecureStream]]:
    """Two ends after a handshake."""
    one, other = both(TOKEN, TOKEN)
    assert isinstance(one, SecureStream) and isinstance(other, SecureStream)
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(HERE, TOKEN, NOTHING.decode)
    yield made
    made.close()


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def join(listener: Listener, token: SharedToken = TOKEN) -> Stream:
    stream = token.connect(listener.address, 5)
    stream.send_frame(NOTHING.encode("hello"), limit_s=5)
    return stream


# ---- the certificate ---------------------------------------------------------------------------


def test_a_certificate_is_what_other_programs_expect_of_one() -> None:
    x509 = importlib.import_module("cryptography.x509")
    keys = importlib.import_module("cryptography.hazmat.primitives.serialization")
    ec = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ec")
    pair = key_pair(b"a token of these tests")
    found = x509.load_der_x509_certificate(pair.certificate)
    key = keys.load_pem_private_key(pair.key_pem.encode(), None)
    assert isinstance(key.curve, ec.SECP256R1)
    assert found.public_key() == key.public_key()  # it was computed by cryptography again
    found.verify_directly_issued_by(found)
    assert found.version is x509.Version.v3
    constraints = found.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical and not constraints.value.ca
    assert (found.not_valid_before_utc.year, found.not_valid_after_utc.year) == (2000, 9999)


def test_a_token_has_one_key_pair_and_another_token_another_one() -> None:
    """Both ends make it, perhaps with other releases: the first bytes are part of the protocol."""
    pair = key_pair(b"0123456789abcdef")
    assert pair == key_pair(b"0123456789abcdef")
    assert pair.certificate != key_pair(b"0123456789abcdeg").certificate
    assert pair.certificate[-8:].hex() == KNOWN_END


KNOWN_END = "3e474c5ad2ec24f9"


def test_a_key_leaves_no_file_and_can_be_read_where_there_are_none_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(type(SYSTEM), "hidden_file", Services.hidden_file)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, other = both(SharedToken(b"a token of these tests", "tests/1"), TOKEN)
    assert isinstance(one, Stream) and isinstance(other, Stream)
    one.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("found", [None, SimpleNamespace(HAS_TLSv1_3=False)], ids=["none", "old"])
def test_a_python_without_tls_1_3_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, found: object
) -> None:
    monkeypatch.setattr(tls, "ssl", found)
    with pytest.raises(RequestError, match=r"need Python's ssl module with TLS 1\.3; use a Python"):
        SharedToken(b"a token of these tests", "tests/1")


# ---- the handshake -----------------------------------------------------------------------------


def test_connections_are_tls_1_3_and_have_keys_that_the_token_does_not_give(pair) -> None:
    for end in pair:
        assert end._tls.version() == "TLSv1.3" and end._tls.cipher()[2] >= 128
        assert end._tls.session_reused is False


def test_a_wrong_token_is_an_error_on_both_ends() -> None:
    worker, listening = both(WRONG, TOKEN)
    assert isinstance(worker, HandshakeError) and worker.is_token
    assert "has another token: both ends need the same one" in str(worker)
    assert isinstance(listening, HandshakeError) and listening.is_token
    assert "refuses the token: it has another one" in str(listening)


class Stranger:
    """TLS without the token: a certificate of its own, or none, and no checks."""

    def __init__(self, server: bool, certificate: bytes | None) -> None:
        self.context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        )
        self.context.check_hostname = False
        self.context.verify_mode = ssl.CERT_NONE
        self.context.set_alpn_protocols(["tests/1"])
        if certificate is not None:
            own = key_pair(certificate)
            tls._load_key(self.context, own.certificate_pem + own.key_pem)

    def wrap(self, sock: socket.socket, server: bool) -> ssl.SSLSocket:
        return self.context.wrap_socket(sock, server_side=server)


@pytest.mark.parametrize("certificate", [b"another token", None], ids=["another", "none"])
def test_a_worker_that_does_not_check_the_listener_must_show_the_token_itself(
    listener: Listener, certificate: bytes | None
) -> None:
    with (
        socket.create_connection(listener.address) as sock,
        Stranger(False, certificate).wrap(sock, False) as stranger,
        pytest.raises(OSError),
    ):
        stranger.sendall(bytes(20))
        while stranger.recv(100):
            pass
        raise ConnectionError("it was closed")
    assert eventually(lambda: bool(listener.refused))
    assert "another token" in listener.refused[0] or "not know the token" in listener.refused[0]
    assert listener.accept(0) is None


def test_a_listener_that_does_not_know_the_token_is_found_out() -> None:
    """It accepts everybody, but cannot prove that it knows the token itself."""
    with socket.create_server(HERE) as server:

        def pretend() -> None:
            with pytest.raises(OSError), server.accept()[0] as sock:
                Stranger(True, b"a guess").wrap(sock, True).recv(1)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(HandshakeError, match="has another token"):
            TOKEN.connect(Address(*server.getsockname()), 5)
        thread.join()


def test_a_copied_certificate_is_no_use_without_its_key() -> None:
    """Everybody who connects sees the certificate."""
    mine = key_pair(b"a guess")
    shown = key_pair(b"a token of these tests").certificate_pem
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        tls._load_key(context, shown + mine.key_pem)


def test_a_recorded_connection_does_not_fit_another_one(listener: Listener) -> None:
    """All that a worker sent is sent again: its keys do not fit the listener's new ones."""
    sent: list[bytes] = []
    with socket.create_server(HERE) as between:
        thread = threading.Thread(target=relay, args=(between, listener.address, sent))
        thread.start()
        stream = TOKEN.connect(Address(*between.getsockname()), 5)
        stream.send_frame(NOTHING.encode("hello"), limit_s=5)
        arrival = listener.accept(10)
        assert arrival is not None and arrival.hello == "hello"
        stream.close()
        arrival.stream.close()
        thread.join()
    with socket.create_connection(listener.address) as again:
        again.settimeout(10)
        again.sendall(b"".join(sent))
        with pytest.raises(OSError):
            while again.recv(1000):
                pass
            raise ConnectionError("it was closed")
    assert eventually(lambda: bool(listener.refused)) and listener.accept(0) is None


def relay(between: socket.socket, address: Address, sent: list[bytes]) -> None:
    """Pass a connection on and keep what the worker sends."""
    worker = between.accept()[0]
    listening = socket.create_connection(address)
    poller = select.poll()
    for sock in (worker, listening):
        poller.register(sock, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            from_worker = descriptor == worker.fileno()
            try:
                data = (worker if from_worker else listening).recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                worker.close()
                listening.close()
                return
            if from_worker:
                sent.append(data)
            (listening if from_worker else worker).sendall(data)


def test_what_others_see_is_encrypted(pair) -> None:
    one, other = pair
    seen: list[bytes] = []
    one.socket = Tap(one.socket, seen)
    for secret in (b"a prompt that nobody else may read", b"x" * 100_000):
        one.send_frame(secret, limit_s=5)
        assert bytes(other.receive_frame(5)) == secret
        assert secret[:16] not in b"".join(seen)


def test_another_program_and_another_version_are_named() -> None:
    with socket.create_server(HERE) as server:

        def answer() -> None:
            with server.accept()[0] as sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                sock.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HandshakeError, match="not embedlm") as found:
            TOKEN.connect(Address(*server.getsockname()), 5)
        assert not found.value.is_token
        thread.join()
    newer = SharedToken(b"a token of these tests", "tests/2")
    for index, found in enumerate(both(newer, TOKEN)):
        assert isinstance(found, HandshakeError) and not found.is_token
        assert f"does not speak tests/{2 - index}: it is another release" in str(found)


# ---- messages ----------------------------------------------------------------------------------


def test_messages_arrive_in_both_directions(pair) -> None:
    one, other = pair
    one.send_frame(b"a plan", limit_s=5)
    one.send_frame(b"", limit_s=5)
    assert [bytes(other.receive_frame(5)) for _ in range(2)] == [b"a plan", b""]
    other.send_frame(b"a ", b"result", limit_s=5)
    assert bytes(one.receive_frame(5)) == b"a result"


def test_large_messages_arrive_in_both_directions_at_the_same_time(pair) -> None:
    """Two threads use each end, and OpenSSL allows one call at a time."""
    message = bytes(range(256)) * 20_000
    found: list[bytes] = []

    def send(end: SecureStream) -> None:
        end.send_frame(message, limit_s=60)

    def receive(end: SecureStream) -> None:
        found.append(bytes(end.receive_frame(60)))

    threads = [threading.Thread(target=run, args=(end,)) for end in pair for run in (send, receive)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [message] * 2


class Tap:
    """A socket that keeps what is sent, and sends it, unless it is to be held back."""

    def __init__(self, sock: socket.socket, sent: list[bytes], holds: bool = False) -> None:
        self._sock, self._sent, self._holds = sock, sent, holds

    def __getattr__(self, name: str):
        return getattr(self._sock, name)

    def send(self, data) -> int:
        self._sent.append(bytes(data))
        if not self._holds:
            self._sock.sendall(data)
        return len(data)


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda a, b: a + a, id="repeated"),
        pytest.param(lambda a, b: b + a, id="reordered"),
        pytest.param(lambda a, b: b, id="left out"),
        pytest.param(lambda a, b: a[:25] + bytes([a[25] ^ 1]) + a[26:], id="changed"),
        pytest.param(lambda a, b: a[:3] + b"\xff\xff" + a[5:], id="length"),
        pytest.param(lambda a, b: a[:-1] + bytes([a[-1] ^ 1]), id="tag"),
        pytest.param(lambda a, b: b"\x15\x03\x03\0\x02\1\0", id="an end"),
    ],
)
def test_a_message_that_was_tampered_with_is_refused(pair, tamper) -> None:
    one, other = pair
    sent: list[bytes] = []
    real = one.socket
    one.socket = Tap(real, sent, holds=True)
    one.send_frame(b"first message", limit_s=5)
    one.send_frame(b"other message", limit_s=5)
    real.sendall(tamper(*sent))
    with pytest.raises(ssl.SSLError):
        other.receive_frame(5)
        other.receive_frame(5)


def test_a_message_cannot_be_sent_back_to_who_made_it(pair) -> None:
    one, other = pair
    sent: list[bytes] = []
    one.socket = Tap(one.socket, sent, holds=True)
    one.send_frame(b"a message", limit_s=5)
    other.socket.sendall(sent[0])
    with pytest.raises(ssl.SSLError):
        one.receive_frame(5)


def test_a_message_beyond_the_limit_is_neither_sent_nor_read(
    pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    one.send_frame(b"x" * 100, limit_s=5)
    with pytest.raises(FrameError, match="expected at most 64 bytes, found 100"):
        other.receive_frame(5, most=64)
    monkeypatch.setattr(streams, "MAX_FRAME", 64)
    with pytest.raises(ValueError, match="expected at most 64 bytes, found 65"):
        one.send_frame(b"x" * 65, limit_s=5)


def test_waits_end(pair) -> None:
    one, other = pair
    with pytest.raises(TimeoutError, match="sends nothing"):
        one.receive_frame(0.05)
    with pytest.raises(TimeoutError, match="does not read"):
        one.send(bytes(50_000_000), limit_s=0.05)
    other.close()
    with pytest.raises((EOFError, OSError)):
        one.receive_frame(5)


def test_a_connection_that_is_half_closed_still_receives(pair) -> None:
    one, other = pair
    one.send_frame(b"the last word", limit_s=5)
    one.end_sending()
    assert bytes(other.receive_frame(5)) == b"the last word"
    with pytest.raises(EOFError):
        other.receive_frame(5)
    other.send_frame(b"an answer", limit_s=5)
    assert bytes(one.receive_frame(5)) == b"an answer"


# ---- the listener ------------------------------------------------------------------------------


def test_the_right_one_gets_in_after_wrong_ones(listener: Listener) -> None:
    with pytest.raises(HandshakeError, match="has another token"):
        join(listener, WRONG)
    for garbage in (b"GET / HTTP/1.1\r\nHost: me\r\n\r\n" + bytes(100), b"\x80\x04\x95" * 40, b""):
        stranger = socket.create_connection(listener.address)
        stranger.sendall(garbage)
        stranger.close()
    stream = join(listener)
    arrival = listener.accept(10)
    assert arrival is not None and arrival.hello == "hello"
    assert arrival.peer.startswith("127.0.0.1:")
    assert eventually(lambda: len(listener.refused) == 4)
    assert sum("refuses the token" in why for why in listener.refused) == 1
    stream.close()
    arrival.stream.close()


@pytest.mark.parametrize("hello", [b"cos\nsystem\n", bytes(1 << 17)], ids=["pickle", "large"])
def test_a_first_message_that_is_not_one_of_ours_is_refused(
    listener: Listener, hello: bytes
) -> None:
    stream = TOKEN.connect(listener.address, 5)
    stream.send_frame(hello, limit_s=5)
    with pytest.raises((EOFError, OSError)):
        stream.receive(1, 10)
    assert "not known on this host" in listener.refused[0] or "message:" in listener.refused[0]
    assert listener.accept(0) is None
    stream.close()


def test_strangers_are_few_and_have_little_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 1.0)
    strangers = [socket.create_connection(listener.address) for _ in range(MAX_STRANGERS)]
    assert eventually(lambda: len(listener._strangers) == MAX_STRANGERS)
    late = socket.create_connection(listener.address)
    late.settimeout(10)
    assert late.recv(8) == b""  # one too many
    for stranger in strangers:  # each loses its place, though it sends a byte now and then
        stranger.settimeout(10)
        stranger.sendall(b"\x16")
        while stranger.recv(100):
            pass
    join(listener).close()
    arrival = listener.accept(10)
    assert arrival is not None
    arrival.stream.close()
    for stranger in (*strangers, late):
        stranger.close()


def test_a_closed_listener_frees_its_port_and_everybody_who_waits() -> None:
    threads = threading.active_count()
    listener = Listener(HERE, TOKEN, NOTHING.decode)
    stranger = socket.create_connection(listener.address)
    unused = join(listener)
    errors: list[str] = []

    def wait() -> None:
        try:
            listener.accept(60)
            listener.accept(60)
        except EngineDeadError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.1)
    listener.close()
    listener.close()
    waiting.join()
    assert errors == [f"{listener.address} no longer waits for connections"]
    stranger.settimeout(10)
    while stranger.recv(100):
        pass
    stranger.close()
    unused.close()
    Listener(listener.address, TOKEN).close()
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (Address("192.0.2.1", 29500), "expected a free port and an address of this machine"),
        (Address("no-such-host.invalid", 29500), "cannot listen at no-such-host.invalid:29500"),
    ],
)
def test_an_address_of_another_machine_is_named(address: Address, why: str) -> None:
    with pytest.raises(EngineDeadError, match=why):
        Listener(address, TOKEN)


def test_a_taken_port_is_named(listener: Listener) -> None:
    with pytest.raises(EngineDeadError, match=f"{listener.address}: Address already in use"):
        Listener(listener.address, TOKEN)
