"""The fixtures of the pytest plugin, in a project that has only the package."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

PROJECT = """
import sys
from pathlib import Path

made = []

def test_fake(fake_llm):
    assert "torch" not in sys.modules
    made.append(fake_llm("yes"))
    made.append(fake_llm(["a", "b"], max_model_len=64))
    assert made[0].generate("x")[0].outputs[0].text == "yes"
    assert made[1].max_model_len == 64

def test_tiny(tiny_llm):
    from sdk import EngineClosedError, LLM
    for one in made:
        try:
            one.generate("x")
        except EngineClosedError:
            continue
        raise AssertionError("open after its test")
    first, second = tiny_llm(max_model_len=64), tiny_llm(max_model_len=64)
    assert isinstance(first, LLM) and first is not second
    assert first.config.model == second.config.model  # written once
    tiny_llm("q4_k_m", "llama", max_model_len=64)
    folder = tiny_llm("float16", "qwen3", max_model_len=64)
    assert Path(folder.config.model).is_dir()
    assert folder.generate("the cat")[0].finished
"""


@pytest.mark.slow
def test_the_fixtures_make_models_and_close_them(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(PROJECT)
    plugins = "-p", "no:embedlm", "-p", "embedlm.pytest_plugin", "-p", "no:cacheprovider"
    found = pytester.runpytest_subprocess(*plugins)
    found.assert_outcomes(passed=2)


def test_the_fixtures_are_listed_with_their_purpose(pytester: pytest.Pytester) -> None:
    plugins = "-p", "no:embedlm", "-p", "embedlm.pytest_plugin", "-p", "no:cacheprovider"
    found = pytester.runpytest(*plugins, "--fixtures")
    found.stdout.fnmatch_lines(["fake_llm*", "*sdk.testing.FakeLLM*"])
    found.stdout.fnmatch_lines(["tiny_llm*", "*tiny real*"])
