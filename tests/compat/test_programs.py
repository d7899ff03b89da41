"""Programs written for vLLM and llama-cpp-python run with our import lines.

``originals/*_shapes.json`` has the keys and types of their results with the original packages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk.testing import tiny_model
from tests.compat.differences import SHAPES
from tests.compat.run_program import PROGRAMS, run, shape, with_our_import

ORIGINALS = Path(__file__).parent / "originals"
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py"))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("programs"), "f16")


def kind(value: Any) -> str:
    if value == []:
        return "empty"
    return value if isinstance(value, str) else type(value).__name__


def differences(theirs: Any, ours: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """(key, type there, type here) of everything that differs."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted({*theirs, *ours}):
            missing = "missing"
            yield from differences(theirs.get(name, missing), ours.get(name, missing), name)
    elif isinstance(theirs, list) and isinstance(ours, list) and theirs and ours:
        yield from differences(theirs[0], ours[0], key)
    elif theirs != ours:
        yield key, kind(theirs), kind(ours)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_runs_and_its_results_have_the_same_shape(
    name: str, gguf: Path, golden: Path
) -> None:
    package = "vllm" if name.startswith("vllm") else "llama_cpp"
    model = golden / "arch-llama3" / "hf" if package == "vllm" else gguf
    found = shape(run(name, str(model), ours=True))
    shapes = json.loads((ORIGINALS / f"{package}_shapes.json").read_text(encoding="utf-8"))
    unknown = {one for one in differences(shapes[name], found) if one not in SHAPES}
    assert unknown == set()


def test_only_import_lines_change() -> None:
    for name in NAMES:
        code = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
        pairs = zip(code.splitlines(), with_our_import(code).splitlines(), strict=True)
        changed = [(before, after) for before, after in pairs if before != after]
        assert changed
        assert all(before.startswith("from ") for before, _ in changed)


def test_the_comparison_notices_keys_and_types() -> None:
    theirs = {"a": "int", "b": [{"c": "str"}], "d": "NoneType"}
    ours = {"a": "str", "b": [{"c": "str", "e": "int"}], "d": ["int"]}
    assert list(differences(theirs, ours)) == [
        ("a", "int", "str"),
        ("e", "missing", "int"),
        ("d", "NoneType", "list"),
    ]
    assert list(differences(theirs, theirs)) == []
