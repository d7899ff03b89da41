"""Who sends a request: found by the key in its headers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from sdk.api.errors import RequestError
from sdk.api.flags import check_flags
from sdk.serving.access import ALL_ROLES, Caller, Client, Headers, Refused
from sdk.serving.guard.key_file import KeyFile
from sdk.serving.guard.keys import MOST_KEY_BYTES, KeyHolder, KeyTable, Secret
from sdk.serving.guard.limits import UNLIMITED, Limits


@dataclass(frozen=True, slots=True)
class KnownCaller(Caller):
    """A caller with its own limits. ``key_id`` and ``client`` are for the audit log."""

    limits: Limits = UNLIMITED
    key_id: str = ""
    client: str = ""


class Authenticate(Protocol):
    """Finds out who sends a request. A host may write its own, e.g. for sessions or JWTs."""

    async def __call__(self, headers: Headers, client: Client) -> Caller:
        """Who it is; a :class:`KnownCaller` may have its own limits. :raises Refused: nobody."""


class Anyone:
    """Everybody is the same caller, with every role: a server without keys."""

    async def __call__(self, headers: Headers, client: Client) -> Caller:
        return KnownCaller(client=address(client))


class ByKey:
    """Finds the caller by an API key: ``Authorization: Bearer KEY`` or ``x-api-key: KEY``.

    ``keys``: plain keys, all of one caller with every role (the simple case). ``file``: hashed keys
    with names and roles. ``share_prefixes``: callers may share cached prefixes; by default each has
    a salt of its own, because the time to the first token tells whether a prefix is cached.
    ``wall``: seconds since 1970, for keys that expire.

    :raises RequestError: no key at all, or an invalid one.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        file: KeyFile | None = None,
        *,
        share_prefixes: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        check_flags(share_prefixes=share_prefixes)
        plain = tuple(dict.fromkeys(keys))
        for key in plain:
            if not 1 <= len(key) <= MOST_KEY_BYTES or not key.isascii() or not key.isprintable():
                raise RequestError(
                    f"API key: expected 1 to {MOST_KEY_BYTES} printable ASCII characters"
                )
            if " " in key:
                raise RequestError("API key: must not contain spaces")
        if not plain and file is None:
            raise RequestError("expected an API key or a file of keys")
        stored = tuple(Secret.of(key, created=0) for key in plain)
        self._plain = KeyTable([KeyHolder("key", ALL_ROLES, secrets=stored)])
        self._file = file
        self._share = share_prefixes
        self._wall = wall

    async def __call__(self, headers: Headers, client: Client) -> Caller:
        key = key_in(headers)
        if self._file is not None and self._file.due():
            await asyncio.to_thread(self._file.reload)
        found = self._plain.find(key)
        if found is None and self._file is not None:
            found = self._file.table.find(key)
        if found is None:
            raise _unknown("Incorrect API key provided.")
        holder, secret = found
        if secret.expires is not None and secret.expires <= self._wall():
            raise _unknown("This API key has expired. Ask for the new one.")
        tenant = holder.tenant or holder.name
        return KnownCaller(
            name=holder.name,
            tenant=tenant,
            weight=holder.weight,
            cache_salt=None if self._share else tenant,
            roles=holder.roles,
            limits=holder.limits,
            key_id=secret.id,
            client=address(client),
        )


def key_in(headers: Headers) -> bytes:
    """The key in the headers of a request. :raises Refused: there is none, or not exactly one."""
    found: set[bytes] = set()
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() != b"bearer":
                raise _unknown("Expected the header 'Authorization: Bearer KEY'.")
            found.add(key.strip())
        elif name == b"x-api-key":
            found.add(value.strip())
    if len(found) > 1:
        raise Refused(400, "The request has several API keys; send one.", "invalid_api_key")
    key = found.pop() if found else b""
    if not key:
        raise _unknown("No API key: send the header 'Authorization: Bearer KEY'.")
    if len(key) > MOST_KEY_BYTES:
        raise _unknown("Incorrect API key provided.")
    return key


def address(client: Client) -> str:
    """The peer's address for logs."""
    return client[0] if client else ""


def _unknown(message: str) -> Refused:
    return Refused(401, message, "invalid_api_key", {"www-authenticate": "Bearer"})
