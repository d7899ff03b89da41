"""The options of ``pytest --llm-model FILE``.

pytest loads this in every project of an environment that has embedlm, also in one with an ``sdk``
of its own: nothing of ours is imported before one of these options is given.
"""

from __future__ import annotations

import argparse
import math
from importlib import import_module
from typing import Any

import pytest

#: Options that say something only beside ``--llm-model``.
_BESIDE_A_MODEL = (
    *("reference", "max_kld", "max_kld_p99", "min_top1", "max_perplexity"),
    *("max_memory", "json", "markdown", "plot"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("embedlm", "what a language model loses and takes (embedlm)")

    def add(name: str, help_text: str, **more: Any) -> None:
        group.addoption(f"--llm-{name}", help=help_text, **more)

    add("model", "a .gguf file, a folder, or a hub id; may be given again", action="append")
    add("reference", "the model to compare with (default: MODEL itself in exact arithmetic)")
    for name, text in {
        "max-kld": "mean KL divergence from the reference, nats",
        "max-kld-p99": "what the divergence of 1 %% of the positions exceeds",
        "min-top1": "part of the positions whose likeliest token is the reference's, 0 to 1",
        "max-perplexity": "of the model over the text",
    }.items():
        add(name, text, type=_number, metavar="X")
    add("max-memory", "budget of MODEL's engine: weights, cache, workspace: 1GiB", metavar="SIZE")
    add("text", "what both read (default: 64 KiB of Python's help topics)", metavar="FILE")
    add("windows", "of the text, at most (default: 8)", type=int, default=8, metavar="N")
    add("tokens", "of each window (default: 512)", type=int, default=512, metavar="N")
    add("compute", "auto (default) or exact: no rounding of activations")
    add("kv-cache-dtype", "auto (default), float32, float16, int8, ...", metavar="TYPE")
    add("quantization", "pack MODEL while it is loaded: int4, int8, ...", metavar="SCHEME")
    add("num-threads", "default: the CPUs of this process", type=int, metavar="N")
    add("json", "write every number", metavar="FILE")
    add("markdown", "write the table", metavar="FILE")
    add("plot", "draw bytes, loss and speed; needs matplotlib", metavar="FILE")


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, found {text}")
    return value


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("llm_model"):
        try:
            ours = import_module(__name__.rpartition(".")[0]).import_ours("sdk.pytest_plugin")
        except ImportError as error:
            raise pytest.UsageError(f"--llm-model: {error}") from None
        config.pluginmanager.register(ours.Models(config), "embedlm-models")
        return
    for name in _BESIDE_A_MODEL:
        if config.getoption(f"llm_{name}") is not None:
            option = name.replace("_", "-")
            raise pytest.UsageError(f"--llm-{option}: expected --llm-model with it, found none")
