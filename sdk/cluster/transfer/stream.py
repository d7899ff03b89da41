"""Hand-overs over a connected socket: frames in both directions. TCP uses it as it is; shared
memory overrides where payloads lie.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from sdk.api.errors import RequestError, TransferError
from sdk.cluster.transfer.connector import End, Offer, Part
from sdk.cluster.transfer.messages import (
    HEADER_BYTES,
    Bytes,
    Frame,
    Header,
    Kind,
    pack_accept,
    pack_count,
    pack_header,
    pack_offer,
    pack_part,
    pack_reason,
    read_accept,
    read_count,
    read_header,
    read_next,
    read_offer,
    read_reason,
)
from sdk.cluster.wire.stream import Stream
from sdk.quant.safe_repr import safe_repr

#: Bytes of the tokens of an offer: 4 million tokens, which take 150 MB as Python integers.
_MOST_OFFER = 1 << 24


def checked_seconds(timeout: float) -> float:
    """:raises RequestError: not a valid duration."""
    if not isinstance(timeout, int | float) or not 0 < timeout <= 86400:
        raise RequestError(f"timeout: expected 0 to 86400 seconds, found {safe_repr(timeout)}")
    return float(timeout)


class FrameStream:
    """One end of a connection. A frame must be sent or received within ``timeout`` seconds.

    Raises only TransferError, also after ``close`` in another thread.
    """

    #: Payloads have checksums. Through TLS they need none.
    with_crc = True

    def __init__(self, stream: Stream, timeout: float) -> None:
        self._stream = stream
        self._timeout = timeout
        #: Of a frame that is received. Above it no memory is taken.
        self.most_payload = _MOST_OFFER

    def handshake(self) -> None:
        """What comes before the first frame."""

    def send(self, kind: Kind, head: Bytes = b"", payload: Bytes = b"") -> None:
        """Send one frame; ``payload`` may be changed afterwards."""
        header = pack_header(kind, head, payload, with_crc=self.with_crc)
        self.send_bytes(header + bytes(head), payload)

    def receive(self) -> Frame:
        """The next frame, checked. The payload is valid until :meth:`release`."""
        ends = time.monotonic() + self._timeout
        header = read_header(self.read(HEADER_BYTES, ends))
        if header.payload_bytes > self.most_payload:
            raise TransferError(
                f"a {header.kind.name} frame with {header.payload_bytes} bytes; expected at most "
                f"{self.most_payload}"
            )
        head = self.read(header.head_bytes, ends)
        payload = self._payload(header, ends)
        header.check(head, payload if self.with_crc else None)
        return Frame(header.kind, head, payload)

    def _payload(self, header: Header, ends: float) -> memoryview:
        return self.read(header.payload_bytes, ends)

    def expect(self, *kinds: Kind) -> Frame:
        """The next frame, which must be of one of these kinds.

        :raises TransferError: it is of another; a REFUSE says why.
        """
        frame = self.receive()
        if frame.kind in kinds:
            return frame
        if frame.kind is Kind.REFUSE:
            raise TransferError(f"the receiver refused: {read_reason(frame)}")
        names = " or ".join(kind.name for kind in kinds)
        raise TransferError(f"expected a frame {names}, found {frame.kind.name}")

    def release(self) -> None:
        """The payloads of all frames received so far are not needed any more."""

    def send_bytes(self, *buffers: Bytes) -> None:
        """Send all of these bytes."""
        with self._checked():
            self._stream.send(*buffers, limit_s=self._timeout)

    def read(self, size: int, ends: float) -> memoryview:
        """Exactly ``size`` bytes, until the time ``ends``."""
        with self._checked():
            return self._stream.receive(size, ends - time.monotonic())

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise TransferError(
                f"the other side made no progress within {self._timeout:g} s"
            ) from None
        except EOFError as error:
            raise TransferError(str(error)) from None
        except OSError as error:
            raise TransferError(f"the connection is lost: {error}") from error

    def close(self) -> None:
        """Close the connection; a call that waits in another thread fails. Idempotent."""
        self._stream.close()


class OpenStreams:
    """The streams of a connector, so that it can be closed from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[FrameStream] = weakref.WeakSet()
        self._closed = False

    def added(self, stream: FrameStream) -> FrameStream:
        """The same stream. :raises TransferError: the connector was closed."""
        with self._lock:
            if self._closed:
                stream.close()
                raise TransferError("the connector was closed")
            self._streams.add(stream)
        return stream

    def close(self) -> None:
        """Close all of them. Idempotent."""
        with self._lock:
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()


class FramedSending:
    """See :class:`sdk.cluster.transfer.connector.Sending`. Owns the stream."""

    def __init__(self, stream: FrameStream, offer: Offer) -> None:
        self._stream = stream
        try:
            stream.handshake()
            stream.send(Kind.OFFER, *pack_offer(offer))
            frame = stream.expect(Kind.ACCEPT)
            self.num_known, self.unit, self.most_bytes = read_accept(frame, offer)
        except BaseException:
            stream.close()
            raise

    def send(self, part: Part) -> None:
        """See the protocol."""
        self._stream.send(Kind.PART, *pack_part(part))

    def keep_alive(self) -> None:
        """See the protocol."""
        self._stream.send(Kind.WAIT)

    def finish(self, num_tokens: int) -> int:
        """See the protocol."""
        self._stream.send(Kind.END, pack_count(num_tokens))
        return read_count(self._stream.expect(Kind.DONE))

    def close(self) -> None:
        """See the protocol."""
        self._stream.close()


class FramedReceiving:
    """See :class:`sdk.cluster.transfer.connector.Receiving`. Owns the stream."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._offer: Offer | None = None

    def offer(self) -> Offer:
        """See the protocol."""
        self._stream.handshake()
        self._offer = read_offer(self._stream.expect(Kind.OFFER))
        self._stream.release()
        return self._offer

    def accept(self, num_known: int, unit: int, most_bytes: int) -> None:
        """See the protocol."""
        self._stream.most_payload = most_bytes
        self._stream.send(Kind.ACCEPT, pack_accept(num_known, unit, most_bytes))

    def refuse(self, reason: str) -> None:
        """See the protocol."""
        self._stream.send(Kind.REFUSE, pack_reason(reason))

    def receive(self) -> Part | End:
        """See the protocol."""
        assert self._offer is not None
        while True:
            found = read_next(self._stream.receive(), self._offer.spec)
            if found is not None:
                return found

    def release(self) -> None:
        """See the protocol."""
        self._stream.release()

    def done(self, num_tokens: int) -> None:
        """See the protocol."""
        self._stream.send(Kind.DONE, pack_count(num_tokens))

    def close(self) -> None:
        """See the protocol."""
        self._stream.close()
