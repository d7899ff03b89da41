"""The engine options that ``embedlm run`` and ``embedlm plan`` share, and advice that uses them."""

from __future__ import annotations

import argparse
import re
from typing import Any

_ARGUMENTS: dict[str, dict[str, Any]] = {
    "memory": {"help": "hard budget for weights, KV cache and workspace, such as 1GiB"},
    "max_model_len": {"type": int, "help": "context length in tokens (default: the model's own)"},
    "max_num_batched_tokens": {"type": int, "help": "the most tokens in one step"},
    "kv_cache_dtype": {"help": "float16 (default), int8, fp8, int4, k8v4, ..."},
    "quantization": {"help": "quantize float matrices while loading: int4, int8, ..."},
    "speculative_config": {
        "metavar": "METHOD|JSON",
        "help": "find draft tokens and verify several in one step: ngram, self, mtp, or a JSON "
        'object with settings, such as {"model": "small.gguf"}',
    },
    "disk_offload": {
        "help": "weights to leave on the disk: a size such as 2GiB, or auto: all that --memory "
        "cannot hold"
    },
    "mmproj": {
        "metavar": "FILE",
        "help": "the GGUF file with the encoder of images of a GGUF model (default: the one beside "
        "it that fits)",
    },
    "weight_cache": {
        "metavar": "SIZE",
        "help": "keep packed weights in the user's cache folder, at most SIZE such as 32GiB, and "
        "map them the next time",
    },
}
#: ``name=value`` in a line of advice.
_KEYWORD = re.compile(r"\b([a-z_]+)=('[^']*'|\w+)")


def add_engine_arguments(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add ``--memory`` and the other shared options."""
    for name, settings in _ARGUMENTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)


def engine_options(args: argparse.Namespace, *more: str) -> dict[str, Any]:
    """The options that were given, of these and of ``more``, as keywords of ``LLM``."""
    given = {name: getattr(args, name) for name in (*_ARGUMENTS, *more)}
    return {name: value for name, value in given.items() if value is not None}


def as_arguments(problem: str, args: argparse.Namespace) -> str:
    """The problem with its advice as command-line arguments; drops advice that has none."""
    breakdown, heading, helps = problem.partition("what would help:\n")
    lines = []
    for line in helps.splitlines():
        if all(name in vars(args) for name, _ in _KEYWORD.findall(line)):
            lines.append(_KEYWORD.sub(_argument, line).replace(", --", " --"))
    return breakdown + heading + "\n".join(lines) if lines else breakdown.rstrip("\n")


def _argument(found: re.Match[str]) -> str:
    value = found[2].strip("'")
    return f"--{found[1].replace('_', '-')} {value}"
