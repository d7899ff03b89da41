"""Run a program of ``tests/compat/programs`` and describe its results: keys and types.

An interpreter that has the original package runs this file (docs/compat/compat.md)::

    /path/to/its/venv/bin/python tests/compat/run_program.py shapes.json MODEL PROGRAM...

It adds to a JSON file: program -> shape. The tests run the same programs with our import lines.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
_IMPORT = re.compile(r"^from ((?:vllm|llama_cpp)[\w.]*) import", re.MULTILINE)


def with_our_import(code: str) -> str:
    """The program with our import lines."""
    return _IMPORT.sub(r"from sdk.compat.\1 import", code)


def run(name: str, model: str, *, ours: bool) -> dict[str, Any]:
    """The ``RESULTS`` of a program."""
    path = PROGRAMS / f"{name}.py"
    code = path.read_text(encoding="utf-8")
    if ours:
        code = with_our_import(code)
        assert "sdk.compat" in code
    names: dict[str, Any] = {"__name__": "program"}
    before, sys.argv = sys.argv, [str(path), model]
    try:
        exec(compile(code, str(path), "exec"), names)
    finally:
        sys.argv = before
    results: dict[str, Any] = names["RESULTS"]
    return results


def shape(value: Any) -> Any:
    """Keys and types: of a list those of its first item, of a dict with ids those of one value."""
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return type(value).__name__
    if _is_float(value):
        return "float"
    if hasattr(value, "ndim"):
        return f"tensor of rank {value.ndim}"
    if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
        return {"int": shape(next(iter(value.values())))}
    if isinstance(value, dict) and value and all(map(_is_float, value.values())):
        return {"str": "float"}  # texts of tokens
    if isinstance(value, dict):
        return {key: shape(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        items = [item for item in value if item is not None]
        return [shape(items[0])] if items else []
    if dataclasses.is_dataclass(value):
        return {one.name: shape(getattr(value, one.name)) for one in dataclasses.fields(value)}
    return {key: shape(one) for key, one in sorted(vars(value).items())}


def _is_float(value: Any) -> bool:
    return isinstance(value, float) or getattr(value, "ndim", None) == 0


def add(file: Path, model: str, programs: Sequence[str]) -> None:
    """Add the shapes of programs to a file."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in programs:
        known[name] = shape(run(name, model, ours=False))
    file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    add(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
