"""``pytest --llm-model FILE``: limits on a quantized model's accuracy and memory, as tests.

``embedlm.pytest_plugin`` declares the options and registers :class:`Models` if a model is given.
Each model becomes a test item that runs :func:`sdk.evaluate` and fails if a limit is exceeded.
Neither torch nor the engine is imported before such an item runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sdk.api.errors import RequestError, SdkError
from sdk.api.input_files import read_text
from sdk.api.sizes import parse_bytes
from sdk.cli.text_file import check_writable

if TYPE_CHECKING:
    from sdk.evaluating import Evaluation

#: Options of :class:`sdk.LLM`, ``--llm-kv-cache-dtype`` and so on.
_ENGINE = ("compute", "kv_cache_dtype", "quantization", "num_threads")
#: Option of a limit -> (field of an evaluation, whether more is worse).
_LIMITS = {
    "max_kld": ("kl_mean", True),
    "max_kld_p99": ("kl_p99", True),
    "min_top1": ("top1", False),
    "max_perplexity": ("perplexity", True),
}
_NODE = "embedlm::"


class Models:
    """The items of one test run, and their results."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._found: list[dict[str, Any]] = []
        try:
            if config.getoption("llm_max_memory") is not None:
                parse_bytes(config.getoption("llm_max_memory"), "--llm-max-memory")
            for name in _WRITERS:
                check_writable(f"--llm-{name}", config.getoption(f"llm_{name}"))
            if config.getoption("llm_plot") is not None:
                from sdk.evaluating.plot import check_matplotlib

                check_matplotlib("--llm-plot")
        except RequestError as error:
            raise pytest.UsageError(str(error)) from None

    @pytest.hookimpl(tryfirst=True)  # before -k and -m choose
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        for model in dict.fromkeys(self._config.getoption("llm_model")):
            items.append(ModelItem.from_parent(session, name=model, nodeid=_NODE + model))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.nodeid.startswith(_NODE) and report.user_properties:
            self._found.append(dict(report.user_properties))

    def pytest_sessionfinish(self) -> None:
        if not self._found or hasattr(self._config, "workerinput"):
            return
        for name, write in _WRITERS.items():
            path = self._config.getoption(f"llm_{name}")
            if path is not None:
                write(Path(path), self._evaluations())

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._found:
            return
        from sdk.cli.evaluate import cells, heading
        from sdk.cli.table import format_table

        found = self._evaluations()
        terminalreporter.section("embedlm")
        terminalreporter.write_line(f"{heading(found[0])}\n\n{format_table(*cells(found))}")

    def _evaluations(self) -> list[Evaluation]:
        from sdk.evaluating import Evaluation

        names = {field.name for field in fields(Evaluation)}  # other plugins may add properties
        return [
            Evaluation(**{name: value for name, value in one.items() if name in names})
            for one in self._found
        ]


class ModelItem(pytest.Item):
    """One model, tested against the limits given on the command line."""

    def runtest(self) -> None:
        from sdk.evaluating import evaluate

        option = self.config.getoption
        given = {name: option(f"llm_{name}") for name in _ENGINE}
        given["memory"] = option("llm_max_memory")
        found = evaluate(
            self.name,
            option("llm_reference"),
            text=None
            if option("llm_text") is None
            else read_text("--llm-text", option("llm_text")),
            windows=option("llm_windows"),
            tokens=option("llm_tokens"),
            on_progress=lambda stage, done, total: None,  # no progress bar between pytest's dots
            **{name: value for name, value in given.items() if value is not None},
        )
        self.user_properties += found.to_dict().items()
        exceeded = []
        for name, (field, more_is_worse) in _LIMITS.items():
            limit, value = option(f"llm_{name}"), getattr(found, field)
            if limit is not None and not (value <= limit if more_is_worse else value >= limit):
                flag = name.replace("_", "-")
                exceeded.append(f"{field}: expected --llm-{flag} {limit:g}, found {value:.5g}")
        if exceeded:
            pytest.fail("\n".join(exceeded), pytrace=False)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, SdkError | OSError):
            return f"{self.name}: {excinfo.value}"  # the message is enough, no traceback needed
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, _NODE + self.name


def _write_json(path: Path, found: list[Evaluation]) -> None:
    path.write_text(json.dumps([one.to_dict() for one in found], indent=2) + "\n", encoding="utf-8")


def _write_markdown(path: Path, found: list[Evaluation]) -> None:
    from sdk.cli.evaluate import to_markdown

    path.write_text(to_markdown(found), encoding="utf-8")


def _write_plot(path: Path, found: list[Evaluation]) -> None:
    from sdk.cli.evaluate import heading, placed
    from sdk.evaluating.plot import write_plot

    write_plot(path, placed(found), heading(found[0]))


_WRITERS: dict[str, Callable[[Path, list[Evaluation]], None]] = {
    "json": _write_json,
    "markdown": _write_markdown,
    "plot": _write_plot,
}
