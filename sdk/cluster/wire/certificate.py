"""A key pair and a certificate that everybody makes who has the same token, and nobody else.

The standard library can use certificates but not make them, so the arithmetic is here: ECDSA on the
curve P-256 (FIPS 186-5), and a certificate in DER (RFC 5280, RFC 5480, SEC 1). It runs once for a
token, on numbers that no other side chooses.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import NamedTuple

_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_BASE = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
#: A guess of the token costs an attacker as much: 30 ms of one core. One of 128 random bits or more
#: cannot be guessed anyway.
_ROUNDS = 100_000
_EC_KEY, _P256 = "1.2.840.10045.2.1", "1.2.840.10045.3.1.7"
_ECDSA_SHA256, _NAME, _CONSTRAINTS = "1.2.840.10045.4.3.2", "2.5.4.3", "2.5.29.19"
Point = tuple[int, int] | None


class KeyPair(NamedTuple):
    """A certificate in DER, and both it and its private key as texts for ``ssl``."""

    certificate: bytes
    certificate_pem: str
    key_pem: str


def key_pair(token: bytes) -> KeyPair:
    """The key pair of a token: always the same."""
    stretched = hashlib.pbkdf2_hmac("sha256", token, b"embedlm key pair 1", _ROUNDS, 48)
    secret = int.from_bytes(stretched, "big") % (_ORDER - 1) + 1  # FIPS 186-5, A.2.1
    point = _times(secret, _BASE)
    assert point is not None
    public = b"\4" + b"".join(value.to_bytes(32, "big") for value in point)
    algorithm = _sequence(_object(_ECDSA_SHA256))
    name = _sequence(_der(0x31, _sequence(_object(_NAME), _der(0x0C, b"embedlm"))))
    always = _sequence(_der(0x17, b"000101000000Z"), _der(0x18, b"99991231235959Z"))
    no_authority = _sequence(_object(_CONSTRAINTS), b"\1\1\xff", _der(4, _sequence()))
    body = _sequence(
        _der(0xA0, _number(2)),  # version 3
        _number(1),
        *(algorithm, name, always, name),
        _sequence(_sequence(_object(_EC_KEY), _object(_P256)), _der(3, b"\0", public)),
        _der(0xA3, _sequence(no_authority)),
    )
    certificate = _sequence(body, algorithm, _der(3, b"\0", _signature(secret, body)))
    key = _sequence(
        _number(1),
        _der(4, secret.to_bytes(32, "big")),
        _der(0xA0, _object(_P256)),
        _der(0xA1, _der(3, b"\0", public)),
    )
    return KeyPair(certificate, _pem("CERTIFICATE", certificate), _pem("EC PRIVATE KEY", key))


def _add(a: Point, b: Point) -> Point:
    if a is None or b is None:
        return a or b
    if a[0] == b[0]:
        if (a[1] + b[1]) % _P == 0:
            return None
        slope = 3 * (a[0] * a[0] - 1) * pow(2 * a[1], -1, _P)
    else:
        slope = (b[1] - a[1]) * pow(b[0] - a[0], -1, _P)
    x = (slope * slope - a[0] - b[0]) % _P
    return x, (slope * (a[0] - x) - a[1]) % _P


def _times(count: int, point: Point) -> Point:
    total: Point = None
    while count:
        if count & 1:
            total = _add(total, point)
        point, count = _add(point, point), count >> 1
    return total


def _signature(secret: int, data: bytes) -> bytes:
    """ECDSA. Its secret number follows from the key and the data, so it is made only once."""
    digest = hashlib.sha256(data).digest()
    seed = hmac.digest(secret.to_bytes(32, "big"), b"1" + digest, "sha512")
    once = int.from_bytes(seed, "big") % (_ORDER - 1) + 1
    point = _times(once, _BASE)
    assert point is not None
    r = point[0] % _ORDER
    s = pow(once, -1, _ORDER) * (int.from_bytes(digest, "big") + r * secret) % _ORDER
    return _sequence(_number(r), _number(s))


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8 or 1, "big")
    if len(body) > 127:
        size = bytes([0x80 | len(size)]) + size
    return bytes([tag]) + size + body


def _sequence(*parts: bytes) -> bytes:
    return _der(0x30, *parts)


def _number(value: int) -> bytes:
    return _der(2, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _object(identifier: str) -> bytes:
    first, second, *others = map(int, identifier.split("."))
    body = bytes([40 * first + second])
    for value in others:
        groups = [value & 127]
        while value := value >> 7:
            groups.append(0x80 | (value & 127))
        body += bytes(reversed(groups))
    return _der(6, body)


def _pem(kind: str, data: bytes) -> str:
    text = base64.encodebytes(data).decode()
    return f"-----BEGIN {kind}-----\n{text}-----END {kind}-----\n"
