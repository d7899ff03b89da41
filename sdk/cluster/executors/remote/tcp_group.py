"""Sums and gathers between ranks on different hosts, over encrypted TCP connections.

Every rank sends its tensor to all others and adds what it gets in rank order, so all ranks have
the same bits, which are those of ranks that share memory. A payload is a frame whose length must be
that of this rank's own. TLS finds a changed, repeated or missing payload, which ends the group.

All connections are read and written at the same time, because two ranks that only send large
tensors to each other would wait for ever.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.cluster.wire.stream import LENGTH, Stream
from sdk.kernels.errors import CollectiveError


class TcpGroup:
    """A :class:`sdk.kernels.groups.CollectiveGroup`, one rank of it.

    :param peers: the connections to all other ranks, by rank.
    :param limit_s: seconds that one collective may wait for another rank.
    """

    def __init__(self, rank: int, peers: Mapping[int, Stream], limit_s: float) -> None:
        self._rank, self._limit_s = rank, limit_s
        self._peers = [_Peer(other, peers[other]) for other in sorted(peers)]
        self._closed = False
        self._exchanging = threading.Lock()

    def all_reduce(self, x: Tensor) -> None:
        """See :class:`sdk.kernels.groups.CollectiveGroup`."""
        # numpy adds in this thread. From 32,768 values on torch would share the work with its
        # threads, which spin: a 500-token prompt took 11 to 14 s on two busy cores, now 2 to 3.5 s.
        given = x.detach().numpy()
        own = given if given.flags.c_contiguous else given.copy()
        if not own.size:
            return
        with self._exchanging:
            parts = {peer.rank: peer.array_like(own) for peer in self._peers}
            parts[self._rank] = own
            self._exchange({rank: part.data.cast("B") for rank, part in parts.items()})
            total, *others = (parts[rank] for rank in sorted(parts))
            for other in others:
                total = np.add(total, other, out=own if other is own else total)
        if own is not given:
            np.copyto(given, own)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See :class:`sdk.kernels.groups.CollectiveGroup`."""
        own = x.contiguous()
        if own.numel() == 1:  # may have any stride, and be no bytes then
            own = own.clone(memory_format=torch.contiguous_format)
        parts = {self._rank: own}
        if own.numel():
            parts |= {peer.rank: torch.empty_like(own) for peer in self._peers}
            with self._exchanging:
                self._exchange({rank: _bytes_of(part) for rank, part in parts.items()})
        else:
            parts |= {peer.rank: torch.empty_like(own) for peer in self._peers}
        return [parts[rank] for rank in sorted(parts)]

    def _exchange(self, parts: Mapping[int, memoryview]) -> None:
        """Send this rank's part to all others, and fill their parts with what they send.

        If it ends early, there is no other one, which would read what is left of this one.
        """
        try:
            for peer in self._peers:
                peer.begin(parts[self._rank], parts[peer.rank])
            self._wait_for(self._peers)
        except BaseException:
            self._closed = True
            raise

    def _wait_for(self, busy: list[_Peer]) -> None:
        deadline = time.monotonic() + self._limit_s
        while busy := [peer for peer in busy if not self._advance(peer)]:
            poller = select.poll()
            for peer in busy:
                poller.register(peer.stream.socket, peer.events)
            if not poller.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                raise CollectiveError(f"rank {busy[0].rank}: nothing within {self._limit_s:g} s")

    def _advance(self, peer: _Peer) -> bool:
        if self._closed:
            raise CollectiveError("the group was closed")
        try:
            return peer.advance()
        except (OSError, EOFError) as error:
            raise CollectiveError(f"rank {peer.rank}: {error}") from error

    def give_up(self) -> None:
        """Let all exchanges fail, here and on the other ranks; from any thread."""
        self._closed = True
        for peer in self._peers:
            peer.stream.shut()

    def close(self) -> None:
        """Close the connections; an exchange in another thread fails first. Idempotent."""
        self.give_up()
        with self._exchanging:
            for peer in self._peers:
                peer.stream.close()

    def abandon(self) -> None:
        """For a forked child, in which the group does nothing."""


class _Peer:
    """One connection, and what is still to be sent and received in this exchange."""

    def __init__(self, rank: int, stream: Stream) -> None:
        self.rank, self.stream = rank, stream
        self._header = memoryview(bytearray(LENGTH.size))
        #: What is still to be filled: the header first.
        self._into: list[memoryview] = []
        self._expected = b""
        self._memory = bytearray()

    def array_like(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Memory for this rank's x; the next call uses the same."""
        if len(self._memory) < x.nbytes:
            self._memory = bytearray(x.nbytes)
        return np.frombuffer(self._memory, x.dtype, x.size).reshape(x.shape)

    def begin(self, data: memoryview, target: memoryview) -> None:
        self._expected = LENGTH.pack(len(data))  # may be more than a message has
        self.stream.queue(self._expected, data)
        self._into = [self._header, target]

    @property
    def events(self) -> int:
        out = select.POLLOUT if self.stream.has_queued else 0
        return out | (select.POLLIN if self._into else 0)

    def advance(self) -> bool:
        """Send and receive what is possible now; whether all is done."""
        sent = self.stream.flush()
        try:
            while self._into:
                first = self._into[0]
                left = first[self.stream.read_into(first) :]
                self._into = [left, *self._into[1:]] if left else self._into[1:]
                if len(self._into) == 1 and self._header != self._expected:
                    raise OSError(
                        f"expected a tensor of {LENGTH.unpack(self._expected)[0]} bytes, found "
                        f"{LENGTH.unpack(self._header)[0]}: the ranks are not in the same step"
                    )
        except BlockingIOError:
            pass
        return sent and not self._into


def _bytes_of(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return x.detach().view(-1).view(torch.uint8).numpy().data
