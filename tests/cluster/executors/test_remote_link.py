"""The control connection, and ranks that say something else than they should."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from sdk.api.errors import EngineDeadError
from sdk.api.remote_workers import Address
from sdk.cluster.executors.children import ChildLost
from sdk.cluster.executors.remote import link as links
from sdk.cluster.executors.remote.engine_codec import engine_codec
from sdk.cluster.executors.remote.link import Link, LinkLost
from sdk.cluster.executors.remote.ranks import RemoteRank, accept_peers
from sdk.cluster.executors.remote.serve import (
    WorkerOptions,
    WorkerParts,
    localized,
    serve_engines,
)
from sdk.cluster.wire.listener import MAX_STRANGERS, Listener
from sdk.cluster.wire.stream import LENGTH, Stream
from sdk.cluster.wire.tls import _PIECE, SecureStream
from sdk.engine.rank.runner_config import RunnerConfig

CODEC = engine_codec()


@pytest.fixture
def ends(remote: ModuleType) -> Iterator[tuple[SecureStream, SecureStream]]:
    with remote.connected() as ends:
        yield ends


def test_messages_arrive_in_order_and_a_goodbye_after_them(ends) -> None:
    lost: list[int] = []
    one = Link(ends[0], "one", lambda: lost.append(1))
    other = Link(ends[1], "other", lambda: lost.append(2))
    for message in (b"first", b"", b"x" * 3_000_000):
        one.send(message, 30)
    one.close()
    one.close()
    assert [bytes(other.receive(30) or b"") for _ in range(2)] == [b"first", b""]
    assert len(other.receive(30) or b"") == 3_000_000
    with pytest.raises(LinkLost, match=r"^it has ended$"):
        other.receive(30)
    assert other.lost == "it has ended"
    with pytest.raises(LinkLost, match="it has ended"):
        other.send(bytes(50_000_000), 5)
    other.close()
    assert sorted(lost) == [1, 2]


def test_what_was_sent_before_the_end_arrives_although_the_other_end_still_sends(ends) -> None:
    link, other = Link(ends[0], "one", int), ends[1]

    def send_and_close() -> None:
        link.send(bytes(20_000_000), 30)  # the last of it is still in this end's buffers
        link.close()

    sending = threading.Thread(target=send_and_close)
    sending.start()
    kinds = []
    while b"e" not in kinds:
        with contextlib.suppress(BlockingIOError):
            for message in other.read_frames():
                kinds.append(bytes(message[:1]))
                assert len(message) == (20_000_001 if kinds[-1] == b"m" else 1)
        other.send_frame(b"b", limit_s=30)
    assert kinds.count(b"m") == 1
    other.close()
    sending.join(30)
    assert not sending.is_alive() and link.lost is not None


def test_a_link_without_a_message_waits_only_so_long_and_stays(ends) -> None:
    one, other = Link(ends[0], "one", int), Link(ends[1], "other", int)
    assert one.receive(0.01) is None and not one.wait_closed(1.2)  # beats are not messages
    assert one.lost is None and other.lost is None
    one.close()
    other.close()


def test_an_end_that_is_silent_is_lost(ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_TICK_S", 0.02)
    link = Link(ends[0], "one", int)
    assert link.wait_closed(30)
    assert link.lost == "no sign of life for 4 s"
    link.close()


def test_an_end_that_receives_a_large_message_slowly_says_meanwhile_that_it_is_alive(
    ends, eventually: Callable[[Callable[[], bool]], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_TICK_S", 0.02)
    monkeypatch.setattr(links, "_SILENT_TICKS", 1_000_000)  # this end may be slow
    link, sender = Link(ends[0], "one", int), ends[1]
    sender.queue(LENGTH.pack(20 * _PIECE + 1) + b"m" + bytes(20 * _PIECE))

    def beats() -> bool:
        with contextlib.suppress(BlockingIOError):
            return b"b" in sender.read_frames()
        return False

    while sender._queued:
        while beats():
            pass
        sender._encrypted.append(sender._encrypt())
        sender._send_encrypted(time.monotonic() + 30)
        assert eventually(beats)
    assert len(link.receive(30) or b"") == 20 * _PIECE
    link.close()


def test_a_message_of_somebody_else_ends_the_link(ends) -> None:
    link = Link(ends[0], "one", int)
    ends[1].socket.sendall(b"\x17\x03\x03\0\x40" + bytes(64))  # a record that nobody encrypted
    assert link.wait_closed(30)
    assert link.lost is not None and "BAD_RECORD_MAC" in link.lost
    link.close()


@pytest.mark.parametrize("message", [b"?", CODEC.encode(7), CODEC.encode(())])
def test_a_worker_that_says_something_else_is_lost(ends, message: bytes) -> None:
    one, other = Link(ends[0], "one", int), Link(ends[1], "other", int)
    rank = RemoteRank(one, CODEC, "a host", None)
    other.send(message, 5)
    with pytest.raises(ChildLost, match=r"rank 0 on a host: (expected a message|message: )"):
        rank.expect("done", 30)
    one.close()
    other.close()


def test_peers_that_do_not_come_are_named_and_those_of_another_engine_sent_away(
    remote: ModuleType,
) -> None:
    listener = Listener(Address("127.0.0.1", 0), remote.shared(), CODEC.decode)
    stranger = remote.shared().connect(listener.address, 5)
    stranger.send_frame(CODEC.encode(("tensors", b"another engine", 1)), limit_s=5)
    found: dict[int, Stream] = {}
    with pytest.raises(EngineDeadError, match=r"rank 1, 2: no connection for tensors within 1 s"):
        accept_peers(listener, found, {1, 2}, b"this engine", 1.0, int)
    assert found == {}
    with pytest.raises((EOFError, OSError)):
        stranger.receive(1, 5)
    stranger.close()
    listener.close()


@pytest.fixture
def worker_of(remote: ModuleType) -> Iterator[Callable[..., list[str]]]:
    """``worker_of(*messages)``: what a worker in a thread raises when rank 0 says these."""
    token = remote.TOKEN.encode()

    def run(*messages: object) -> list[str]:
        listener = Listener(Address("127.0.0.1", 0), remote.shared(), CODEC.decode)
        errors: list[str] = []

        def work() -> None:
            parts = WorkerParts(CODEC, lambda config, mesh: None, lambda config, options: config)
            options = WorkerOptions("", listener.address, token, 1)
            try:
                serve_engines(options, once=True, parts=parts)
            except EngineDeadError as error:
                errors.append(str(error))

        working = threading.Thread(target=work)
        working.start()
        arrival = listener.accept(30)
        assert arrival is not None and arrival.hello[0] == "control"
        link = Link(arrival.stream, "worker", int)
        for message in messages:
            link.send(CODEC.encode(message), 5)
        working.join(30)
        link.close()
        listener.close()
        return errors

    threads = threading.active_count()
    yield run
    deadline = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == threads


def test_a_worker_names_what_rank_0_should_not_have_said(
    worker_of: Callable[..., list[str]], remote: ModuleType
) -> None:
    assert worker_of(None) == []
    assert "expected a start, found ('ready',)" in worker_of(("ready",))[0]
    start = ("start", 2, 3, b"session", 1.0, None)
    assert "expected addresses, found None" in worker_of(start, None)[0]
    assert "refuses this worker: you" in worker_of(start, ("refused", "you"))[0]
    port = remote.free_port()
    addresses = [None, ("127.0.0.1", port)]
    (why,) = worker_of(start, ("connect", [*addresses, None]))
    assert f"rank 1 at 127.0.0.1:{port}: " in why and "refused" in why


def test_a_worker_tries_again_while_strangers_have_all_places_of_a_lower_rank(
    remote: ModuleType, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    token, here = remote.TOKEN.encode(), Address("127.0.0.1", 0)
    first, second = (Listener(here, remote.shared(), CODEC.decode) for _ in range(2))
    strangers = [socket.create_connection(second.address) for _ in range(MAX_STRANGERS)]
    assert eventually(lambda: len(second._strangers) == MAX_STRANGERS)
    options = WorkerOptions("", first.address, token, 1)
    parts = WorkerParts(CODEC, lambda config, mesh: None, lambda config, options: config)

    def work() -> None:
        with contextlib.suppress(EngineDeadError):
            serve_engines(options, once=True, parts=parts)

    working = threading.Thread(target=work)
    working.start()
    arrival = first.accept(30)
    assert arrival is not None
    link = Link(arrival.stream, "worker", int)
    link.send(CODEC.encode(("start", 2, 3, b"session", 30.0, None)), 5)
    link.send(CODEC.encode(("connect", [None, tuple(second.address), None])), 5)
    found = [first.accept(30), second.accept(0.5)]
    assert found[1] is None
    for stranger in strangers:
        stranger.close()
    found[1] = second.accept(10)
    link.close()
    working.join(30)
    assert [one and one.hello for one in found] == [("tensors", b"session", 2)] * 2
    for one in found:
        assert one is not None
        one.stream.close()
    first.close()
    second.close()


def test_a_worker_takes_no_other_config_and_only_its_own_files() -> None:
    options = WorkerOptions("/here/model.gguf", Address("a", 1), b"", 3)
    with pytest.raises(EngineDeadError, match="rank 0 sent a dict instead of a config"):
        localized({}, options)
    sent = RunnerConfig(
        *("/there/model.gguf", 17, 16, "float16", 128, 8, 128, 2),
        swap_path="/there",
        disk_folder="/there",
    )
    own = localized(sent, options)
    assert (own.model, own.num_threads) == ("/here/model.gguf", 3)
    assert own.swap_path is None and own.disk_folder == ""
