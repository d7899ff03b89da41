"""Packed weights in the user's cache folder: list them, remove them, make them fewer.

Options of LLM, run and serve (weight_cache) put them there. A process that uses weights which are
removed keeps them until it ends.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from sdk.api.sizes import WEIGHT_CACHE_BYTES, format_bytes, parse_bytes
from sdk.cli.table import format_table
from sdk.engine.weight_cache.folder import (
    CachedWeights,
    entries,
    named,
    prune,
    prune_uses,
    remove,
    remove_uses,
    weights_folder,
)

#: Digits of a name that are shown.
_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def action(
        name: str, summary: str, run: Callable[[argparse.Namespace], None]
    ) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=summary, description=summary)
        sub.set_defaults(action=run)
        return sub

    action("ls", "the weights, those that were used last first", _ls)
    rm = action("rm", "remove weights", _rm)
    rm.add_argument(
        "names", nargs="+", metavar="NAME", help="of embedlm cache ls, or its beginning"
    )
    prune_ = action("prune", "remove what was not used for the longest time", _prune)
    prune_.add_argument(
        "--max-size",
        default=str(WEIGHT_CACHE_BYTES),
        metavar="SIZE",
        help=f"what may stay, 0 for nothing (default: {format_bytes(WEIGHT_CACHE_BYTES)})",
    )


def run(args: argparse.Namespace) -> int:
    args.action(args)
    return 0


def _ls(args: argparse.Namespace) -> None:
    found = entries(weights_folder())
    rows = [
        (
            one.name[:_SHOWN],
            one.about.get("model", "?"),
            ", ".join(v for name, v in one.about.items() if name not in ("model", "uses")),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used)),
            format_bytes(one.nbytes),
        )
        for one in found
    ]
    if rows:
        print(format_table(("name", "model", "for", "last used", "size"), rows, left=4))
    total = format_bytes(sum(one.nbytes for one in found))
    print(f"{len(found)} in {weights_folder()}, together {total}")


def _rm(args: argparse.Namespace) -> None:
    folder = weights_folder()
    for one in [named(folder, name) for name in args.names]:
        remove_uses(folder, one.about.get("uses", one.name))
        if remove(folder, one.name):
            _removed(one)


def _prune(args: argparse.Namespace) -> None:
    folder = weights_folder()
    most = 0 if args.max_size == "0" else parse_bytes(args.max_size, "--max-size")
    for one in prune(folder, most):
        _removed(one)
    if not most:
        prune_uses(folder, 0)


def _removed(one: CachedWeights) -> None:
    print(f"removed {one.name[:_SHOWN]} {one.about.get('model', '?')} {format_bytes(one.nbytes)}")
