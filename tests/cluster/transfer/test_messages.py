"""The bytes of hand-overs: what is written is read again, and anything else raises our error."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdk.api.errors import TransferError
from sdk.cluster.transfer.connector import End, Offer, Part
from sdk.cluster.transfer.messages import (
    HEADER_BYTES,
    MOST_PAYLOAD,
    Frame,
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
    read_part,
    read_reason,
)
from sdk.cluster.transfer.store import read_chunk
from sdk.engine.model_key import ModelKey
from sdk.engine.rank.kv_transfer import row_widths
from sdk.quant.caches import AttentionCache, StateCache, StatePart
from sdk.quant.spec import KVSpec

SPEC = KVSpec(2, 2, 8, 4, "int8")
OFFER = Offer("id", ModelKey("model.gguf", "abc"), bytes(range(32)), SPEC, tuple(range(12)))


def _frame(kind: Kind, head: bytes, payload: bytes = b"") -> Frame:
    return Frame(kind, head, memoryview(payload))


def _changed(**fields: object) -> Frame:
    """An OFFER frame with other fields."""
    head, payload = pack_offer(OFFER)
    return _frame(Kind.OFFER, json.dumps(json.loads(head) | fields).encode(), payload)


@settings(max_examples=50)
@given(
    salt=st.none() | st.text(max_size=40),
    adapter=st.none() | st.text(max_size=40),
    pages=st.integers(1, 5),
    dtype=st.sampled_from(["float16", "int16", "int8", "k8v4", "int4:skip=1"]),
)
def test_an_offer_is_read_as_it_was_written(salt, adapter, pages, dtype) -> None:
    tokens = tuple(range(4 * pages))
    spec = replace(SPEC, dtype=dtype)
    offer = replace(OFFER, salt=salt, adapter=adapter, token_ids=tokens, spec=spec)
    found = read_offer(_frame(Kind.OFFER, *pack_offer(offer)))
    assert found == offer and found.digests() == offer.digests()


@pytest.mark.parametrize("name", ["transfer_id", "salt", "adapter"])
def test_a_name_that_a_receiver_would_not_read_is_not_sent(name: str) -> None:
    longest = replace(OFFER, **{name: "x" * 4096})
    assert read_offer(_frame(Kind.OFFER, *pack_offer(longest))) == longest
    with pytest.raises(TransferError, match=f"{name}: a text of 4097 .* expected at most 4096"):
        pack_offer(replace(OFFER, **{name: "x" * 4097}))


def test_a_digest_depends_on_all_tokens_before_it_and_on_everything_else() -> None:
    digests = OFFER.digests()
    assert len(set(digests)) == 3
    changed = replace(OFFER, token_ids=(*range(8), 9, 9, 9, 9)).digests()
    assert changed[:2] == digests[:2] and changed[2] != digests[2]
    for other in (
        replace(OFFER, salt="a"),
        replace(OFFER, adapter="a"),
        replace(OFFER, numerics=bytes(32)),
        replace(OFFER, spec=replace(SPEC, dtype="int4")),
        replace(OFFER, token_ids=(5, *range(1, 12))),
    ):
        assert set(other.digests()).isdisjoint(digests)


@pytest.mark.parametrize(
    "fields",
    [
        {"layers": 0},
        {"layers": True},
        {"heads": 1 << 20},
        {"head_dim": 7},
        {"head_dim": "8"},
        {"page_size": 5},
        {"page_size": None},
        {"dtype": "float7"},
        {"dtype": "float16>int8"},
        {"dtype": 3},
        {"numerics": "00"},
        {"numerics": "xx" * 32},
        {"model": []},
        {"model": {"name": "x"}},
        {"salt": 5},
        {"adapter": ["x"]},
        {"transfer_id": "x" * 5000},
        {"caches": [{}]},
        {"caches": [{"kv_heads": 2, "key_dim": 4, "value_dim": 4}] * 5},
        {"caches": [{"state": [["conv"]]}] * SPEC.num_layers},
        {"windows": [5]},
        {"windows": None},
        {"ranks": 0},
        {"caches": [{"kv_heads": 2, "key_dim": 0, "value_dim": 4}] * SPEC.num_layers},
    ],
)
def test_an_offer_with_a_wrong_field_is_an_error(fields: dict[str, object]) -> None:
    with pytest.raises(TransferError, match="OFFER frame cannot be used"):
        read_offer(_changed(**fields))


def test_an_offer_says_what_has_windows_and_states_and_parts_have_their_shapes() -> None:
    pages = AttentionCache(2, 8, 8)
    state = StateCache((StatePart("conv", (3, 5)), StatePart("matrix", (2, 4))))
    spec = replace(
        SPEC, num_layers=3, caches=(pages, pages._replace(window=6), state), windows=(6,)
    )
    offer = replace(OFFER, spec=spec, ranks=2)
    assert read_offer(_frame(Kind.OFFER, *pack_offer(offer))) == offer
    rows = np.arange(2 * 92, dtype=np.uint8).reshape(2, 1, 92)
    head, payload = pack_part(Part(2, 0, rows, bytes(32)))
    assert (read_part(_frame(Kind.PART, head, bytes(payload)), spec).rows == rows).all()
    with pytest.raises(TransferError, match="a part of 2 tokens in 183 bytes; expected 184"):
        read_part(_frame(Kind.PART, head, bytes(payload)[:-1]), spec)


def test_an_offer_without_tokens_or_with_a_negative_one_is_an_error() -> None:
    head, payload = pack_offer(OFFER)
    for tokens in (b"", payload[:-1], payload[:-4] + b"\xff" * 4):
        with pytest.raises(TransferError, match="OFFER frame cannot be used"):
            read_offer(_frame(Kind.OFFER, head, tokens))


def test_an_offer_that_is_too_long_is_an_error() -> None:
    with pytest.raises(TransferError, match="cache_salt and the adapter's key are too long"):
        pack_offer(replace(OFFER, salt="\U0001f600" * 4096, adapter="\U0001f600" * 4096))


def _part(count: int = 4) -> Part:
    shape = count, 2, sum(row_widths(SPEC, 1))
    rows = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    return Part(1, 8, rows, bytes(32))


def test_a_part_is_read_as_it_was_written() -> None:
    part = _part()
    head, payload = pack_part(part)
    found = read_part(_frame(Kind.PART, head, bytes(payload)), SPEC)
    assert found[:2] == part[:2] and (found.rows == part.rows).all()
    assert read_next(_frame(Kind.END, pack_count(7)), SPEC) == End(7)
    assert read_next(_frame(Kind.WAIT, b""), SPEC) is None


def test_a_part_of_another_size_is_an_error() -> None:
    head, payload = pack_part(_part())
    for data in (b"", bytes(payload[:-1]), bytes(payload) + b"x"):
        with pytest.raises(TransferError, match=r"a part of 4 tokens in .* bytes; expected"):
            read_part(_frame(Kind.PART, head, data), SPEC)
    with pytest.raises(TransferError, match="and at least one token"):
        read_part(_frame(Kind.PART, pack_part(_part())[0][:12] + bytes(36)), SPEC)
    with pytest.raises(TransferError, match="a PART frame with a head of 3 bytes; expected 48"):
        read_part(_frame(Kind.PART, b"abc"), SPEC)
    with pytest.raises(TransferError, match="expected parts or their end, found a DONE frame"):
        read_next(_frame(Kind.DONE, b""), SPEC)


@pytest.mark.parametrize("answer", [(0, 0, 1), (0, 6, 1), (2, 4, 1), (16, 4, 1), (4, 8, 1)])
def test_an_answer_that_does_not_fit_the_offer_is_an_error(answer: tuple[int, int, int]) -> None:
    assert read_accept(_frame(Kind.ACCEPT, pack_accept(8, 4, 9)), OFFER) == (8, 4, 9)
    with pytest.raises(TransferError, match="expected multiples of 4"):
        read_accept(_frame(Kind.ACCEPT, pack_accept(*answer)), OFFER)


def test_a_reason_is_bounded_and_printable() -> None:
    frame = _frame(Kind.REFUSE, pack_reason("no\x1b[31m\ud800" + "x" * 9999))
    assert read_reason(frame).startswith("no?[31m?x") and len(read_reason(frame)) == 4096


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET / HTTP/1.1\r\n" + bytes(24), "another protocol or version"),
        (b"", "another protocol or version"),
        (pack_header(Kind.PART, b"", b"")[:-1] + b"x", "its checksum does not match"),
        (pack_header(99, b"", b""), "kind 99 is unknown"),  # type: ignore[arg-type]
        (pack_header(Kind.PART, bytes(1 << 17), b""), "expected at most 65536 and"),
    ],
)
def test_a_header_that_is_not_one_of_ours_is_an_error(data: bytes, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        read_header(data)


def test_a_payload_is_bounded() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MOST_PAYLOAD + 1

    with pytest.raises(TransferError, match="expected at most"):
        read_header(pack_header(Kind.PART, b"", Huge()))


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_frame_with_any_bit_flipped_is_an_error(at: int, bit: int) -> None:
    head, payload = pack_part(_part())
    data = bytearray(pack_header(Kind.PART, head, payload) + head + bytes(payload))
    at %= len(data)
    data[at] ^= 1 << bit
    with pytest.raises(TransferError):
        header = read_header(data[:HEADER_BYTES])
        end = HEADER_BYTES + header.head_bytes
        header.check(data[HEADER_BYTES:end], data[end:])


@given(kind=st.sampled_from(Kind), head=st.binary(max_size=200), payload=st.binary(max_size=200))
def test_random_bytes_raise_only_our_error(kind: Kind, head: bytes, payload: bytes) -> None:
    frame = _frame(kind, head, payload)
    for read in (
        lambda: read_header(head),
        lambda: read_header(pack_header(kind, b"", b"")[:8] + head),
        lambda: read_offer(frame),
        lambda: read_accept(frame, OFFER),
        lambda: read_count(frame),
        lambda: read_next(frame, SPEC),
        lambda: read_reason(frame),
        lambda: read_chunk(bytes(32), head + payload, SPEC),
        lambda: read_chunk(head, pack_header(Kind.CHUNK, head, payload) + head + payload, SPEC),
    ):
        with suppress(TransferError):
            read()


@given(
    st.dictionaries(
        st.sampled_from(["layers", "heads", "head_dim", "page_size", "dtype", "model", "salt"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.text()
        | st.lists(st.integers())
        | st.dictionaries(st.sampled_from(["name", "digest"]), st.none() | st.text()),
    )
)
def test_an_offer_of_random_fields_is_used_or_is_our_error(fields: dict[str, object]) -> None:
    try:
        offer = read_offer(_changed(**fields))
    except TransferError:
        return
    assert len(offer.digests()) * offer.spec.page_size == len(offer.token_ids)
