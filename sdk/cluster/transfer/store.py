"""Hands over through a store: pages are put and got by a key, so sender and receiver need not run
at the same time. ``MemoryStore`` and ``FolderStore`` are small examples of such stores.

A value is one page over all layers, as a CHUNK frame (docs/cluster/hand_over.md); its key is the
digest of the page (``Offer.digests``), which includes the model, the KV type, and all tokens
before it.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Protocol

import numpy as np

from sdk.api.errors import TransferError
from sdk.cluster.transfer.connector import End, Offer, Part, Rows
from sdk.cluster.transfer.engine_pages import checked_count
from sdk.cluster.transfer.messages import HEADER_BYTES, Kind, pack_header, read_header
from sdk.engine.rank.kv_transfer import row_widths
from sdk.quant.spec import KVSpec

#: What is taken from an engine at once.
_GROUP_BYTES = 8 << 20


class KVStore(Protocol):
    """Values by key: ``get`` and ``put`` of whatever stores bytes. Safe from several threads. May
    forget a value at any time. Raises TransferError if it fails.
    """

    def contains(self, key: bytes) -> bool:
        """Whether ``get`` would find it."""

    def get(self, key: bytes) -> bytes | None:
        """The value, if there is one."""

    def put(self, key: bytes, value: bytes) -> None:
        """Store a value; another one with this key has the same meaning."""


class StoreConnector:
    """Sends to a store and fetches from it; destinations are not used."""

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def open(self, offer: Offer, destination: str = "") -> StoreSending:
        """See :class:`sdk.cluster.transfer.connector.KVConnector`."""
        _check_pages(offer)
        return StoreSending(self._store, offer)

    def fetch(self, offer: Offer) -> StoreReceiving:
        """See :class:`sdk.cluster.transfer.connector.KVSource`."""
        _check_pages(offer)
        return StoreReceiving(self._store, offer)

    def close(self) -> None:
        """See the protocol. The store stays open: others may use it."""


def _check_pages(offer: Offer) -> None:
    """:raises TransferError: layers have something besides pages."""
    if len(offer.spec.layers_in(0)) < offer.spec.num_layers:
        raise TransferError(
            f"a store keeps pages alone, and {offer.model.name} has recurrent states, or layers "
            "with a window that keep only its tokens (see explain()): hand over through shared "
            "memory or TCP"
        )


class StoreSending:
    """See :class:`sdk.cluster.transfer.connector.Sending`."""

    def __init__(self, store: KVStore, offer: Offer) -> None:
        self._store = store
        self._digests = offer.digests()
        self._rows: list[Rows] = []  # of a group that has not all layers yet
        self._num_layers = offer.spec.num_layers
        self.unit = offer.spec.page_size
        missing = (i for i, key in enumerate(self._digests) if not store.contains(key))
        self.num_known = next(missing, len(self._digests)) * self.unit
        self.most_bytes = _GROUP_BYTES

    def send(self, part: Part) -> None:
        """See the protocol."""
        self._rows.append(part.rows)
        if len(self._rows) < self._num_layers:
            return
        rows, self._rows = self._rows, []
        for begin in range(0, len(rows[0]), self.unit):
            page = b"".join(layer[begin : begin + self.unit].tobytes() for layer in rows)
            key = self._digests[(part.first + begin) // self.unit]
            self._store.put(key, pack_header(Kind.CHUNK, key, page) + key + page)

    def keep_alive(self) -> None:
        """See the protocol."""

    def finish(self, num_tokens: int) -> int:
        """See the protocol."""
        return num_tokens

    def close(self) -> None:
        """See the protocol."""


class StoreReceiving:
    """See :class:`sdk.cluster.transfer.connector.Receiving`."""

    def __init__(self, store: KVStore, offer: Offer) -> None:
        self._store = store
        self._offer = offer
        self._keys = offer.digests()
        self._next = 0  # page
        self._parts: list[Part] = []  # of one page, the last layer first

    def offer(self) -> Offer:
        """See the protocol."""
        return self._offer

    def accept(self, num_known: int, unit: int, most_bytes: int) -> None:
        """See the protocol."""
        self._next = num_known // self._offer.spec.page_size

    def refuse(self, reason: str) -> None:
        """See the protocol."""

    def receive(self) -> Part | End:
        """See the protocol."""
        if not self._parts:
            size = self._offer.spec.page_size
            if self._next == len(self._keys):
                return End(self._next * size)
            key = self._keys[self._next]
            value = self._store.get(key)
            if value is None:
                return End(self._next * size)
            layers = read_chunk(key, value, self._offer.spec)
            first = self._next * size
            parts = [Part(layer, first, rows, key) for layer, rows in enumerate(layers)]
            self._parts = parts[::-1]
            self._next += 1
        return self._parts.pop()

    def release(self) -> None:
        """See the protocol."""

    def done(self, num_tokens: int) -> None:
        """See the protocol."""

    def close(self) -> None:
        """See the protocol."""


def read_chunk(key: bytes, value: bytes, spec: KVSpec) -> Sequence[Rows]:
    """The rows of a page, one for each layer.

    :raises TransferError: the value is damaged, or that of another key.
    """
    header = read_header(value[:HEADER_BYTES])
    view = memoryview(value)[HEADER_BYTES:]
    head, page = view[: header.head_bytes], view[header.head_bytes :]
    layers, slots = range(spec.num_layers), spec.page_size
    shapes = [(spec.cache(layer).kv_heads, sum(row_widths(spec, layer))) for layer in layers]
    expected = slots * sum(heads * width for heads, width in shapes)
    if header.kind is not Kind.CHUNK or head != key or len(page) != expected:
        raise TransferError(
            f"a stored page of {len(page)} bytes; expected {expected}, and the key that it was "
            "stored under"
        )
    header.check(head, page)
    found, at = [], 0
    for heads, width in shapes:
        end = at + slots * heads * width
        rows = np.frombuffer(page[at:end], dtype=np.uint8)
        found.append(rows.reshape(slots, heads, width))
        at = end
    return found


class MemoryStore:
    """Up to ``max_bytes`` of values in this process; the least recently used go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = checked_count("max_bytes", max_bytes)
        self._lock = threading.Lock()
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self.num_bytes = 0

    def contains(self, key: bytes) -> bool:
        """See the protocol."""
        return key in self._values

    def get(self, key: bytes) -> bytes | None:
        """See the protocol."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: bytes, value: bytes) -> None:
        """See the protocol."""
        with self._lock:
            self.num_bytes += len(value) - len(self._values.pop(key, b""))
            self._values[key] = value
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= len(self._values.popitem(last=False)[1])


class FolderStore:
    """Values as files of a folder, which several processes may share; only this user can read them.
    Nothing is evicted: delete files at any time, oldest first.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self._folder = Path(folder)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise TransferError(f"{folder}: not a usable folder: {error}") from error

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}.kv"

    def contains(self, key: bytes) -> bool:
        """See the protocol."""
        return self._path(key).is_file()

    def get(self, key: bytes) -> bytes | None:
        """See the protocol."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TransferError(f"{self._path(key)}: cannot be read: {error}") from error

    def put(self, key: bytes, value: bytes) -> None:
        """See the protocol. A file appears as a whole or not at all."""
        temporary = None
        try:
            number, temporary = tempfile.mkstemp(prefix=".", dir=self._folder)
            with open(number, "wb") as file:
                file.write(value)
            Path(temporary).replace(self._path(key))
            temporary = None
        except OSError as error:
            raise TransferError(f"{self._path(key)}: cannot be written: {error}") from error
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
