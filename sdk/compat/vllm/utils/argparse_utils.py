"""vLLM's parser of command lines."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser for which ``_`` and ``-`` are the same in names.

    ``--pooler-config.pooling_type MEAN`` is a key of an option that takes JSON.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("add_json_tip", None)
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Read arguments; also what ``parse_args`` does."""
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._plain(given), namespace)

    def _plain(self, given: list[str]) -> list[str]:
        """Arguments with dashes in names, and keys of one option as one JSON object."""
        plain: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        rest = iter(given)
        for arg in rest:
            if arg == "--":
                return [*plain, *_as_json(objects), arg, *rest]
            if not arg.startswith("--"):
                plain.append(arg)
                continue
            name, equals, value = arg.partition("=")
            option, dot, path = name.partition(".")
            option = option.replace("_", "-")
            if option == "--config" and "--config" not in self._option_string_actions:
                self.error("--config: files of options are not read; pass them as arguments")
            if not dot:
                plain.append(f"{option}{equals}{value}")
                continue
            _put(objects.setdefault(option, {}), path, value if equals else next(rest, ""))
        return [*plain, *_as_json(objects)]


def _put(target: dict[str, Any], path: str, text: str) -> None:
    """``path``: keys with dots between; ``+`` at the end adds to a list."""
    *parents, last = path.split(".")
    for parent in parents:
        target = target.setdefault(parent, {})
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if last.endswith("+"):
        items = text.split(",") if value is text else [value]
        target.setdefault(last[:-1], []).extend(items)
    else:
        target[last] = value


def _as_json(objects: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{option}={json.dumps(value)}" for option, value in objects.items()]
