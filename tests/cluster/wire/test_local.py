"""Pickled messages over a socket pair: waiting for them, and in a loop that never waits."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from sdk.cluster.wire import stream as streams
from sdk.cluster.wire.local import Channel, pack
from sdk.cluster.wire.stream import LENGTH, FrameError


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    messages = [("a", 1), None, "x" * 1_000_000]
    sender = threading.Thread(target=lambda: [ours.send(pack(m)) for m in messages])
    sender.start()
    assert [theirs.receive() for _ in messages] == messages
    sender.join()
    assert not theirs.readable(0)
    ours.close()
    assert theirs.readable(0)
    with pytest.raises(EOFError, match="has closed"):
        theirs.receive()


def test_a_message_that_was_read_ahead_counts_as_readable(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    for number in range(3):
        ours.send(pack(number))
    assert theirs.receive() == 0  # one read took all three
    assert theirs.readable(0) and theirs.receive() == 1
    ours.close()
    assert theirs.receive() == 2


def test_a_loop_sends_what_the_socket_takes_and_reads_what_has_come(
    ends: tuple[Channel, Channel],
) -> None:
    ours, theirs = ends
    assert theirs.read() == []
    messages = [("first",), b"x" * 3_000_000, *range(200)]
    for message in messages:
        ours.stream.queue(pack(message))
    assert ours.stream.has_queued and not ours.stream.flush()  # the buffers are smaller
    found: list[object] = []
    while len(found) < len(messages):
        ours.stream.flush()
        found += theirs.read()
    assert found == messages and not ours.stream.has_queued
    ours.send(pack("last"))
    ours.close()
    assert theirs.read() == ["last"]  # the end comes after it
    with pytest.raises(EOFError, match="has closed"):
        theirs.read()


@pytest.mark.parametrize("how", ["receive", "read"])
def test_a_message_beyond_the_limit_is_neither_sent_nor_read(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ours, theirs = ends
    ours.stream.send(LENGTH.pack(streams.MAX_FRAME + 1))
    with pytest.raises(FrameError, match=r"expected at most \d+ bytes, found"):
        getattr(theirs, how)()
    monkeypatch.setattr(streams, "MAX_FRAME", 64)
    with pytest.raises(ValueError, match="expected at most 64 bytes, found"):
        pack("x" * 100)


def test_a_side_that_neither_reads_nor_sends_does_not_block_the_other_for_ever(
    ends: tuple[Channel, Channel],
) -> None:
    ours, theirs = ends
    with pytest.raises(TimeoutError, match="does not read"):
        ours.send(pack("x" * 10_000_000), 0.1)
    with pytest.raises(TimeoutError, match="sends nothing"):
        ours.receive(0.05)
    ours.close()
    with pytest.raises(EOFError):  # in the middle of the message
        theirs.receive()


def test_a_forked_child_forgets_a_channel_that_its_parent_goes_on_using(
    ends: tuple[Channel, Channel],
) -> None:
    ours, theirs = ends
    pid = os.fork()
    if pid == 0:
        ours.forget()
        os._exit(0)
    os.waitpid(pid, 0)
    ours.send(pack("still here"))
    assert theirs.receive(30) == "still here"


def test_closing_ends_a_channel_of_which_a_forked_child_has_a_copy(
    ends: tuple[Channel, Channel],
) -> None:
    ours, theirs = ends
    copy = ours.socket.dup()
    ours.close()
    assert theirs.stream.wait(select.POLLIN, 30)
    with pytest.raises(EOFError):
        theirs.receive()
    copy.close()
