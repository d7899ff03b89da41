from __future__ import annotations

import socket
import threading

import pytest

from sdk.cluster.executors import channel as channels
from sdk.cluster.executors.channel import Channel, pack


def test_messages_arrive_whole_and_in_order() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
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
    theirs.close()


def test_a_message_beyond_the_limit_is_neither_sent_nor_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    ours.send(pack("x" * 100))
    monkeypatch.setattr(channels, "MAX_MESSAGE", 64)
    with pytest.raises(ValueError, match="expected at most 64 bytes, found"):
        pack("x" * 100)
    with pytest.raises(ValueError, match="expected at most 64 bytes, found"):
        theirs.receive()
    ours.close()
    theirs.close()


def test_a_side_that_does_not_read_does_not_block_the_other_for_ever() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    with pytest.raises(TimeoutError):
        ours.send(pack("x" * 10_000_000), 0.1)
    ours.close()
    theirs.close()
