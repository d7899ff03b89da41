"""The options that a search may change, and their values."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dimension:
    """One option. ``ordered``: values are numbers, and a search tries the nearest first. ``why``:
    what the option trades, for the report."""

    name: str
    values: tuple[Any, ...]
    ordered: bool
    why: str


#: In the order in which they are searched: those that matter most come first.
SPACE = (
    Dimension(
        "max_num_batched_tokens",
        (32, 64, 128, 256, 512, 1024),
        True,
        "larger steps run prompts sooner (ttft), smaller ones disturb running answers less (itl)",
    ),
    Dimension(
        "max_num_seqs",
        (4, 8, 16, 32, 64, 128),
        True,
        "more requests at a time wait less (ttft), but each step takes longer (itl)",
    ),
    Dimension(
        "speculative_config",
        (None, "ngram"),
        False,
        "drafts found in the text: faster where answers repeat it; answers stay the same",
    ),
    Dimension(
        "kv_cache_dtype",
        ("auto", "int8"),
        False,
        "half the memory for keys and values; answers change a little (docs/quantization.md)",
    ),
)
NAMES = tuple(dimension.name for dimension in SPACE)


def parse_values(text: str) -> Dimension:
    """``"max_num_seqs=8,16"``: one of the options with other values; ``none`` for no drafts.

    :raises ArgumentTypeError: an unknown option, or no number where one is needed.
    """
    name, _, listed = text.partition("=")
    known = next((one for one in SPACE if one.name == name), None)
    words = tuple(dict.fromkeys(listed.split(",")))
    numbers = all(word.isascii() and word.isdigit() and int(word) for word in words)
    if known is None or not all(words) or (known.ordered and not numbers):
        raise argparse.ArgumentTypeError(
            f"expected NAME=VALUE,... with one of {', '.join(NAMES)}, such as max_num_seqs=8,16; "
            f"found {text!r}"
        )
    if known.ordered:
        return replace(known, values=tuple(sorted(map(int, words))))
    return replace(known, values=tuple(None if word == "none" else word for word in words))


def default_options() -> Options:
    """What ``LLM`` uses for these options."""
    from sdk.api.config import EngineConfig

    config = EngineConfig(model="")
    chosen = {"max_num_batched_tokens": config.step_tokens}
    return {name: chosen.get(name, getattr(config, name)) for name in NAMES}


def shown(options: Mapping[str, Any]) -> str:
    """``"max_num_seqs=16, kv_cache_dtype=int8"``."""
    return ", ".join(f"{name}={value}" for name, value in options.items())
