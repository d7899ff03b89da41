"""The small classes of llama-cpp-python's module ``llama``: callbacks and states."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr

Ids = NDArray[np.intc]
Scores = NDArray[np.single]
LogitsProcessor = Callable[[Ids, Scores], Scores]
StoppingCriteria = Callable[[Ids, Scores], bool]


class LogitsProcessorList(list[LogitsProcessor]):
    """Functions ``(input_ids, scores) -> scores``, applied one after the other."""

    def __call__(self, input_ids: Ids, scores: Scores) -> Scores:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Functions ``(input_ids, logits) -> bool``; a request stops when one returns True."""

    def __call__(self, input_ids: Ids, logits: Scores) -> bool:
        return any(criterion(input_ids, logits) for criterion in self)


class MinTokensLogitsProcessor:
    """Forbids ``token_eos`` before ``min_tokens`` tokens. Make one for each request."""

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self.prompt_tokens: int | None = None

    def __call__(self, input_ids: Ids, scores: Scores) -> Scores:
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


@dataclass(frozen=True, slots=True)
class LlamaState:
    """The tokens of a ``Llama`` with their keys and values (``Llama.save_state``).

    ``snapshot`` is an :class:`sdk.Snapshot`, or None if the tokens fill no page.
    """

    input_ids: Ids
    n_tokens: int
    seed: int
    snapshot: Any


def token_ids(name: str, tokens: object) -> list[int]:
    """Token ids of a list or an array."""
    try:
        return [operator.index(token) for token in tokens]  # type: ignore[attr-defined]
    except TypeError as error:
        raise RequestError(
            f"{name}: expected a list of token ids, found {safe_repr(tokens)}"
        ) from error


def metadata_of(path: Path) -> dict[str, str]:
    """The numbers and texts of a GGUF file's header; empty for other files."""
    from sdk.loaders.gguf_files.reader import read_gguf

    if path.suffix != ".gguf":
        return {}
    kinds = (bool, int, float, str)
    found = {k: v for k, v in read_gguf(path).metadata.items() if isinstance(v, kinds)}
    return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in found.items()}
