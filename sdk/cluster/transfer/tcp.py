"""Hands over through TCP, to other machines: through TLS between ends that have the same token."""

from __future__ import annotations

import time

from sdk.api.errors import EngineDeadError, RequestError, TransferError
from sdk.api.remote_workers import Address, parse_address, read_token
from sdk.cluster.transfer.connector import Offer
from sdk.cluster.transfer.stream import (
    FramedReceiving,
    FramedSending,
    FrameStream,
    OpenStreams,
    checked_seconds,
)
from sdk.cluster.wire.listener import Listener
from sdk.cluster.wire.stream import Stream
from sdk.cluster.wire.tls import HandshakeError, SharedToken

#: What both sides say, and its version.
_PROTOCOL = "embedlm-kv/3"
#: Seconds that connecting may take. A thread of the receiver does it, however busy that is.
_CONNECT_S = 5.0
#: After this another try, if strangers have all places of the receiver.
_RETRY_S = 0.1


class TcpConnector:
    """Sends to ``host:port``, the address of a :class:`TcpListener` with the same ``token``.

    ``timeout``: seconds for each frame. Steps of the sender's engine must not take longer. Between
    them a sender without news says every 5 s that it waits. A side that dies is noticed at once.
    """

    def __init__(self, token: str, *, timeout: float = 120.0) -> None:
        self._timeout = checked_seconds(timeout)
        self._token = SharedToken(read_token(token, None), _PROTOCOL)
        self._streams = OpenStreams()

    def open(self, offer: Offer, destination: str) -> FramedSending:
        """See :class:`sdk.cluster.transfer.connector.KVConnector`."""
        try:
            stream = self._connected(parse_address(destination, "destination"))
        except RequestError as error:
            raise TransferError(str(error)) from error
        except HandshakeError as error:
            raise TransferError(f"{destination}: {error}") from error
        except (OSError, EOFError) as error:
            raise TransferError(f"{destination}: no connection: {error}") from error
        return FramedSending(self._streams.added(_TlsFrames(stream, self._timeout)), offer)

    def _connected(self, address: Address) -> Stream:
        ends = time.monotonic() + min(self._timeout, _CONNECT_S)
        while True:
            try:
                return self._token.connect(address, ends - time.monotonic())
            except (EOFError, ConnectionResetError):
                if time.monotonic() + _RETRY_S > ends:
                    raise
            time.sleep(_RETRY_S)

    def close(self) -> None:
        """See the protocol."""
        self._streams.close()


class TcpListener:
    """Receives at ``host``; port 0 takes a free one. See ``KVListener``."""

    def __init__(
        self, token: str, host: str = "127.0.0.1", port: int = 0, *, timeout: float = 120.0
    ) -> None:
        self._timeout = checked_seconds(timeout)
        shared = SharedToken(read_token(token, None), _PROTOCOL)
        try:
            self._listener = Listener(Address(host, port), shared)
        except (EngineDeadError, OverflowError, TypeError) as error:
            raise TransferError(str(error)) from error

    @property
    def address(self) -> str:
        """``host:port`` for senders."""
        return str(self._listener.address)

    def accept(self) -> FramedReceiving | None:
        """See the protocol."""
        try:
            arrival = self._listener.accept(None)
        except EngineDeadError:
            return None
        assert arrival is not None
        return FramedReceiving(_TlsFrames(arrival.stream, self._timeout))

    def close(self) -> None:
        """See the protocol."""
        self._listener.close()


class _TlsFrames(FrameStream):
    with_crc = False
