"""docs/testing.md: its examples run, as code or as the tests of a project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_examples_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scripts = [example for example in EXAMPLES if "def test_" not in example]
    assert len(scripts) >= 6
    names = {"__name__": "docs"}
    for example in scripts:
        exec(compile(example, "docs/testing.md", "exec"), names)


def test_the_tests_on_the_page_pass(pytester: pytest.Pytester) -> None:
    tests = [example for example in EXAMPLES if "def test_" in example]
    assert len(tests) >= 2
    for index, example in enumerate(tests):
        pytester.makepyfile(**{f"test_page_{index}": example})
    plugins = "-p", "no:embedlm", "-p", "embedlm.pytest_plugin", "-p", "no:cacheprovider"
    found = pytester.runpytest(*plugins)
    found.assert_outcomes(passed=sum(example.count("def test_") for example in tests))
