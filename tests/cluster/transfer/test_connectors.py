"""Connections: who may use them, what they refuse, and that they can be closed at any time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from sdk import RequestError
from sdk.api.errors import TransferError
from sdk.api.remote_workers import parse_address
from sdk.cluster.transfer import (
    KVConnector,
    KVListener,
    SharedMemoryConnector,
    SharedMemoryListener,
    TcpConnector,
    TcpListener,
    shared_memory as ours,
)
from sdk.cluster.transfer.connector import End, Part, Receiving, Sending
from sdk.cluster.transfer.messages import HEADER_BYTES, Kind, pack_count, pack_header
from sdk.cluster.transfer.shared_memory import accepted
from sdk.cluster.wire.listener import MAX_STRANGERS
from sdk.cluster.wire.tls import HandshakeError, SharedToken
from sdk.engine.rank.kv_transfer import row_widths
from sdk.kernels.system import SYSTEM
from sdk.quant.spec import KVSpec
from tests.cluster.transfer.pairs import CONNECTORS, LIMIT, TOKEN
from tests.cluster.transfer.test_messages import OFFER, SPEC

Connect = Callable[[], tuple[KVConnector, KVListener]]


def _open(connector: KVConnector, listener: KVListener) -> tuple[Sending, Receiving]:
    """Both ends of a hand-over of 12 tokens, of which 4 are known."""
    found: list[Receiving] = []

    def serve() -> None:
        receiving = listener.accept()
        assert receiving is not None and receiving.offer() == OFFER
        receiving.accept(4, 4, 1 << 20)
        found.append(receiving)

    thread = threading.Thread(target=serve)
    thread.start()
    sending = connector.open(OFFER, listener.address)
    thread.join(LIMIT)
    return sending, found[0]


@pytest.fixture(params=CONNECTORS)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Sending, Receiving]]:
    connector, listener = CONNECTORS[request.param](timeout=5)
    sending, receiving = _open(connector, listener)
    yield sending, receiving
    for one in (sending, receiving, listener, connector):
        one.close()
        one.close()


def _rows(seed: int) -> np.ndarray:
    shape = 4, 2, sum(row_widths(SPEC, 0))
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_what_is_sent_arrives(ends: tuple[Sending, Receiving]) -> None:
    sending, receiving = ends
    assert (sending.num_known, sending.unit) == (4, 4)
    rows = [_rows(0), _rows(1)]
    sending.keep_alive()
    for layer in range(2):
        sending.send(Part(layer, 4, rows[layer], bytes([layer]) * 32))
    expected = [layer.copy() for layer in rows]
    rows[0][:] = 0  # it may be changed now
    for layer in range(2):
        part = receiving.receive()
        assert isinstance(part, Part) and part[:2] == (layer, 4)
        assert (part.rows == expected[layer]).all() and part.digest == bytes([layer]) * 32
    receiving.release()
    done = threading.Thread(target=lambda: receiving.done(8))
    done.start()
    assert sending.finish(8) == 8
    assert receiving.receive() == End(8)
    done.join()


def test_a_call_that_waits_ends_when_its_side_is_closed(ends: tuple[Sending, Receiving]) -> None:
    for one, wait in ((ends[1], ends[1].receive), (ends[0], lambda: ends[0].finish(4))):
        failed: list[str] = []

        def attempt(wait: Callable[[], object] = wait, failed: list[str] = failed) -> None:
            with pytest.raises(TransferError) as error:
                wait()
            failed.append(str(error.value))

        thread = threading.Thread(target=attempt)
        thread.start()
        time.sleep(0.05)
        one.close()
        thread.join(LIMIT)
        assert failed


@pytest.mark.parametrize("connect", CONNECTORS.values(), ids=CONNECTORS)
def test_a_closed_connector_opens_nothing_and_a_closed_listener_ends(connect: Connect) -> None:
    connector, listener = connect()
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(listener.accept()))
    thread.start()
    time.sleep(0.05)
    connector.close()
    with pytest.raises(TransferError, match="the connector was closed"):
        connector.open(OFFER, listener.address)
    thread.join(0.5)
    listener.close()
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_a_ring_is_used_again_and_again_and_what_is_too_large_for_it_is_refused() -> None:
    connector, listener = SharedMemoryConnector(ring_bytes=1 << 20), SharedMemoryListener()
    sending, receiving = _open(connector, listener)
    assert sending.most_bytes == 1 << 19
    spec, width = SPEC, sum(row_widths(SPEC, 0))
    tokens = (400 << 10) // (2 * width) // 4 * 4  # parts of nearly 400 KiB
    count = 20

    def receive() -> None:
        for index in range(count):
            part = receiving.receive()
            assert isinstance(part, Part) and (part.rows == index).all()
            receiving.release()

    thread = threading.Thread(target=receive)
    thread.start()
    for index in range(count):
        rows = np.full((tokens, spec.kv_heads, width), index, dtype=np.uint8)
        sending.send(Part(0, 4, rows, bytes(32)))
    thread.join(LIMIT)
    assert not thread.is_alive()
    with pytest.raises(TransferError, match=r"ring_bytes: a part of .* needs a ring of"):
        sending.send(Part(0, 4, np.zeros((tokens * 2, 2, width), dtype=np.uint8), bytes(32)))
    for one in (sending, receiving, listener, connector):
        one.close()


def test_pages_that_are_too_large_for_a_ring_are_refused_at_once() -> None:
    """Half of the ring is enough for a group, a byte less is not."""
    spec = KVSpec(2, 2, 8, 4, "float32")
    page = spec.page_bytes
    assert page == 2 * 2 * 4 * 2 * 8 * 4
    tokens = (1 << 19) // page * spec.page_size
    for unit, fits in ((tokens, True), (tokens + spec.page_size, False)):
        offer = replace(OFFER, spec=spec, token_ids=(1,) * 2 * unit)
        connector, listener = SharedMemoryConnector(ring_bytes=1 << 20), SharedMemoryListener()
        thread = threading.Thread(target=_accept, args=(listener, unit))
        thread.start()
        try:
            if fits:
                connector.open(offer, listener.address).close()
            else:
                size = (1 << 19) + page
                words = f"a group of {unit} tokens of {size} bytes needs a ring of {2 * size}"
                with pytest.raises(TransferError, match=f"ring_bytes: {words}, found 1048576"):
                    connector.open(offer, listener.address)
        finally:
            thread.join(LIMIT)
            listener.close()
            connector.close()


def _accept(listener: KVListener, unit: int) -> None:
    """Accept a hand-over that the sender closes."""
    receiving = listener.accept()
    assert receiving is not None
    with closing(receiving):
        receiving.offer()
        receiving.accept(0, unit, 1 << 30)
        with pytest.raises(TransferError):
            receiving.receive()


def test_a_ring_may_be_closed_just_before_a_payload_is_written_or_read() -> None:
    """By another thread, which stands for ``close`` in the calls that come before."""
    connector, listener = SharedMemoryConnector(timeout=2), SharedMemoryListener(timeout=2)
    sending, receiving = _open(connector, listener)
    sending.send(Part(0, 4, _rows(0), bytes(32)))
    sender, receiver = sending._stream, receiving._stream
    place, read = sender._place, receiver.read

    def place_and_close(count: int) -> int:
        found = place(count)
        sender.close()
        return found

    def read_and_close(size: int, ends: float) -> memoryview:
        found = read(size, ends)
        if size != HEADER_BYTES:  # the head; the payload is next
            receiver.close()
        return found

    sender._place, receiver.read = place_and_close, read_and_close
    with pytest.raises(TransferError, match="the connection was closed"):
        sending.send(Part(1, 4, _rows(1), bytes(32)))
    with pytest.raises(TransferError, match="the connection was closed"):
        receiving.receive()
    listener.close()
    connector.close()


def test_a_receiver_that_frees_what_was_not_sent_is_left() -> None:
    connector, listener = SharedMemoryConnector(timeout=2), SharedMemoryListener(timeout=2)
    sending, receiving = _open(connector, listener)
    receiving._stream.send(Kind.FREE, pack_count(1 << 40))
    with pytest.raises(TransferError, match="the receiver freed byte 1099511627776"):
        sending.send(Part(0, 4, _rows(0), bytes(32)))
    for one in (sending, receiving, listener, connector):
        one.close()


def test_a_payload_outside_of_the_ring_is_refused() -> None:
    connector, listener = SharedMemoryConnector(timeout=2), SharedMemoryListener(timeout=2)
    sending, receiving = _open(connector, listener)
    size = 32 << 20
    for position in (size - 1, 0):
        sending._stream.send_bytes(pack_header(Kind.END, b"", b"12", position))
        with pytest.raises(TransferError, match="does not fit into a ring"):
            receiving.receive()
    for one in (sending, receiving, listener, connector):
        one.close()


@pytest.mark.parametrize("connect", CONNECTORS.values(), ids=CONNECTORS)
def test_an_answer_of_another_kind_ends_an_offer(connect: Connect) -> None:
    connector, listener = connect()

    def serve() -> None:
        receiving = listener.accept()
        assert receiving is not None
        with closing(receiving):
            receiving.offer()
            receiving.done(4)
            with pytest.raises(TransferError):
                receiving.receive()  # the sender leaves

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(TransferError, match=r"expected a frame .*ACCEPT, found DONE"):
        connector.open(OFFER, listener.address)
    thread.join(LIMIT)
    assert not thread.is_alive()
    listener.close()


def test_a_part_that_is_larger_than_a_group_takes_no_memory(
    ends: tuple[Sending, Receiving],
) -> None:
    sending, receiving = ends
    sending._stream.send_bytes(pack_header(Kind.PART, bytes(48), bytes((1 << 20) + 1)))
    with pytest.raises(TransferError, match="a PART frame with 1048577 bytes; expected at most"):
        receiving.receive()


def test_a_connection_that_is_lost_before_memory_is_passed() -> None:
    for ring in (ours._SenderRing, ours._ReceiverRing):
        left, right = socket.socketpair()
        made = ring(left, 1.0, 1 << 20) if ring is ours._SenderRing else ring(left, 1.0)
        right.close()
        if ring is ours._ReceiverRing:
            left.close()
        with pytest.raises(TransferError, match="the connection is lost"):
            made.handshake()
        made.close()


def test_memory_that_cannot_be_mapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    file = _memory(1 << 20)
    monkeypatch.setattr(ours.mmap, "mmap", fails)
    data = ours._HELLO.pack(ours._MAGIC, 1 << 20)
    listener = SharedMemoryListener(timeout=2)
    assert "cannot be mapped" in _said(listener, lambda sock: socket.send_fds(sock, [data], [file]))
    os.close(file)


def test_an_address_that_is_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = SharedMemoryListener()
    taken = listener.address.removeprefix("embedlm-kv-")
    monkeypatch.setattr(ours.secrets, "token_hex", lambda count: taken)
    with pytest.raises(TransferError, match="cannot listen at a Unix socket"):
        SharedMemoryListener()
    listener.close()


def _said(listener: SharedMemoryListener, say: Callable[[socket.socket], object]) -> str:
    """What a receiver finds wrong with a sender that does this."""
    receiving: list[Receiving | None] = []
    thread = threading.Thread(target=lambda: receiving.append(listener.accept()))
    thread.start()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("\0" + listener.address)
        say(sock)
        thread.join(LIMIT)
        assert receiving[0] is not None
        with closing(receiving[0]) as one, pytest.raises(TransferError) as error:
            one.offer()
    listener.close()
    return str(error.value)


def _memory(size: int, *, sealed: bool = True) -> int:
    if sealed:
        return SYSTEM.sealed_memory(size)
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    return file


@pytest.mark.parametrize(
    ("size", "told", "sealed", "message"),
    [
        (1 << 20, 1 << 21, True, "expected a ring of 2097152 bytes, found 1048576"),
        (4096, 4096, True, "expected a ring of 4096 bytes"),
        (1 << 20, 1 << 20, False, "is not sealed"),
    ],
)
def test_memory_that_could_harm_the_receiver_is_refused(
    size: int, told: int, sealed: bool, message: str
) -> None:
    file = _memory(size, sealed=sealed)
    data = ours._HELLO.pack(ours._MAGIC, told)
    listener = SharedMemoryListener(timeout=2)
    assert message in _said(listener, lambda sock: socket.send_fds(sock, [data], [file]))
    os.close(file)


def test_a_file_or_nothing_instead_of_memory_is_refused(tmp_path: object) -> None:
    data = ours._HELLO.pack(ours._MAGIC, 1 << 20)
    with open(f"{tmp_path}/file", "wb") as file:
        listener = SharedMemoryListener(timeout=2)
        found = _said(listener, lambda sock: socket.send_fds(sock, [data], [file.fileno()]))
        assert "expected a memory file" in found or "is not sealed" in found
    listener = SharedMemoryListener(timeout=2)
    assert "expected shared memory" in _said(listener, lambda sock: sock.sendall(data))


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours.os, "getuid", lambda: 12345)
    listener = SharedMemoryListener(timeout=2)
    assert "expected 12345" in _said(listener, lambda sock: None)


def test_whoever_does_not_know_the_token_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdk.cluster.wire.listener.HANDSHAKE_S", 0.2)
    listener = TcpListener(TOKEN)
    host, _, port = listener.address.rpartition(":")
    for count, (say, expected) in enumerate(
        [
            (lambda sock: sock.sendall(bytes(64)), "it is not embedlm"),
            (lambda sock: None, "sends nothing"),
            (lambda sock: sock.shutdown(socket.SHUT_WR), "has closed"),
        ],
        1,
    ):
        with socket.create_connection((host, int(port))) as sock:
            say(sock)
            while sock.recv(100):
                pass
        ends = time.monotonic() + LIMIT
        while len(refused := listener._listener.refused) < count and time.monotonic() < ends:
            time.sleep(0.01)
        assert len(refused) == count and expected in refused[-1]
    assert not listener._listener._arrived
    listener.close()


def test_a_token_of_ranks_does_not_connect_hand_overs() -> None:
    listener = TcpListener(TOKEN)
    ranks = SharedToken(TOKEN.encode(), "embedlm-ranks/5")
    with pytest.raises(HandshakeError, match="serves something else with the same token"):
        ranks.connect(parse_address(listener.address, "address"), 5)
    listener.close()


def test_a_sender_tries_again_while_strangers_have_all_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sdk.cluster.wire.listener.HANDSHAKE_S", 1.0)
    connector, listener = TcpConnector(TOKEN), TcpListener(TOKEN)
    host, _, port = listener.address.rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(MAX_STRANGERS)]
    sending, receiving = _open(connector, listener)
    for one in (*strangers, sending, receiving, listener, connector):
        one.close()


def test_a_receiver_that_does_not_know_the_token_gets_nothing() -> None:
    listener = TcpListener("another token of the tests")
    with pytest.raises(TransferError, match=rf"{listener.address}: it has another token"):
        TcpConnector(TOKEN).open(OFFER, listener.address)
    listener.close()


def test_another_program_at_the_address_gets_nothing() -> None:
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(32))
                while data := sock.recv(1 << 16):
                    heard.append(data)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(TransferError, match="not embedlm"):
            TcpConnector(TOKEN).open(OFFER, f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert OFFER.transfer_id.encode() + b'"' not in b"".join(heard)


@pytest.mark.parametrize(
    "destination", ["", "here", "host:", "host:0", "host:99999", "host:x", ":80"]
)
def test_a_destination_is_a_host_and_a_port(destination: str) -> None:
    with pytest.raises(TransferError, match="expected host:port"):
        TcpConnector(TOKEN).open(OFFER, destination)


def test_options_must_make_sense() -> None:
    with pytest.raises(RequestError, match="token: expected at least 16 characters"):
        TcpListener("short")
    for timeout in (0, -1, "1", float("nan")):
        with pytest.raises(RequestError, match="timeout: expected 0 to 86400 seconds"):
            TcpConnector(TOKEN, timeout=timeout)
    with pytest.raises(RequestError, match="ring_bytes: expected"):
        SharedMemoryConnector(ring_bytes=5)
    with pytest.raises(TransferError, match=r"cannot listen at nowhere\.invalid:1"):
        TcpListener(TOKEN, "nowhere.invalid", 1)


def test_an_address_of_ipv6_can_be_used() -> None:
    try:
        listener = TcpListener(TOKEN, "::1")
    except TransferError as error:  # this machine has no IPv6
        assert "cannot listen at ::1:0" in str(error)
        return
    connector = TcpConnector(TOKEN)
    sending, receiving = _open(connector, listener)
    for one in (sending, receiving, listener, connector):
        one.close()


def test_a_listener_waits_for_descriptors_that_others_hold() -> None:
    class Busy(socket.socket):
        attempts = 0

        def accept(self) -> tuple[socket.socket, object]:
            Busy.attempts += 1
            if Busy.attempts == 1:
                raise ConnectionAbortedError("gone")
            if Busy.attempts == 2:
                raise OSError(24, "Too many open files")
            return super().accept()

    with Busy() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with socket.create_connection(listening.getsockname()):
            found = accepted(listening)
            assert found is not None and Busy.attempts == 3
            found.close()
