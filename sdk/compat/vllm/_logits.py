"""The ``logits_processors`` of an ``LLM`` as functions of our requests."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from sdk.api.errors import RequestError
from sdk.compat.vllm.config import VllmConfig
from sdk.compat.vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
from sdk.kernels.lazy_torch import torch
from sdk.quant.safe_repr import safe_repr

Classes = tuple[type[LogitsProcessor], ...]


def processors_of(given: Any) -> Classes:
    """Classes, or texts ``"module:Class"`` that are imported.

    :raises RequestError: one is neither, or cannot be imported.
    """
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise RequestError(f"logits_processors: expected a list, found {safe_repr(given)}")
    return tuple(_imported(one) if isinstance(one, str) else _checked(one) for one in given)


def _imported(name: str) -> type[LogitsProcessor]:
    module, _, path = name.partition(":")
    if not module or not path:
        raise RequestError(f"logits_processors: expected 'module:Class', found {safe_repr(name)}")
    try:
        found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise RequestError(f"logits_processors: {safe_repr(name)} not found: {error}") from error
    return _checked(found)


def _checked(given: Any) -> type[LogitsProcessor]:
    if isinstance(given, type) and issubclass(given, LogitsProcessor):
        return given
    raise RequestError(
        "logits_processors: expected subclasses of vllm.v1.sample.logits_processor."
        f"LogitsProcessor, found {safe_repr(given)}; functions go into "
        "sdk.SamplingParams(logits_processors=...), with llm.llm"
    )


class AnswerProcessors:
    """The processors of one answer, which see a batch of one."""

    def __init__(
        self, classes: Classes, config: VllmConfig, params: Any, prompt: Sequence[int] = ()
    ) -> None:
        self._classes = classes
        self._config = config
        self._params = params
        self._prompt = list(prompt)
        self._output: list[int] = []
        self._made: list[LogitsProcessor] = []

    @property
    def __name__(self) -> str:
        return ", ".join(one.__name__ for one in self._classes)

    def for_answer(self, prompt: Sequence[int]) -> AnswerProcessors:
        """Those of another answer, to ``prompt``."""
        return AnswerProcessors(self._classes, self._config, self._params, prompt)

    def __call__(self, output: Sequence[int], row: Any) -> Any:
        """``row`` ``[V]`` with the changes of all processors."""
        self._output[:] = output
        update = None
        if not self._made:
            device = torch.device("cpu")
            self._made = [one(self._config, device, False) for one in self._classes]
            added = [(0, self._params, self._prompt, self._output)]
            update = BatchUpdate(1, (), added, ())
        logits = row[None]
        for processor in self._made:
            processor.update_state(update)
            logits = processor.apply(logits)
        return logits[0]
