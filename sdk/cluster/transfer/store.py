"""Hands over through a store: pages are put and got by a key, so sender and receiver need not run
at the same time. ``MemoryStore`` and ``FolderStore`` are small examples of such stores.

A value is one page over all layers that keep all tokens, as a CHUNK frame
(docs/cluster/hand_over.md); its key is the digest of the page (``Offer.digests``), which includes
the model, the KV type, and all tokens before it. What other layers keep, windows and recurrent
states, is one value for each prompt that was handed over, after its last page, as a REST frame.
Models whose layers all have states or windows have such values alone.

Engines with other options have other keys, so that they find nothing. What a model's values were
last written with is in the store as an OFFER frame, so that the one that finds none can say why.
"""

from __future__ import annotations

import contextlib
import struct
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from math import prod
from os import PathLike
from pathlib import Path
from typing import Protocol

import numpy as np

from sdk.api.errors import TransferError
from sdk.cluster.transfer.connector import End, Offer, Part, Rows
from sdk.cluster.transfer.engine_pages import checked_count
from sdk.cluster.transfer.messages import (
    HEADER_BYTES,
    MOST_PAYLOAD,
    Frame,
    Header,
    Kind,
    pack_header,
    pack_offer,
    read_header,
    read_offer,
    row_shape,
)
from sdk.engine.pages.prefix_store import rest_layers
from sdk.quant.caches import StateCache
from sdk.quant.spec import KVSpec

#: What is taken from an engine at once.
_GROUP_BYTES = 8 << 20
#: Of the rows of a layer in a REST frame: the first one, and how many there are.
_RANGE = struct.Struct("<QI")


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
        return StoreSending(self._store, offer)

    def fetch(self, offer: Offer) -> StoreReceiving:
        """See :class:`sdk.cluster.transfer.connector.KVSource`. With states or windows it returns
        the longest prefix of the offer for which the store has states and windows, too. If what it
        has of the model was written with other options, it returns that, to be refused.

        :raises TransferError: the store has them for none of its prefixes, or has other pages.
        """
        keys = _Keys(offer)
        count = keys.num_pages(self._store)
        if keys.rest_layers:
            count = keys.num_usable(self._store, count)
        if not count and (other := keys.written_otherwise(self._store)):
            return StoreReceiving(self._store, other)
        if keys.rest_layers:
            if not count:
                raise TransferError(
                    "the store has no state or window after which this prompt could go on: hand "
                    "over a prompt that it begins with"
                )
            size = offer.spec.page_size
            keys = _Keys(replace(offer, token_ids=offer.token_ids[: count * size]))
        return StoreReceiving(self._store, keys)

    def close(self) -> None:
        """See the protocol. The store stays open: others may use it."""


class _Keys:
    """Under which keys the values of an offer are: of each page its digest, with what layers keep
    if not all keep all tokens; of the rest after some pages a digest of the last one's.
    """

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        spec = offer.spec
        self.page_layers, self.rest_layers = spec.layers_in(0), rest_layers(spec)
        self.digests = offer.digests()
        self.pages = self.digests
        #: Of the values of this model, and of those that were written with these options.
        self.model = sha256(b"model" + offer.model.digest.encode()).digest()
        ranks = offer.ranks if any(isinstance(one, StateCache) for one in spec.caches) else 1
        written = repr((ranks, spec)).encode()
        self.options = sha256(self.model + offer.numerics + written).digest()
        if self.rest_layers:
            kept = repr((ranks, spec.page_size, spec.windows, spec.caches)).encode()
            self.pages = [sha256(kept + digest).digest() for digest in self.digests]

    def rest(self, num_pages: int) -> bytes:
        """That of what the token after so many pages needs besides them."""
        return sha256(b"rest" + self.pages[num_pages - 1]).digest()

    def num_pages(self, store: KVStore) -> int:
        """How many of the first pages a store has. If nothing is in pages, those before the last of
        its states and windows."""
        if not self.page_layers:
            return self.num_usable(store, len(self.pages))
        missing = (i for i, key in enumerate(self.pages) if not store.contains(key))
        return next(missing, len(self.pages))

    def num_usable(self, store: KVStore, num_pages: int) -> int:
        """After how many of these pages the store has what the next token needs besides them."""
        while num_pages and not store.contains(self.rest(num_pages)):
            num_pages -= 1
        return num_pages

    def note_options(self, store: KVStore) -> None:
        """Write down with which options the model's values are written, unless that is known."""
        if store.contains(self.options) and store.contains(self.model):
            return
        tokens = (0,) * self.offer.spec.page_size
        offer = replace(self.offer, transfer_id="-", token_ids=tokens, salt=None, adapter=None)
        head, payload = pack_offer(offer)
        for key in (self.options, self.model):
            store.put(key, pack_header(Kind.OFFER, head, payload) + head + payload)

    def written_otherwise(self, store: KVStore) -> _Keys | None:
        """The keys of an offer with the options that the model's values were last written with, if
        none was written with those of this offer.

        :raises TransferError: their pages have another size, and stores do not convert them.
        """
        value = None if store.contains(self.options) else store.get(self.model)
        if value is None:
            return None
        header, head, payload = _split(value)
        header.check(head, payload)
        if header.kind is not Kind.OFFER:
            raise TransferError(f"expected options in a store, found a {header.kind.name} frame")
        offer = read_offer(Frame(header.kind, head, payload))
        found, own = offer.spec.page_size, self.offer.spec.page_size
        if found != own:
            raise TransferError(
                f"block_size: the store has pages of {found} tokens of this model, this engine has "
                f"pages of {own}; set the same for both, because a store does not convert pages"
            )
        return _Keys(offer)


class StoreSending:
    """See :class:`sdk.cluster.transfer.connector.Sending`."""

    def __init__(self, store: KVStore, offer: Offer) -> None:
        self._store = store
        self._keys = keys = _Keys(offer)
        keys.note_options(store)
        self._rows: list[Rows] = []  # of a group that has not all layers yet
        self._rest: dict[int, list[Part]] = {layer: [] for layer in keys.rest_layers}
        self.unit = offer.spec.page_size
        known = keys.num_pages(store)
        if keys.rest_layers and known == len(keys.pages):  # the rest comes after a page
            known -= not store.contains(keys.rest(known))
        self.num_known = known * self.unit
        self.most_bytes = _GROUP_BYTES

    def send(self, part: Part) -> None:
        """See the protocol."""
        if part.layer in self._rest:
            self._rest[part.layer].append(part._replace(rows=part.rows.copy()))
            return
        self._rows.append(part.rows)
        if len(self._rows) < len(self._keys.page_layers):
            return
        rows, self._rows = self._rows, []
        for begin in range(0, len(rows[0]), self.unit):
            page = b"".join(layer[begin : begin + self.unit].tobytes() for layer in rows)
            key = self._keys.pages[(part.first + begin) // self.unit]
            self._store.put(key, pack_header(Kind.CHUNK, key, page) + key + page)

    def keep_alive(self) -> None:
        """See the protocol."""

    def finish(self, num_tokens: int) -> int:
        """See the protocol."""
        if self._rest and all(self._rest.values()):
            key = self._keys.rest(num_tokens // self.unit)
            self._store.put(key, _pack_rest(key, self._rest))
        return num_tokens

    def close(self) -> None:
        """See the protocol."""


class StoreReceiving:
    """See :class:`sdk.cluster.transfer.connector.Receiving`."""

    def __init__(self, store: KVStore, keys: _Keys) -> None:
        self._store = store
        self._keys = keys
        self._next = 0  # page
        self._parts: list[Part] = []  # of one page, or of the rest; the last layer first
        self._has_rest = not keys.rest_layers  # nothing is to come after the pages

    def offer(self) -> Offer:
        """See the protocol."""
        return self._keys.offer

    def accept(self, num_known: int, unit: int, most_bytes: int) -> None:
        """See the protocol."""
        keys = self._keys
        self._next = num_known // keys.offer.spec.page_size if keys.page_layers else len(keys.pages)

    def refuse(self, reason: str) -> None:
        """See the protocol."""

    def receive(self) -> Part | End:
        """See the protocol."""
        keys, size = self._keys, self._keys.offer.spec.page_size
        if not self._parts and self._next < len(keys.pages):
            key = keys.pages[self._next]
            value = self._store.get(key)
            if value is not None:
                layers = read_chunk(key, value, keys.offer.spec)
                first, digest = self._next * size, keys.digests[self._next]
                pairs = zip(keys.page_layers, layers, strict=True)
                self._parts = [Part(layer, first, rows, digest) for layer, rows in pairs][::-1]
                self._next += 1
        elif not self._parts and not self._has_rest:
            self._has_rest = True
            key = keys.rest(len(keys.pages))
            value = self._store.get(key)
            if value is not None:
                self._parts = _read_rest(key, value, keys)[::-1]
        return self._parts.pop() if self._parts else End(self._next * size)

    def release(self) -> None:
        """See the protocol."""

    def done(self, num_tokens: int) -> None:
        """See the protocol."""

    def close(self) -> None:
        """See the protocol."""


def read_chunk(key: bytes, value: bytes, spec: KVSpec) -> Sequence[Rows]:
    """The rows of a page, one for each layer that keeps all tokens.

    :raises TransferError: the value is damaged, or that of another key.
    """
    header, head, page = _split(value)
    slots = spec.page_size
    shapes = [row_shape(spec, layer) for layer in spec.layers_in(0)]
    expected = slots * sum(heads * width for heads, width in shapes)
    if header.kind is not Kind.CHUNK or head != key or len(page) != expected:
        raise TransferError(
            f"a stored page of {len(page)} bytes; expected {expected}, and the key that it was "
            "stored under"
        )
    header.check(head, page)
    return _rows_of(page, [(slots, *shape) for shape in shapes])


def _pack_rest(key: bytes, rest: Mapping[int, list[Part]]) -> bytes:
    """What layers have besides pages, as a REST frame.

    :raises TransferError: it is too large for one value.
    """
    head, rows = key, list[Rows]()
    for parts in rest.values():
        head += _RANGE.pack(parts[0].first, sum(len(part.rows) for part in parts))
        rows += [part.rows for part in parts]
    payload = b"".join(one.tobytes() for one in rows)
    if len(payload) > MOST_PAYLOAD:
        raise TransferError(
            f"states and windows of {len(payload)} bytes; a store takes at most {MOST_PAYLOAD}: "
            "hand over through shared memory or TCP"
        )
    return pack_header(Kind.REST, head, payload) + head + payload


def _read_rest(key: bytes, value: bytes, keys: _Keys) -> list[Part]:
    """The inverse of :func:`_pack_rest`. :raises TransferError: the value is damaged, or that of
    another key."""
    header, head, payload = _split(value)
    layers, spec = keys.rest_layers, keys.offer.spec
    ranges = bytes(head[len(key) :])
    if header.kind is not Kind.REST or head[: len(key)] != key:
        raise TransferError("a stored state or window; expected the key that it was stored under")
    header.check(head, payload)
    if len(ranges) != len(layers) * _RANGE.size:
        raise TransferError(f"a stored state or window of other layers than {layers}")
    found = list(_RANGE.iter_unpack(ranges))
    shapes = [(count, *row_shape(spec, i)) for i, (_, count) in zip(layers, found, strict=True)]
    if sum(map(prod, shapes)) != len(payload):
        raise TransferError(f"a stored state or window of {len(payload)} bytes, which has others")
    rows = _rows_of(payload, shapes)
    firsts = (first for first, _ in found)
    return [Part(*one, keys.digests[-1]) for one in zip(layers, firsts, rows, strict=True)]


def _split(value: bytes) -> tuple[Header, memoryview, memoryview]:
    """Header, head and payload of a value; checksums are not checked."""
    header = read_header(value[:HEADER_BYTES])
    view = memoryview(value)[HEADER_BYTES:]
    return header, view[: header.head_bytes], view[header.head_bytes :]


def _rows_of(data: memoryview, shapes: Sequence[tuple[int, int, int]]) -> list[Rows]:
    """Arrays of these shapes, one after another."""
    found, at = [], 0
    for shape in shapes:
        end = at + prod(shape)
        found.append(np.frombuffer(data[at:end], dtype=np.uint8).reshape(shape))
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
