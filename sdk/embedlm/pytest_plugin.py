"""The options of ``pytest --llm-model FILE``, and the fixtures ``fake_llm`` and ``tiny_llm``.

pytest loads this in every project of an environment with embedlm, even one with a different
``sdk``. So nothing of ours is imported before one of the options is given or a fixture is used.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

#: Options that require ``--llm-model``.
_NEED_A_MODEL = (
    *("reference", "max_kld", "max_kld_p99", "min_top1", "max_perplexity"),
    *("max_memory", "json", "markdown", "plot"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("embedlm", "accuracy and memory of language models (embedlm)")

    def add(name: str, help_text: str, **more: Any) -> None:
        group.addoption(f"--llm-{name}", help=help_text, **more)

    add("model", "a .gguf file, a folder, or a hub id; may be repeated", action="append")
    add("reference", "the model to compare with (default: MODEL itself in exact arithmetic)")
    for name, text in {
        "max-kld": "limit of the mean KL divergence from the reference, nats",
        "max-kld-p99": "limit of the 99th percentile of the KL divergence, nats",
        "min-top1": "least share of positions with the reference's most likely token, 0 to 1",
        "max-perplexity": "limit of the model's perplexity over the text",
    }.items():
        add(name, text, type=_number, metavar="X")
    add("max-memory", "budget for weights, cache and workspace, such as 1GiB", metavar="SIZE")
    add("text", "the text that both read (default: 64 KiB of Python's help)", metavar="FILE")
    add("windows", "the most sequences of the text (default: 8)", type=int, default=8, metavar="N")
    add("tokens", "tokens per sequence (default: 512)", type=int, default=512, metavar="N")
    add("compute", "auto (default), or exact: activations are not quantized")
    add("kv-cache-dtype", "auto (default), float32, float16, int8, ...", metavar="TYPE")
    add("quantization", "quantize MODEL while it is loaded: int4, int8, ...", metavar="SCHEME")
    add("num-threads", "default: the CPUs of this process", type=int, metavar="N")
    add("json", "write all numbers", metavar="FILE")
    add("markdown", "write the table", metavar="FILE")
    add("plot", "plot bytes, loss and speed; needs matplotlib", metavar="FILE")


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text}")
    return value


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("llm_model"):
        try:
            ours = _import_ours("sdk.testing.pytest_plugin")
        except ImportError as error:
            raise pytest.UsageError(f"--llm-model: {error}") from None
        config.pluginmanager.register(ours.Models(config), "embedlm-models")
        return
    for name in _NEED_A_MODEL:
        if config.getoption(f"llm_{name}") is not None:
            option = name.replace("_", "-")
            raise pytest.UsageError(f"--llm-{option}: expected --llm-model with it, found none")


def _import_ours(name: str) -> Any:
    return import_module(__name__.rpartition(".")[0]).import_ours(name)


@pytest.fixture
def fake_llm() -> Iterator[Callable[..., Any]]:
    """``fake_llm(answers, **options)``: a ``sdk.testing.FakeLLM``, closed after the test."""
    make = _import_ours("sdk.testing").FakeLLM
    with ExitStack() as made:
        yield lambda *answers, **options: made.enter_context(make(*answers, **options))


@pytest.fixture(scope="session")
def _tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes each tiny model once per session."""
    made: dict[tuple[str, ...], Path] = {}

    def path_of(*names: str) -> Path:
        if names not in made:
            folder = tmp_path_factory.mktemp("tiny-model")
            made[names] = _import_ours("sdk.testing").tiny_model(folder, *names)
        return made[names]

    return path_of


@pytest.fixture
def tiny_llm(_tiny_models: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """``tiny_llm(format="q4_k_m", architecture=..., **options)``: an ``LLM`` with a tiny real
    model, closed after the test. ``architecture`` is that of ``sdk.testing.tiny_model``."""
    make = _import_ours("sdk").LLM
    with ExitStack() as made:

        def load(format: str = "q4_k_m", architecture: str | None = None, **options: Any) -> Any:
            names = (format,) if architecture is None else (format, architecture)
            return made.enter_context(make(_tiny_models(*names), **options))

        yield load
