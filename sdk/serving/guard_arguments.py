"""The options of ``embedlm serve`` for keys, limits, quotas, the audit log and origins."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.input_files import USED, reading
from sdk.api.sizes import parse_bytes
from sdk.serving.guard import (
    Anyone,
    AuditLog,
    Authenticate,
    BodyLimits,
    ByKey,
    GuardedAccess,
    HttpLimits,
    KeyFile,
    Meter,
    Origins,
)
from sdk.serving.guard.http_limits import BODY_WITH_IMAGES
from sdk.serving.guard.origins import is_loopback
from sdk.serving.keys_command import add_limit_arguments, limits_of

_KEY_VARIABLE = "EMBEDLM_API_KEY"
#: Limits that exist for each key are options of their own; these go through ``--limit``.
_LIMIT_TYPES = (HttpLimits, BodyLimits)


@dataclass(frozen=True, slots=True)
class Protection:
    """What protects a server."""

    access: GuardedAccess
    http: HttpLimits
    body: BodyLimits
    origins: Origins


def add_guard_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--keys`` and the others. docs/security.md describes them."""
    group = parser.add_argument_group("protection", "docs/security.md describes them")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"a key that every request must have; other users of this machine can see it here: "
        f"better in the environment as {_KEY_VARIABLE}",
    )
    group.add_argument("--keys", metavar="FILE", help="hashed keys, made by `embedlm keys add`")
    group.add_argument(
        "--share-prefixes",
        action="store_true",
        help="keys share cached prefixes: faster, but each can measure what others asked",
    )
    add_limit_arguments(group, " of each key without its own")
    group.add_argument(
        "--usage-file", metavar="FILE", help="keeps the tokens per day over a restart"
    )
    group.add_argument("--audit-log", metavar="FILE", help="one JSON line per request")
    group.add_argument(
        "--audit-prompts", action="store_true", help="with the request itself in each line"
    )
    group.add_argument(
        "--audit-on-error",
        choices=("open", "closed"),
        default="open",
        help="closed: accept no request while the log cannot be written (%(default)s)",
    )
    group.add_argument("--audit-max-bytes", default="100MiB", metavar="SIZE", help="%(default)s")
    group.add_argument("--audit-backups", type=int, default=5, metavar="N", help="%(default)s")
    group.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages that may use the server, such as https://chat.example.com",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name by which clients may address the server (on 127.0.0.1: besides localhost)",
    )
    group.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another limit, such as body_bytes=16MiB or requests=64",
    )


@contextlib.contextmanager
def protection(args: argparse.Namespace) -> Iterator[Protection]:
    """What the arguments ask for; its files are closed afterwards.

    :raises RequestError: an option is invalid. :raises OSError: a file cannot be used.
    """
    http, body = _limits(args.limit)
    origins = Origins.for_address(args.host, args.allowed_host, args.allowed_origin)
    limits = limits_of(args)
    audit = None
    if args.audit_log is not None:
        audit = AuditLog(
            args.audit_log,
            max_bytes=parse_bytes(args.audit_max_bytes, "--audit-max-bytes"),
            backups=args.audit_backups,
            on_error=args.audit_on_error,
        )
    with contextlib.ExitStack() as stack:
        if audit is not None:
            stack.callback(audit.close)
        with reading("--usage-file", args.usage_file or "", "a file of tokens per day", USED):
            meter = Meter(args.usage_file)
        stack.callback(meter.close)
        access = GuardedAccess(
            _authenticate(args),
            limits=limits,
            meter=meter,
            audit=audit,
            audit_requests=args.audit_prompts,
        )
        yield Protection(access, http, body, origins)


def with_images(guard: Protection, args: argparse.Namespace) -> Protection:
    """For models that read images: with room for them in a body, unless a limit was given."""
    if any(word.partition("=")[0] == "body_bytes" for word in args.limit):
        return guard
    most = max(guard.http.body_bytes, min(BODY_WITH_IMAGES, guard.http.buffered_bytes))
    return replace(guard, http=replace(guard.http, body_bytes=most))


def warning(args: argparse.Namespace) -> str | None:
    """What an operator should know before others find out."""
    if is_loopback(args.host) or args.keys is not None or _plain_keys(args):
        return None
    return f"everybody who can reach {args.host} may use the models: set --keys or {_KEY_VARIABLE}"


def _authenticate(args: argparse.Namespace) -> Authenticate:
    keys = _plain_keys(args)
    if not keys and args.keys is None:
        return Anyone()
    file = None if args.keys is None else _key_file(args.keys)
    return ByKey(keys, file, share_prefixes=args.share_prefixes)


def _key_file(path: str) -> KeyFile:
    with reading("--keys", path, "a file of hashed keys"):
        return KeyFile(path)


def _plain_keys(args: argparse.Namespace) -> list[str]:
    keys = list(args.api_key or ())
    value = os.environ.get(_KEY_VARIABLE, "")
    return [*keys, value] if value else keys


def _limits(words: Sequence[str]) -> tuple[HttpLimits, BodyLimits]:
    """The values of ``--limit NAME=VALUE``. :raises RequestError: naming what is wrong."""
    given: dict[str, Any] = {}
    known = {field.name: field for kind in _LIMIT_TYPES for field in fields(kind)}
    for word in words:
        name, _, text = word.partition("=")
        if name not in known:
            raise RequestError(
                f"--limit {word}: expected NAME=VALUE with one of {', '.join(sorted(known))}"
            )
        given[name] = _value(name, text, whole=known[name].type == "int")
    made = [
        kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given})
        for kind in _LIMIT_TYPES
    ]
    http, body = made
    assert isinstance(http, HttpLimits) and isinstance(body, BodyLimits)
    return http, body


def _value(name: str, text: str, *, whole: bool) -> float:
    if name.endswith("_bytes"):
        return parse_bytes(text, f"--limit {name}")
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number of seconds"
        raise RequestError(f"--limit {name}: expected {kind}, found {text!r}") from None
