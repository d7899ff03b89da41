"""Make, list, rotate and revoke the API keys of a server."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import get_args

from sdk.api.errors import RequestError
from sdk.api.input_files import USED, reading
from sdk.cli.table import format_table
from sdk.serving.access import Role
from sdk.serving.guard.key_file import add_key, read_keys, revoke_key, rotate_key
from sdk.serving.guard.keys import KeyHolder, Secret
from sdk.serving.guard.limits import Limits

#: Options of ``embedlm keys add`` that set a limit of the holder; also of ``embedlm serve``.
LIMITS = {
    "requests_per_minute": "requests in any 60 seconds",
    "tokens_per_minute": "tokens of prompts and answers in any 60 seconds",
    "concurrent": "requests at one time",
    "tokens_per_day": "tokens from midnight to midnight UTC",
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def action(
        name: str, summary: str, run: Callable[[argparse.Namespace], int]
    ) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=summary, description=summary)
        sub.add_argument(
            "--file", required=True, metavar="FILE", help="the file of hashed keys (mode 0600)"
        )
        sub.set_defaults(action=run)
        return sub

    add = action("add", "make a key and print it once; the file has only its hash", _add)
    add.add_argument("name", help="who gets the key: letters, digits and ._@-")
    add.add_argument(
        "--role",
        action="append",
        choices=get_args(Role),
        help="what the key may do; may be repeated (default: user)",
    )
    add.add_argument("--expires", type=duration, metavar="TIME", help="such as 12h or 90d")
    add.add_argument("--tenant", help="whose share of the model it uses (default: its name)")
    add.add_argument("--weight", type=float, default=1.0, help="of that share (default: 1)")
    add_limit_arguments(add)
    action("list", "names, roles, limits and times; never keys", _list)
    rotate = action(
        "rotate", "make a new key for a name; the old one still works for a while", _rotate
    )
    rotate.add_argument("name")
    rotate.add_argument(
        "--overlap",
        type=duration,
        default=86_400.0,
        metavar="TIME",
        help="how long the old key still works (default: 24h; 0s: not at all)",
    )
    revoke = action("revoke", "remove a name with all its keys, or one key by its id", _revoke)
    revoke.add_argument("name", help="a name, or an id from `embedlm keys list`")


def add_limit_arguments(parser: argparse._ActionsContainer, whose: str = "") -> None:
    """Add ``--requests-per-minute`` and the other limits of a caller."""
    for name, text in LIMITS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, metavar="N", help=f"limit{whose}: {text}")


def limits_of(args: argparse.Namespace) -> Limits:
    """The limits that were given. :raises RequestError: one is invalid."""
    return Limits(**{name: getattr(args, name) for name in LIMITS})


def run(args: argparse.Namespace) -> int:
    code: int = args.action(args)
    return code


def _using(args: argparse.Namespace) -> AbstractContextManager[None]:
    """Around what uses ``--file``, and not around what prints: a pipe that the reader of our output
    has closed is another error."""
    return reading("--file", args.file, "a file of hashed keys", USED)


def duration(text: str) -> float:
    """``"90s"``, ``"15m"``, ``"12h"`` or ``"7d"`` in seconds."""
    found = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"expected a time such as 90s, 15m, 12h or 7d, found {text!r}"
        )
    return float(found[1]) * _SECONDS[found[2]]


def _add(args: argparse.Namespace) -> int:
    holder = KeyHolder(
        args.name,
        frozenset(args.role or ("user",)),
        limits_of(args),
        args.tenant,
        args.weight,
    )
    expires = None if args.expires is None else time.time() + args.expires
    with _using(args):
        key = add_key(args.file, holder, expires)
    print(key)
    _note(f"{args.file}: added {args.name}; the key is shown only now")
    return 0


def _rotate(args: argparse.Namespace) -> int:
    with _using(args):
        key = rotate_key(args.file, args.name, args.overlap)
    print(key)
    _note(f"{args.file}: {args.name} has a new key, which is shown only now")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    with _using(args):
        count = revoke_key(args.file, args.name)
    _note(f"{args.file}: {count} key{'' if count == 1 else 's'} of {args.name} removed")
    return 0


def _list(args: argparse.Namespace) -> int:
    rows: list[Sequence[str]] = []
    with _using(args):
        table = read_keys(args.file)
    for holder in table.holders.values():
        limits = ", ".join(f"{name}={value}" for name, value in holder.limits.given().items())
        for secret in holder.secrets:
            rows.append(
                (
                    holder.name,
                    secret.id,
                    ",".join(sorted(holder.roles)),
                    _day(secret.created),
                    _end(secret),
                    limits or "-",
                )
            )
    if rows:
        print(format_table(("name", "key id", "roles", "created", "expires", "limits"), rows, 6))
    else:
        _note(f"{args.file}: no keys")
    return 0


def _end(secret: Secret) -> str:
    if secret.expires is None:
        return "never"
    return "expired" if secret.expires <= time.time() else _day(secret.expires)


def _day(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        raise RequestError(f"expected seconds since 1970, found {seconds}") from None


def _note(text: str) -> None:
    print(f"embedlm: {text}", file=sys.stderr)
