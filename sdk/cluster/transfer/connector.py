"""What moves keys and values between two engines: the protocol that connectors implement.

One hand-over goes like this::

    sender                                   receiver
    connector.open(offer, destination)  ->   listener.accept().offer()
    num_known, unit, most_bytes         <-   accept(num_known, unit, most_bytes), or refuse(reason)
    send(part), part after part         ->   receive() ... release()
    finish(num_tokens)                  ->   receive() returns End
    what it returns                     <-   done(num_tokens)

Parts of the same tokens make a *group*: one part for each layer that keeps all tokens, in the order
of layers. Groups follow each other without gaps, from ``num_known`` on. After the last of them the
other layers follow in their order, if there are any: the last rows of those with a window, in one
part or several, and states. A store has no receiver that could answer: its ``open`` finds out what
it holds already, and receivers call ``fetch`` instead of listening.

This is the place for adapters to other libraries; docs/cluster/hand_over.md says what they do in
each method. All methods raise :class:`TransferError` if the other side is gone, refuses, or sends
what is wrong, and after ``timeout`` seconds without progress. ``close`` may be called from any
thread, and ends a call that waits.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sdk.engine.model_key import ModelKey
from sdk.quant.spec import KVSpec

Rows = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Offer:
    """What is to be handed over: a prompt in whole pages, and what its keys and values depend on.

    ``numerics`` is a SHA-256 of the model and of everything in its KV cache that is not in
    ``spec``. ``spec`` has the sender's page size, and the shape and type over all ranks; states as
    each of ``ranks`` has them.
    """

    transfer_id: str
    model: ModelKey
    numerics: bytes
    spec: KVSpec
    token_ids: tuple[int, ...]
    salt: str | None = None
    adapter: str | None = None
    ranks: int = 1

    def digests(self) -> list[bytes]:
        """One SHA-256 per page, over everything that determines its contents: like the keys of the
        prefix cache, but with the model, so that they may be used outside of an engine.
        """
        spec, root = self.spec, (self.adapter, self.salt, self.spec.dtype)
        text = self.numerics + repr(root).encode("utf-8", "surrogatepass")
        digest, found = sha256(text).digest(), []
        for begin in range(0, len(self.token_ids), spec.page_size):
            ids = array("q", self.token_ids[begin : begin + spec.page_size])
            digest = sha256(digest + ids.tobytes()).digest()
            found.append(digest)
        return found


class Part(NamedTuple):
    """One layer of consecutive tokens: ``rows`` uint8 ``[tokens, kv_heads, row]`` as in snapshots
    (sdk/engine/rank/kv_transfer.py). ``digest``: that of the last page (:meth:`Offer.digests`).
    Of a state: ``[ranks, 1, bytes]`` from rank ``first`` on, and the digest of the page before it.
    """

    layer: int
    first: int  # position of the first token, or number of the first rank
    rows: Rows
    digest: bytes


class End(NamedTuple):
    """The sender has no more parts. It had those of the first ``num_tokens`` tokens."""

    num_tokens: int


class Sending(Protocol):
    """The sender's end of one hand-over. Not thread-safe, apart from ``close``."""

    @property
    def num_known(self) -> int:
        """Tokens that the other side has already."""

    @property
    def unit(self) -> int:
        """Groups begin and end at multiples of this many tokens."""

    @property
    def most_bytes(self) -> int:
        """A group of several units may have this many bytes."""

    def send(self, part: Part) -> None:
        """Send a part. Its rows may be changed as soon as this returns."""

    def keep_alive(self) -> None:
        """There is nothing to send yet, but there will be."""

    def finish(self, num_tokens: int) -> int:
        """All parts are sent; returns how many leading tokens the other side has now."""

    def close(self) -> None:
        """Give everything back; what was not finished is broken off. Idempotent."""


class Receiving(Protocol):
    """The receiver's end of one hand-over. Not thread-safe, apart from ``close``."""

    def offer(self) -> Offer:
        """What is offered. Called once, first."""

    def accept(self, num_known: int, unit: int, most_bytes: int) -> None:
        """Ask for what follows the first ``num_known`` tokens; see :class:`Sending`."""

    def refuse(self, reason: str) -> None:
        """Ask for nothing."""

    def receive(self) -> Part | End:
        """The next part. Its rows are valid until ``release``, and must not be written."""

    def release(self) -> None:
        """The rows of all parts so far are not needed any more."""

    def done(self, num_tokens: int) -> None:
        """After the end: the first ``num_tokens`` tokens are cached now."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class KVListener(Protocol):
    """Where hand-overs arrive."""

    @property
    def address(self) -> str:
        """The ``destination`` for senders."""

    def accept(self) -> Receiving | None:
        """Wait for the next hand-over. ``None``: the listener was closed. Never fails because of
        what a sender does: that happens in the methods of ``Receiving``.
        """

    def close(self) -> None:
        """Accept no more. Idempotent, from any thread."""


class KVConnector(Protocol):
    """Hands over from this process to others."""

    def open(self, offer: Offer, destination: str) -> Sending:
        """Offer a prefix and wait for the answer. :raises TransferError: it was refused."""

    def close(self) -> None:
        """Break off what is open and open no more. Idempotent, from any thread."""


class KVSource(Protocol):
    """Has what was handed over to it: a store."""

    def fetch(self, offer: Offer) -> Receiving:
        """What it has of a prefix. ``offer`` says what is wanted."""
