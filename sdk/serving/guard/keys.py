"""API keys: how they are made, stored and found."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.serving.access import ALL_ROLES, Role
from sdk.serving.guard.limits import UNLIMITED, Limits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
#: Longer header values are refused before they are hashed.
MOST_KEY_BYTES = 512


def new_key() -> str:
    """A random key: ``sk-``, 12 digits that name it in lists and logs, and 192 random bits."""
    return f"sk-{secrets.token_hex(6)}-{secrets.token_hex(24)}"


def digest_of(key: bytes) -> bytes:
    """SHA-256 of a key: what is stored of it.

    A slow hash (bcrypt, scrypt) protects passwords, which have few bits. A key of ours has 192
    random bits: nobody can try them all, however fast the hash is. A slow hash would cost 50 ms or
    more per request and would let anyone load the server with wrong keys. NIST SP 800-63B (section
    5.1.2.2) asks for a salted, slow hash only of look-up secrets with less than 112 bits.
    """
    return hashlib.sha256(key).digest()


@dataclass(frozen=True, slots=True)
class Secret:
    """One key of a caller, without the key. Times are seconds since 1970; ``None``: never."""

    id: str
    digest: bytes
    created: float
    expires: float | None = None

    @classmethod
    def of(cls, key: str, *, created: float, expires: float | None = None) -> Secret:
        """What is stored of ``key``."""
        found = re.fullmatch(r"sk-([0-9a-f]{12})-[0-9a-f]{48}", key)
        digest = digest_of(key.encode())
        return cls(found[1] if found else digest.hex()[:12], digest, created, expires)


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Someone who has keys: during a rotation two, otherwise one.

    ``tenant`` and ``weight``: the share of the model (by default a tenant with the holder's name).
    ``limits``: of all keys of the holder together; where there is none, the server's apply.

    :raises RequestError: a field is invalid.
    """

    name: str
    roles: frozenset[Role] = frozenset(("user",))
    limits: Limits = UNLIMITED
    tenant: str | None = None
    weight: float = 1.0
    secrets: tuple[Secret, ...] = ()

    def __post_init__(self) -> None:
        for what, text in (("name", self.name), ("tenant", self.tenant)):
            if text is not None and not (isinstance(text, str) and _NAME.fullmatch(text)):
                raise RequestError(
                    f"{what}: expected up to 64 letters, digits and ._@- (a letter or digit "
                    f"first), found {safe_repr(text)}"
                )
        if not self.roles or not self.roles <= ALL_ROLES:
            raise RequestError(
                f"role of {self.name}: expected one or more of {', '.join(sorted(ALL_ROLES))}, "
                f"found {safe_repr(sorted(map(str, self.roles)))}"
            )
        number = isinstance(self.weight, int | float) and not isinstance(self.weight, bool)
        if not (number and 0 < self.weight <= 1e6):
            raise RequestError(
                f"weight of {self.name}: expected a number above 0 and at most 1000000, "
                f"found {safe_repr(self.weight)}"
            )

    def to_json(self) -> dict[str, object]:
        """For a file of keys."""
        return {
            "name": self.name,
            "roles": sorted(self.roles),
            "tenant": self.tenant,
            "weight": self.weight,
            "limits": self.limits.given(),
            "keys": [
                {
                    "id": secret.id,
                    "sha256": secret.digest.hex(),
                    "created": secret.created,
                    "expires": secret.expires,
                }
                for secret in self.secrets
            ],
        }

    @classmethod
    def from_json(cls, value: object) -> KeyHolder:
        """Read one. :raises RequestError: naming what is wrong."""
        fields = _fields(value, "name", "roles", "tenant", "weight", "limits", "keys")
        name, roles, limits = (
            fields.get("name"),
            fields.get("roles", ["user"]),
            fields.get("limits"),
        )
        if not isinstance(roles, list) or not all(isinstance(role, str) for role in roles):
            raise RequestError(f"roles: expected a list of strings, found {safe_repr(roles)}")
        keys = fields.get("keys", [])
        if not isinstance(keys, list):
            raise RequestError(f"keys: expected a list, found {safe_repr(keys)}")
        return cls(
            name=cast(str, name) if name is not None else "",
            roles=frozenset(cast("list[Role]", roles)),
            limits=Limits.from_mapping(_fields(limits or {})),
            tenant=cast("str | None", fields.get("tenant")),
            weight=cast(float, fields.get("weight", 1.0)),
            secrets=tuple(_secret(key) for key in keys),
        )


class KeyTable:
    """Finds who a key belongs to. Immutable; a changed file makes a new one.

    A key is found by its SHA-256 in a dictionary, so the time does not depend on the number of keys
    nor on which key it is. Timing reveals nothing useful either: what is compared with stored
    digests is a digest, and to choose its leading bytes a caller would have to search for a
    preimage. The last comparison is constant-time all the same.

    :raises RequestError: a name, a key or an id occurs twice.
    """

    def __init__(self, holders: Iterable[KeyHolder]) -> None:
        self.holders: dict[str, KeyHolder] = {}
        self._found: dict[bytes, tuple[KeyHolder, Secret]] = {}
        for holder in holders:
            if holder.name in self.holders:
                raise RequestError(f"the name {holder.name} occurs twice")
            self.holders[holder.name] = holder
            for secret in holder.secrets:
                if secret.digest in self._found:
                    other = self._found[secret.digest][0].name
                    raise RequestError(f"{other} and {holder.name} have the same key")
                self._found[secret.digest] = (holder, secret)

    def __len__(self) -> int:
        return len(self._found)

    def find(self, key: bytes) -> tuple[KeyHolder, Secret] | None:
        """The holder of ``key`` (which may have expired), or ``None`` if nobody has it."""
        digest = digest_of(key)
        found = self._found.get(digest)
        if found is None or not hmac.compare_digest(found[1].digest, digest):
            return None
        return found


def _fields(value: object, *known: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise RequestError(f"expected an object, found {safe_repr(value)}")
    unknown = [name for name in value if known and name not in known]
    if unknown:
        raise RequestError(f"{safe_repr(unknown[0])} is unknown; known are {', '.join(known)}")
    return value


def _secret(value: object) -> Secret:
    fields = _fields(value, "id", "sha256", "created", "expires")
    name, digest = fields.get("id"), fields.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise RequestError(f"sha256: expected 64 hexadecimal digits, found {safe_repr(digest)}")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"id: expected letters and digits, found {safe_repr(name)}")
    times = {what: fields.get(what) for what in ("created", "expires")}
    for what, time in times.items():
        number = isinstance(time, int | float) and not isinstance(time, bool)
        if not (number or (time is None and what == "expires")):
            raise RequestError(f"{what}: expected seconds since 1970, found {safe_repr(time)}")
    return Secret(
        name,
        bytes.fromhex(digest),
        cast(float, times["created"]),
        cast("float | None", times["expires"]),
    )
