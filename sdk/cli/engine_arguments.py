"""The options of an engine that ``embedlm run`` and ``embedlm plan`` share, and advice in them."""

from __future__ import annotations

import argparse
import re
from typing import Any

_ARGUMENTS: dict[str, dict[str, Any]] = {
    "memory": {"help": "hard budget for weights, KV cache and workspace: 1GiB"},
    "max_model_len": {"type": int, "help": "tokens of the context (default: the model's own)"},
    "max_num_batched_tokens": {"type": int, "help": "tokens of one step"},
    "kv_cache_dtype": {"help": "float16 (default), int8, fp8, int4, k8v4 ..."},
    "quantization": {"help": "pack float matrices at load: int4, int8 ..."},
    "disk_offload": {"help": "weights left on the disk: 2GiB, or auto: what --memory cannot hold"},
}
#: ``name=value`` of a line of advice.
_KEYWORD = re.compile(r"\b([a-z_]+)=('[^']*'|\w+)")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """``--memory`` and the others."""
    for name, settings in _ARGUMENTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)


def engine_options(args: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Those that were given, and those of ``more``, as keywords of ``LLM``."""
    given = {name: getattr(args, name) for name in (*_ARGUMENTS, *more)}
    return {name: value for name, value in given.items() if value is not None}


def as_arguments(problem: str, args: argparse.Namespace) -> str:
    """What would help, as arguments of the command; without what it has no argument for."""
    sums, heading, helps = problem.partition("what would help:\n")
    lines = []
    for line in helps.splitlines():
        if all(name in vars(args) for name, _ in _KEYWORD.findall(line)):
            lines.append(_KEYWORD.sub(_argument, line).replace(", --", " --"))
    return sums + heading + "\n".join(lines) if lines else sums.rstrip("\n")


def _argument(found: re.Match[str]) -> str:
    value = found[2].strip("'")
    return f"--{found[1].replace('_', '-')} {value}"
