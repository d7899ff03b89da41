"""From llama-cpp-python's sampling arguments to ``SamplingParams``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.compat.llama_cpp._parts import Ids, Scores
from sdk.compat.llama_cpp.llama_grammar import LlamaGrammar
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.quant.safe_repr import safe_repr

#: Arguments with the same name in ``SamplingParams``. ``tfs_z`` and ``penalize_nl`` have no effect
#: in llama-cpp-python either.
_SAME = ("top_k", "typical_p", "min_p", "top_p", "mirostat_tau", "mirostat_eta")
_OFF = {"top_k": 0, "typical_p": 1.0, "min_p": 0.0, "top_p": 1.0}
_MOST_BIAS = 100.0
_PENALTIES = ("repeat", "frequency", "presence")
_NO_PENALTIES = (1.0, 0.0, 0.0)


class Stop(Exception):
    """A stopping criterion returned True."""


class Callbacks:
    """The callbacks and penalties of one request, as one of our logits processors.

    llama.cpp's penalties count the last ``last_n`` tokens of the answer, ours count all of it, and
    ``repetition_penalty`` the prompt too; so they are computed here.
    """

    def __init__(self, given: Mapping[str, Any], prompt: Sequence[int], last_n: int) -> None:
        self._prompt = list(prompt)
        self._processors = given.get("logits_processor")
        self._criteria = given.get("stopping_criteria")
        self._repeat, self._frequency, self._presence = _penalties(given)
        self._last_n = max(last_n, 0)
        #: Whether a stopping criterion ended the answer.
        self.stopped = False

    @staticmethod
    def needed(given: Mapping[str, Any]) -> bool:
        """Whether a request with these arguments has any."""
        callbacks = (given.get("logits_processor"), given.get("stopping_criteria"))
        return _penalties(given) != _NO_PENALTIES or any(one is not None for one in callbacks)

    def __call__(self, output: Sequence[int], row: Tensor) -> Tensor:
        """:raises Stop: the answer ends here."""
        ids: Ids = np.array([*self._prompt, *output], np.intc)
        scores: Scores = row.cpu().numpy()
        if self._criteria is not None and self._criteria(ids, scores):
            self.stopped = True
            raise Stop
        for processor in self._processors or ():
            scores = np.asarray(processor(ids, scores), np.single)
        self._penalize(output[max(0, len(output) - self._last_n) :], scores)
        return torch.from_numpy(scores)

    def _penalize(self, recent: Sequence[int], scores: Scores) -> None:
        penalties = self._repeat, self._frequency, self._presence
        if not recent or penalties == _NO_PENALTIES:
            return
        ids, counts = np.unique(np.array(recent, np.intp), return_counts=True)
        values = scores[ids]
        values = np.where(values <= 0, values * self._repeat, values / self._repeat)
        scores[ids] = values - counts * self._frequency - self._presence


def _penalties(given: Mapping[str, Any]) -> tuple[float, float, float]:
    """:raises RequestError: one is not a number, or ``repeat_penalty`` is not above 0."""
    repeat, *others = (_number(f"{name}_penalty", given) for name in _PENALTIES)
    if not repeat > 0:
        raise RequestError(f"repeat_penalty: expected a number above 0, found {repeat}")
    return repeat, others[0], others[1]


def _number(name: str, given: Mapping[str, Any]) -> float:
    value = given[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise RequestError(f"{name}: expected a number, found {safe_repr(value)}")
    return float(value)


def _integer(name: str, value: object) -> int:
    if not isinstance(value, int):
        raise RequestError(f"{name}: expected an integer, found {safe_repr(value)}")
    return int(value)


def sampling_params(
    given: Mapping[str, Any], seed: int, callbacks: Callbacks | None
) -> SamplingParams:
    """:raises RequestError: a value is out of range or has the wrong type."""
    changes: dict[str, Any] = {name: given[name] for name in _SAME} | _truncation(given)
    limit = given.get("max_tokens")
    if limit is not None:
        limit = _integer("max_tokens", limit)
    changes["max_tokens"] = limit if limit is not None and limit > 0 else None
    changes["stop"] = given.get("stop") or ()
    changes["seed"] = seed
    if (bias := given.get("logit_bias")) is not None:
        changes["logit_bias"] = _biases(bias)
    if callbacks is not None:
        changes["logits_processors"] = [callbacks]
    if (grammar := given.get("grammar")) is not None:
        if not isinstance(grammar, LlamaGrammar):
            raise RequestError(f"grammar: expected a LlamaGrammar, found {safe_repr(grammar)}")
        changes["structured_outputs"] = grammar.structure
    if (count := given.get("logprobs")) is not None:
        changes["logprobs"] = _integer("logprobs", count)
    return SamplingParams(**changes)


def _truncation(given: Mapping[str, Any]) -> dict[str, Any]:
    """The temperature, and the truncations as llama.cpp applies them.

    It applies ``min_p`` before the temperature, and this library after it: a token with the
    probability ``r`` times the best one's has ``r ** (1 / temperature)`` times afterwards.
    """
    temperature, mode = _number("temperature", given), given["mirostat_mode"]
    if temperature < 0:  # the model's own distribution
        return {"temperature": 1.0, **_OFF}
    if mode:
        if mode != 2:
            raise RequestError(
                f"mirostat_mode: expected 0 or 2, found {safe_repr(mode)}; version 1 is not "
                "supported, use 2"
            )
        return {"temperature": 1.0, "mirostat_mode": 2, **_OFF} if temperature else _greedy()
    top_p, min_p = _number("top_p", given), _number("min_p", given)
    if temperature == 0 or top_p <= 0:  # one token is always kept
        return _greedy()
    return {
        "temperature": temperature,
        "top_k": max(_integer("top_k", given["top_k"]), 0),
        "typical_p": min(_number("typical_p", given), 1.0),
        "top_p": min(top_p, 1.0),
        "min_p": min_p ** (1 / temperature) if 0 < min_p < 1 else min_p,
    }


def _greedy() -> dict[str, Any]:
    return {"temperature": 0.0, **_OFF}


def _biases(given: object) -> dict[int, float]:
    """Biases between -100, which already forbids a token, and 100; programs write -inf."""
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias: expected a dict, found {safe_repr(given)}")
    try:
        found = {int(token): float(add) for token, add in given.items()}
    except (TypeError, ValueError) as error:
        raise RequestError(f"logit_bias: expected token ids and numbers: {error}") from error
    return {token: min(max(add, -_MOST_BIAS), _MOST_BIAS) for token, add in found.items()}
