"""Who may connect, and that nobody else can say anything: over real loopback sockets."""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
import time
from types import ModuleType

import pytest

from sdk.api.errors import EngineDeadError
from sdk.api.remote_workers import Address
from sdk.cluster.executors.remote import handshake, listener as listeners, wire as wires
from sdk.cluster.executors.remote.codec import Codec
from sdk.cluster.executors.remote.handshake import HandshakeError, open_handshake
from sdk.cluster.executors.remote.listener import MAX_STRANGERS, Listener
from sdk.cluster.executors.remote.wire import ForgedError, SignedWire, Wire

TOKEN = b"a token of these tests"
NOTHING = Codec([])


@pytest.fixture
def pair(remote: ModuleType):
    """Two ends after a handshake."""
    with remote.connected() as (one, other):
        yield remote.shake_hands(one, other)


@pytest.fixture
def listener():
    made = Listener(Address("127.0.0.1", 0), TOKEN, NOTHING)
    yield made
    made.close()


def join(listener: Listener, token: bytes = TOKEN) -> SignedWire:
    wire = Wire.connect(listener.address, 5)
    try:
        signed = open_handshake(wire, token, 5)
    except BaseException:
        wire.close()
        raise
    signed.send(NOTHING.encode("hello"), 5)
    return signed


def test_messages_arrive_in_both_directions(pair) -> None:
    one, other = pair
    one.send(b"a plan", 5)
    one.send(b"", 5)
    assert [bytes(other.receive(5)) for _ in range(2)] == [b"a plan", b""]
    other.send(b"a result", 5)
    assert bytes(one.receive(5)) == b"a result"


def test_a_large_message_arrives_in_parts(pair) -> None:
    one, other = pair
    message = bytes(range(256)) * 20_000
    sender = threading.Thread(target=one.send, args=(message, 30))
    sender.start()
    assert bytes(other.receive(30)) == message
    sender.join()


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_token_is_an_error_on_both_ends(remote: ModuleType, wrong: int) -> None:
    tokens = [b"the right one......", b"the right one......"]
    tokens[wrong] = b"another token......"
    with remote.connected() as (one, other):
        worker, listening = remote.shake_hands(one, other, tuple(tokens))
    assert isinstance(worker, HandshakeError) and worker.is_token
    assert "refuses the token" in str(worker)
    assert isinstance(listening, HandshakeError) and "wrong token" in str(listening)


def test_a_listener_that_does_not_know_the_token_is_found_out(remote: ModuleType) -> None:
    """It accepts everybody, but cannot prove that it knows the token itself."""
    with remote.connected() as (one, other):

        def pretend() -> None:
            other.send(handshake._hello(), 5)
            other.receive(handshake._HELLO + 32, 5)
            other.send(b"\1" + bytes(32), 5)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(HandshakeError, match="does not know the token"):
            open_handshake(one, TOKEN, 5)
        thread.join()


def test_a_proof_of_the_other_role_is_none(remote: ModuleType) -> None:
    """A listener cannot use what a worker sent as its own proof."""
    with remote.connected() as (one, other):

        def reflect() -> None:
            other.send(handshake._hello(), 5)
            proof = other.receive(handshake._HELLO + 32, 5)[-32:]
            other.send(b"\1" + proof, 5)

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(HandshakeError, match="does not know the token"):
            open_handshake(one, TOKEN, 5)
        thread.join()


def test_a_recorded_handshake_does_not_fit_another_connection(listener: Listener) -> None:
    first = Wire.connect(listener.address, 5)
    greeting = bytes(first.receive(handshake._HELLO, 5))
    own = handshake._hello()
    recorded = own + handshake._proof(TOKEN, b"worker", greeting, own)
    first.send(recorded, 5)
    assert first.receive(1, 5) == b"\1"
    first.close()
    second = Wire.connect(listener.address, 5)
    second.receive(handshake._HELLO, 5)
    second.send(recorded, 5)
    assert second.receive(1, 5) == b"\0"
    second.close()


def test_another_program_and_another_version_are_named(
    remote: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with remote.connected() as (one, other):
        other.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", 5)
        with pytest.raises(HandshakeError, match="not embedlm"):
            open_handshake(one, TOKEN, 5)
    with remote.connected() as (one, other):
        monkeypatch.setattr(handshake, "PROTOCOL", 7)
        other.send(handshake._hello(), 5)
        monkeypatch.undo()
        with pytest.raises(HandshakeError, match="protocol version 7, expected 1"):
            open_handshake(one, TOKEN, 5)


def test_the_session_keys_are_those_of_rfc_5869() -> None:
    """Written out as in the RFC: extract with the greetings as salt, expand to 64 bytes."""
    greetings = b"L" * 42 + b"W" * 42
    secret = hmac.new(greetings, TOKEN, hashlib.sha256).digest()
    blocks, last = b"", b""
    for number in (1, 2):
        last = hmac.new(secret, last + b"embedlm session" + bytes([number]), "sha256").digest()
        blocks += last
    assert b"".join(handshake._session_keys(TOKEN, b"L" * 42, b"W" * 42)) == blocks


class Tap:
    """What one end sends, held back."""

    def __init__(self, signed: SignedWire) -> None:
        self.sent: list[bytes] = []
        self._wire = signed.wire
        signed.wire = self  # type: ignore[assignment]

    def send(self, data: bytes, limit_s: float) -> None:
        self.sent.append(bytes(data))

    def pass_on(self, data: bytes) -> None:
        self._wire.send(data, 5)


@pytest.mark.parametrize(
    "tamper",
    [
        pytest.param(lambda a, b: a + a, id="repeated"),
        pytest.param(lambda a, b: b + a, id="reordered"),
        pytest.param(lambda a, b: b, id="left out"),
        pytest.param(lambda a, b: a[:25] + bytes([a[25] ^ 1]) + a[26:], id="changed"),
        pytest.param(lambda a, b: b"\xff\xff\xff\x0f" + a[4:], id="length"),
        pytest.param(lambda a, b: a[:-1] + bytes([a[-1] ^ 1]), id="tag"),
    ],
)
def test_a_message_that_was_tampered_with_is_refused(pair, tamper) -> None:
    one, other = pair
    tap = Tap(one)
    one.send(b"first message", 5)
    one.send(b"other message", 5)
    tap.pass_on(tamper(*tap.sent))
    with pytest.raises(ForgedError, match="wrong signature"):
        other.receive(5)
        other.receive(5)


def test_a_message_cannot_be_sent_back_to_who_made_it(pair) -> None:
    one, other = pair
    tap = Tap(one)
    one.send(b"a message", 5)
    other.wire.send(tap.sent[0], 5)
    one.wire = tap._wire
    with pytest.raises(ForgedError, match="wrong signature"):
        one.receive(5)


def test_a_message_beyond_the_limit_is_neither_sent_nor_read(
    pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    one.send(b"x" * 100, 5)
    with pytest.raises(ForgedError, match="expected at most 64 bytes, found 100"):
        other.receive(5, most=64)
    monkeypatch.setattr(wires, "MAX_MESSAGE", 64)
    with pytest.raises(ValueError, match="expected at most 64 bytes, found 65"):
        one.send(b"x" * 65, 5)


def test_waits_end(pair) -> None:
    one, other = pair
    with pytest.raises(TimeoutError, match="sends nothing"):
        one.receive(0.05)
    with pytest.raises(TimeoutError, match="does not read"):
        one.send(bytes(50_000_000), 0.05)
    other.wire.close()
    with pytest.raises((EOFError, OSError)):
        one.receive(5)
    assert other.wire.peer == "a closed connection"


def test_the_right_one_gets_in_after_wrong_ones(listener: Listener) -> None:
    with pytest.raises(HandshakeError, match="refuses the token"):
        join(listener, b"a wrong token of 22 ch")
    for garbage in (b"GET / HTTP/1.1\r\nHost: me\r\n\r\n" + bytes(100), b"\x80\x04\x95" * 40, b""):
        stranger = socket.create_connection(listener.address)
        stranger.sendall(garbage)
        stranger.close()
    signed = join(listener)
    arrival = listener.accept(10)
    assert arrival is not None and arrival.hello == "hello"
    assert arrival.peer.startswith("127.0.0.1:")
    deadline = time.monotonic() + 10
    while len(listener.refused) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(listener.refused) == 4
    assert sum("wrong token" in why for why in listener.refused) == 1
    signed.wire.close()
    arrival.signed.wire.close()


def test_a_first_message_of_unknown_types_is_refused(listener: Listener) -> None:
    wire = Wire.connect(listener.address, 5)
    open_handshake(wire, TOKEN, 5).send(b"cos\nsystem\n", 5)
    with pytest.raises((EOFError, OSError)):
        wire.receive(1, 10)
    assert "not known on this host" in listener.refused[0] or "message:" in listener.refused[0]
    assert listener.accept(0) is None
    wire.close()


def test_strangers_are_few_and_have_little_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 1.0)
    strangers = [socket.create_connection(listener.address) for _ in range(MAX_STRANGERS)]
    for stranger in strangers:  # all are greeted: each holds a place
        stranger.settimeout(10)
        assert stranger.recv(8) == b"embedlm\0"
    late = socket.create_connection(listener.address)
    late.settimeout(10)
    assert late.recv(8) == b""  # one too many
    for stranger in strangers:  # each loses its place, though it sends a byte now and then
        stranger.sendall(b"e")
        while stranger.recv(100):
            pass
    join(listener).wire.close()
    arrival = listener.accept(10)
    assert arrival is not None
    arrival.signed.wire.close()
    for stranger in (*strangers, late):
        stranger.close()


def test_a_closed_listener_frees_its_port_and_everybody_who_waits() -> None:
    threads = threading.active_count()
    listener = Listener(Address("127.0.0.1", 0), TOKEN, NOTHING)
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
    assert errors == [f"{listener.address} no longer waits for workers"]
    stranger.settimeout(10)
    while stranger.recv(100):
        pass
    stranger.close()
    unused.wire.close()
    Listener(listener.address, TOKEN, NOTHING).close()
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
        Listener(address, TOKEN, NOTHING)


def test_a_taken_port_is_named(listener: Listener) -> None:
    with pytest.raises(EngineDeadError, match=f"{listener.address}: Address already in use"):
        Listener(listener.address, TOKEN, NOTHING)
