"""The bytes of hand-overs: frames with checksums, and the messages in them
(docs/cluster/hand_over.md has the tables).

All of it comes from outside, so whatever is wrong raises ``TransferError``.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from sdk.api.errors import TransferError
from sdk.cluster.transfer.connector import End, Offer, Part, Rows
from sdk.engine.model_key import ModelKey
from sdk.engine.rank.kv_transfer import row_widths
from sdk.loaders.json_file import parse_json
from sdk.quant.caches import StateCache, cache_of, described, window_groups
from sdk.quant.errors import CheckpointError
from sdk.quant.safe_repr import safe_repr
from sdk.quant.spec import KVSpec

Bytes = bytes | bytearray | memoryview
_MAGIC = b"EKV2"
_HEADER = struct.Struct("<4sB3xIIQIQI")
HEADER_BYTES = _HEADER.size
_CRC = struct.Struct("<I")
#: A head is at most a few names and numbers; a payload one layer of a group, or a prompt's tokens.
MOST_HEAD, MOST_PAYLOAD = 1 << 16, 1 << 28
_PART = struct.Struct("<IQI32s")
_COUNT = struct.Struct("<Q")
_ACCEPT = struct.Struct("<QIQ")
_SHAPE = "layers", "heads", "head_dim", "page_size"
_MOST = dict.fromkeys(_SHAPE, 1 << 16) | {"layers": 1 << 12, "ranks": 1 << 12}
_MOST_NAME = 4096
_BAD = CheckpointError, ValueError, KeyError, TypeError, IndexError, RecursionError


class Kind(enum.IntEnum):
    """What a frame is."""

    OFFER = 1
    ACCEPT = 2
    REFUSE = 3
    PART = 4
    WAIT = 5
    END = 6
    DONE = 7
    FREE = 8
    CHUNK = 9
    REST = 10


class Header(NamedTuple):
    """The first 40 bytes of a frame, checked."""

    kind: Kind
    head_bytes: int
    head_crc: int
    payload_bytes: int
    payload_crc: int
    position: int

    def check(self, head: Bytes, payload: Bytes | None) -> None:
        """``payload``: ``None`` if TLS has checked it.

        :raises TransferError: they are not what the header describes.
        """
        for what, data, crc in (
            ("head", head, self.head_crc),
            ("payload", payload, self.payload_crc),
        ):
            if data is not None and crc32(data) != crc:
                raise TransferError(
                    f"a {self.kind.name} frame is damaged: the checksum of its {what} does not "
                    "match; send it again"
                )


class Frame(NamedTuple):
    """A checked frame."""

    kind: Kind
    head: Bytes
    payload: memoryview


def pack_header(
    kind: Kind, head: Bytes, payload: Bytes, position: int = 0, *, with_crc: bool = True
) -> bytes:
    """The header of a frame. ``position``: of its payload in shared memory. ``with_crc``: with a
    checksum of the payload, which takes 0.24 ms per MiB on each side."""
    fields = len(head), crc32(head), len(payload), crc32(payload) if with_crc else 0, position
    start = _HEADER.pack(_MAGIC, kind, *fields, 0)[: -_CRC.size]
    return start + _CRC.pack(crc32(start))


def read_header(data: Bytes) -> Header:
    """The inverse of :func:`pack_header`."""
    if len(data) != HEADER_BYTES or bytes(data[:4]) != _MAGIC:
        raise TransferError(
            f"expected a frame that begins with {_MAGIC!r}, found {safe_repr(bytes(data[:4]))}: "
            "the other side speaks another protocol or version"
        )
    _, kind, *fields, crc = _HEADER.unpack(data)
    if crc32(data[: -_CRC.size]) != crc:
        raise TransferError("a frame's header is damaged: its checksum does not match")
    if kind not in Kind.__members__.values():
        raise TransferError(f"a frame of kind {kind} is unknown to this release")
    header = Header(Kind(kind), *fields)
    if header.head_bytes > MOST_HEAD or header.payload_bytes > MOST_PAYLOAD:
        raise TransferError(
            f"a {header.kind.name} frame of {header.head_bytes} and {header.payload_bytes} bytes; "
            f"expected at most {MOST_HEAD} and {MOST_PAYLOAD}"
        )
    return header


# ---- messages ------------------------------------------------------------------------------------


def pack_offer(offer: Offer) -> tuple[bytes, bytes]:
    """Head and payload of an OFFER. :raises TransferError: a name in it is too long."""
    spec = offer.spec
    names = {"transfer_id": offer.transfer_id, "cache_salt": offer.salt, "adapter": offer.adapter}
    for name, text in names.items():
        if text is not None and len(text) > _MOST_NAME:
            raise TransferError(
                f"{name}: a text of {len(text)} characters cannot be handed over; expected at most "
                f"{_MOST_NAME}"
            )
    head = {
        "transfer_id": offer.transfer_id,
        "model": offer.model._asdict(),
        "numerics": offer.numerics.hex(),
        "dtype": spec.dtype,
        "layers": spec.num_layers,
        "heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "page_size": spec.page_size,
        "caches": [described(one) for one in spec.caches],
        "windows": spec.windows,
        "ranks": offer.ranks,
        "salt": offer.salt,
        "adapter": offer.adapter,
    }
    data = json.dumps(head).encode()
    if len(data) > MOST_HEAD:
        raise TransferError(
            f"an offer of {len(data)} bytes; expected at most {MOST_HEAD}: transfer_id, cache_salt "
            "and the adapter's key are too long"
        )
    return data, np.array(offer.token_ids, dtype="<i4").tobytes()


def read_offer(frame: Frame) -> Offer:
    """The inverse of :func:`pack_offer`."""
    try:
        fields = parse_json(bytes(frame.head), "an offer")
        layers, heads, head_dim, page_size = (_count(fields[name], name) for name in _SHAPE)
        caches = tuple(map(cache_of, fields.get("caches", ())))
        if len(caches) not in (0, layers):
            raise ValueError("caches")
        windows = tuple(fields["windows"])
        if windows and windows != window_groups(caches):
            raise ValueError("windows")
        spec = KVSpec(layers, heads, head_dim, page_size, _text(fields["dtype"]), caches, windows)
        if spec.head_dim % 2 or ">" in spec.dtype:
            raise ValueError("head_dim or dtype")
        for layer in range(layers if caches else 1):
            row_shape(spec, layer)
        ranks = _count(fields["ranks"], "ranks")
        numerics = bytes.fromhex(_text(fields["numerics"]))
        if len(numerics) != 32 or len(frame.payload) % (4 * page_size) or not frame.payload:
            raise ValueError("numerics or tokens")
        ids = np.frombuffer(frame.payload, dtype="<i4")
        if ids.min() < 0:
            raise ValueError("a negative token")
        model = ModelKey(_text(fields["model"]["name"]), _text(fields["model"]["digest"]))
        salt, adapter = (
            None if fields[x] is None else _text(fields[x]) for x in ("salt", "adapter")
        )
        tokens, number = tuple(ids.tolist()), _text(fields["transfer_id"])
        return Offer(number, model, numerics, spec, tokens, salt, adapter, ranks)
    except _BAD as error:
        found = f"{type(error).__name__}: {error}"
        raise TransferError(f"an OFFER frame cannot be used: {found}") from error


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 < value <= _MOST[name]:
        raise ValueError(f"{name}: expected 1 to {_MOST[name]}, found {safe_repr(value)}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MOST_NAME:
        raise ValueError(f"expected a text of at most {_MOST_NAME} characters")
    return value


def row_shape(spec: KVSpec, layer: int) -> tuple[int, int]:
    """The shape of what a part has of one token, or of a state on one rank: heads, and bytes of
    each."""
    state = spec.caches[layer] if spec.caches else None
    if isinstance(state, StateCache):
        return 1, sum(part.nbytes for part in state.parts)
    return spec.cache(layer).kv_heads, sum(row_widths(spec, layer))


def pack_part(part: Part) -> tuple[bytes, memoryview]:
    """Head and payload of a PART."""
    rows = np.ascontiguousarray(part.rows)
    return _PART.pack(part.layer, part.first, len(rows), part.digest), rows.data.cast("B")


def read_part(frame: Frame, spec: KVSpec) -> Part:
    """The inverse of :func:`pack_part`, for rows of this shape and type."""
    layer, first, count, digest = _unpack(_PART, frame)
    if layer >= spec.num_layers:
        raise TransferError(f"a part of layer {layer}; expected layers below {spec.num_layers}")
    shape = count, *row_shape(spec, layer)
    expected = shape[0] * shape[1] * shape[2]
    if not count or len(frame.payload) != expected:
        raise TransferError(
            f"a part of {count} tokens in {len(frame.payload)} bytes; expected {expected}, "
            "and at least one token"
        )
    rows: Rows = np.frombuffer(frame.payload, dtype=np.uint8).reshape(shape)
    return Part(layer, first, rows, digest)


def pack_count(count: int) -> bytes:
    """The head of END, DONE and FREE."""
    return _COUNT.pack(count)


def read_count(frame: Frame) -> int:
    """The inverse of :func:`pack_count`."""
    (count,) = _unpack(_COUNT, frame)
    return int(count)


def pack_accept(num_known: int, unit: int, most_bytes: int) -> bytes:
    """The head of an ACCEPT."""
    return _ACCEPT.pack(num_known, unit, most_bytes)


def read_accept(frame: Frame, offer: Offer) -> tuple[int, int, int]:
    """The inverse of :func:`pack_accept`, checked against the offer."""
    known, unit, most_bytes = _unpack(_ACCEPT, frame)
    size = offer.spec.page_size
    if not unit or unit % size or known % unit or known > len(offer.token_ids):
        raise TransferError(
            f"the receiver knows {known} of {len(offer.token_ids)} tokens and wants units of "
            f"{unit}; expected multiples of {size}"
        )
    return known, unit, most_bytes


def pack_reason(reason: str) -> bytes:
    """The head of a REFUSE."""
    return reason.encode("utf-8", "replace")[:_MOST_NAME]


def read_reason(frame: Frame) -> str:
    """The inverse of :func:`pack_reason`; only printable characters."""
    text = bytes(frame.head[:_MOST_NAME]).decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


def read_next(frame: Frame, spec: KVSpec) -> Part | End | None:
    """What a receiver gets after it accepted. ``None``: the sender only waits."""
    if frame.kind is Kind.PART:
        return read_part(frame, spec)
    if frame.kind is Kind.END:
        return End(read_count(frame))
    if frame.kind is Kind.WAIT:
        return None
    raise TransferError(f"expected parts or their end, found a {frame.kind.name} frame")


def _unpack(layout: struct.Struct, frame: Frame) -> tuple[Any, ...]:
    if len(frame.head) != layout.size:
        raise TransferError(
            f"a {frame.kind.name} frame with a head of {len(frame.head)} bytes; expected "
            f"{layout.size}"
        )
    return layout.unpack(frame.head)
