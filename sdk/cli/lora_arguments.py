"""The argument ``--lora`` of commands that answer with adapters."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sdk.api.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    from sdk.api.lora import LoRARequest
    from sdk.llm import LLM

#: The word for no adapter in a chat.
OFF = "off"


def add_lora_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--lora``; ``what``: what the adapters are for."""
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="[NAME=]PATH",
        help="a LoRA adapter: a PEFT folder, a GGUF adapter or a hub id; repeat it for several, "
        + what,
    )
    parser.add_argument(
        "--lora-dtype",
        choices=("auto", "int8"),
        default="auto",
        help="type of their values in memory: int8 is faster with many adapters (default: auto, "
        "16 bits)",
    )


def named_adapters(given: list[str]) -> dict[str, str]:
    """Paths of the adapters by name; without a name an adapter is called as its path ends."""
    found: dict[str, str] = {}
    for text in given:
        name, named, path = text.partition("=")
        path = path if named else text
        name = name if named else path.rstrip("/").rpartition("/")[2]
        if not name or not path or name in found or name == OFF:
            raise RequestError(f"--lora: expected NAME=PATH with a new name, found {text!r}")
        found[name] = path
    return found


def add_adapters(llm: LLM, adapters: dict[str, str]) -> str | None:
    """Load the adapters; the name of the first one."""
    for name, path in adapters.items():
        add_adapter(llm, name, path)
    return next(iter(adapters), None)


def add_adapter(llm: LLM, name: str, path: str | Path) -> LoRARequest:
    """Load an adapter of ``--lora`` and pin it. :raises CheckpointError: it cannot be loaded."""
    try:
        return llm.add_lora(name, path, pin=True)
    except CheckpointError as error:
        raise CheckpointError(f"--lora: expected an adapter of the model; {error}") from error
