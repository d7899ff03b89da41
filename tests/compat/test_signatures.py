"""Our interfaces have the names, parameters, kinds and defaults of the originals."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.compat.differences import DIFFERENCES, NOT_GIVEN
from tests.compat.read_signatures import OBJECTS, facts_of, parameters_of

ORIGINALS = Path(__file__).parent / "originals"
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compat" / "compat.md").read_text(encoding="utf-8")


def original(package: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ORIGINALS / f"{package}.json").read_text(encoding="utf-8"))
    return found


def name_of(key: str) -> str:
    """Our name of an object: openai has two classes ``Completions``."""
    module, _, name = key.rpartition(":")
    chat = module.endswith("chat.completions")
    return name.replace("Completions", "ChatCompletions") if chat else name


def modules(package: str) -> dict[str, str]:
    """Where ours are by name: under the original's dotted names, but for openai's."""
    if package == "openai":
        return {}
    return {path.partition(":")[2]: path.partition(":")[0] for path in OBJECTS[package][1]}


def differences(package: str) -> list[str]:
    """``Object.method(parameter)`` of everything that is missing or different in ours."""
    places = modules(package)
    found = []
    for key, theirs in original(package)["objects"].items():
        name = name_of(key)
        ours = importlib.import_module(f"sdk.compat.{places.get(name, package)}")
        if not hasattr(ours, name):
            found.append(name)
            continue
        facts = facts_of(getattr(ours, name))
        found += [f"{name}({k})" for k in set(theirs.get("keys", ())) - set(facts.get("keys", ()))]
        if theirs.get("members") != facts.get("members"):
            found.append(name)
        found += of_parameters(name, theirs.get("constructor", {}), facts.get("constructor", {}))
        for method, parameters in theirs.get("methods", {}).items():
            label = f"{name}.{method}"
            if method not in facts["methods"]:
                found.append(label)
            else:
                found += of_parameters(label, parameters, facts["methods"][method])
    return found


def of_parameters(label: str, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    return [
        f"{label}({name})"
        for name, facts in theirs.items()
        if not name.startswith("__") and not is_internal(name) and not same(facts, ours.get(name))
    ]


def is_internal(name: str) -> bool:
    """``_grammar`` is a keyword of LlamaGrammar; other names with an underscore are private."""
    return name.startswith("_") and name != "_grammar"


def same(theirs: list[Any], ours: list[Any] | None) -> bool:
    if ours is None or theirs[0] != ours[0] or len(theirs) != len(ours):
        return False
    return theirs == ours or (ours[1] is None and theirs[1] in NOT_GIVEN)


@pytest.mark.parametrize("package", DIFFERENCES)
def test_every_difference_from_the_original_is_in_the_table(package: str) -> None:
    patterns = DIFFERENCES[package]
    found = differences(package)
    unknown = [one for one in found if not any(fnmatchcase(one, each) for each in patterns)]
    assert unknown == []
    unused = [each for each in patterns if not any(fnmatchcase(one, each) for one in found)]
    assert unused == []


@pytest.mark.parametrize("package", DIFFERENCES)
def test_the_page_names_the_version(package: str) -> None:
    facts = original(package)
    assert f"{OBJECTS[package][0]} {facts['version']}" in PAGE


def test_the_page_with_all_options_and_differences_is_current(tmp_path: Path) -> None:
    command = [sys.executable, ".ci/compat_docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    for name in ("sdk", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs" / "compat").mkdir(parents=True)
    (tmp_path / "docs" / "compat" / "compat_reference.md").write_text(
        "an old page", encoding="utf-8"
    )
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "is old: run this script" in done.stderr


def test_the_comparison_notices_names_kinds_and_defaults() -> None:
    def theirs(a, /, b=1, *, c=None): ...  # type: ignore[no-untyped-def]

    def ours(a, b=2, *, d=None): ...  # type: ignore[no-untyped-def]

    found = of_parameters("f", parameters_of(theirs), parameters_of(ours))
    assert found == ["f(a)", "f(b)", "f(c)"]
    assert of_parameters("f", parameters_of(theirs), parameters_of(theirs)) == []


def test_values_are_read_as_json() -> None:
    def function(self, a=(), b=object, c=(1, 2), d=frozenset()): ...  # type: ignore[no-untyped-def]

    assert parameters_of(function) == {
        "a": ["POSITIONAL_OR_KEYWORD", {"empty": "tuple"}],
        "b": ["POSITIONAL_OR_KEYWORD", {"object": "type"}],
        "c": ["POSITIONAL_OR_KEYWORD", [1, 2]],
        "d": ["POSITIONAL_OR_KEYWORD", {"empty": "frozenset"}],
    }
