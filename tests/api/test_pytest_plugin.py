"""``pytest --llm-model``: limits as tests, what is written, and what makes no sense."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

import sdk

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
Run = Callable[..., pytest.RunResult]
#: Of the golden with 8 bits, whose text is short: seconds are spent in pytest alone.
SMALL = ("--llm-windows", "1", "--llm-tokens", "16")


@pytest.fixture
def prose(pytester: pytest.Pytester) -> Path:
    return pytester.makefile(".txt", prose="Hello there, how are you? I am well. " * 40)


@pytest.fixture
def run(pytester: pytest.Pytester, golden: Path, prose: Path) -> Run:
    """``run(*options, model="Q4_0")``, as in an environment where the package is installed."""

    def call(*options: str, model: str = "Q4_0") -> pytest.RunResult:
        path = golden / f"gguf-{model}" / "model.gguf"
        return pytester.runpytest(
            *("-p", "no:embedlm", "-p", "embedlm.pytest_plugin", "-p", "no:cacheprovider"),
            *("--llm-model", str(path), "--llm-text", str(prose), *SMALL, *options),
        )

    return call


def reference(golden: Path) -> tuple[str, str]:
    return "--llm-reference", str(golden / "gguf-Q8_0" / "model.gguf")


def test_a_model_within_its_limits_passes_and_is_shown(
    run: Run, golden: Path, pytester: pytest.Pytester
) -> None:
    found = run(*reference(golden), "--llm-max-kld", "5", "--llm-max-memory", "64MiB", "-v")
    found.assert_outcomes(passed=1)
    found.stdout.fnmatch_lines(["*embedlm::*Q4_0*PASSED*", "1 sequences of 16 tokens;*", "model *"])
    assert found.ret == 0


def test_a_model_beyond_its_limits_fails_with_each_of_them(run: Run, golden: Path) -> None:
    found = run(*reference(golden), "--llm-max-kld", "1e-9", "--llm-min-top1", "1")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["kl_mean: expected --llm-max-kld 1e-09, found *"])
    assert found.ret == 1
    assert "Traceback" not in found.stdout.str()


def test_a_budget_that_is_too_small_fails_with_the_sums(run: Run) -> None:
    found = run("--llm-max-memory", "1MiB")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*the model does not fit:", "*weights*", "*budget*1.0 MiB*"])


def test_the_numbers_are_those_of_evaluate_in_every_form(
    run: Run, golden: Path, prose: Path, pytester: pytest.Pytester
) -> None:
    files = ["--llm-json", "out.json", "--llm-markdown", "out.md", "--llm-plot", "out.png"]
    found = run(*reference(golden), "--llm-compute", "exact", "--junitxml", "out.xml", *files)
    found.assert_outcomes(passed=1)
    path = golden / "gguf-Q4_0" / "model.gguf"
    expected = sdk.evaluate(
        path, reference(golden)[1], text=prose.read_text(), windows=1, tokens=16, compute="exact"
    )
    [row] = json.loads((pytester.path / "out.json").read_text())
    assert row["kl_mean"] == expected.kl_mean > 0
    assert row["kv_bytes_per_token"] == expected.kv_bytes_per_token
    assert f"| {expected.kl_mean:.4f} |" in (pytester.path / "out.md").read_text()
    assert (pytester.path / "out.png").read_bytes().startswith(b"\x89PNG")
    properties = ElementTree.parse(pytester.path / "out.xml").iter("property")
    assert {p.get("name"): p.get("value") for p in properties}["kl_mean"] == str(expected.kl_mean)


def test_a_users_own_tests_run_beside_and_k_chooses(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_own(): pass")
    run("-k", "own").assert_outcomes(passed=1, deselected=1)
    run("--deselect", "nothing").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--llm-max-memory", "lots"), "*--llm-max-memory: expected a size such as '2GiB'*'lots'*"),
        (("--llm-max-kld", "-1"), "*--llm-max-kld: expected a number of at least 0, found -1*"),
        (("--llm-max-kld", "nan"), "*expected a number of at least 0, found nan*"),
        (("--llm-min-top1", "much"), "*--llm-min-top1: invalid*'much'*"),
        (("--llm-json", "/nowhere/a"), "*--llm-json: *that can be written, found /nowhere/a*"),
        (("--llm-markdown", "/"), "*--llm-markdown: *that can be written, found /"),
    ],
)
def test_a_limit_that_is_none_is_a_usage_error(
    run: Run, options: tuple[str, ...], expected: str
) -> None:
    found = run(*options)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines([expected])


def test_a_limit_without_a_model_is_a_usage_error(pytester: pytest.Pytester) -> None:
    found = pytester.runpytest(
        "-p", "no:embedlm", "-p", "embedlm.pytest_plugin", "--llm-max-kld", "0.1"
    )
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*--llm-max-kld: expected --llm-model with it, found none*"])


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = run("--llm-plot", "out.png")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(['*matplotlib is not installed: pip install "embedlm[[]bench]"*'])


def test_a_missing_model_fails_in_one_line(run: Run) -> None:
    found = run(model="nowhere")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(["*gguf-nowhere/model.gguf: *no such file*"])


def test_the_plugin_imports_neither_torch_nor_the_engine_until_a_model_is_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # a bare checkout
    pytester.makepyfile(
        "import sys\ndef test_light():\n    assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    found = pytester.runpytest_subprocess("-p", "no:embedlm", "-p", "embedlm.pytest_plugin")
    found.assert_outcomes(passed=1)
