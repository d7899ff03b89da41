"""From llama-cpp-python's sampling arguments to ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdk.compat._llama_parts import Ids, LlamaGrammar, Scores
from sdk.errors import RequestError
from sdk.params import SamplingParams
from sdk.quant.safe_repr import safe_repr

#: Arguments with another name or the same one in ``SamplingParams``. ``tfs_z`` and ``penalize_nl``
#: have no effect in llama-cpp-python either.
_SAME = ("top_k", "typical_p", "min_p", "top_p", "mirostat_tau", "mirostat_eta")
_OFF = {"top_k": 0, "typical_p": 1.0, "min_p": 0.0, "top_p": 1.0}
_MOST_BIAS = 100.0


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
        self._repeat = float(given["repeat_penalty"])
        self._frequency = float(given["frequency_penalty"])
        self._presence = float(given["presence_penalty"])
        self._last_n = max(last_n, 0)
        #: Whether a stopping criterion ended the answer.
        self.stopped = False

    @staticmethod
    def needed(given: Mapping[str, Any]) -> bool:
        """Whether a request with these arguments has any."""
        penalties = (given["repeat_penalty"], given["frequency_penalty"], given["presence_penalty"])
        callbacks = (given.get("logits_processor"), given.get("stopping_criteria"))
        return penalties != (1.0, 0.0, 0.0) or any(one is not None for one in callbacks)

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
        if not recent or (self._repeat, self._frequency, self._presence) == (1.0, 0.0, 0.0):
            return
        ids, counts = np.unique(np.array(recent, np.intp), return_counts=True)
        values = scores[ids]
        values = np.where(values <= 0, values * self._repeat, values / self._repeat)
        scores[ids] = values - counts * self._frequency - self._presence


def sampling_params(
    given: Mapping[str, Any], seed: int, callbacks: Callbacks | None
) -> SamplingParams:
    """:raises RequestError: a value is out of range."""
    changes: dict[str, Any] = {name: given[name] for name in _SAME} | _truncation(given)
    limit = given.get("max_tokens")
    changes["max_tokens"] = None if limit is None or limit <= 0 else limit
    changes["stop"] = given.get("stop") or ()
    changes["seed"] = seed
    if (bias := given.get("logit_bias")) is not None:
        changes["logit_bias"] = {int(token): _clipped(add) for token, add in bias.items()}
    if callbacks is not None:
        changes["logits_processors"] = [callbacks]
    if (grammar := given.get("grammar")) is not None:
        if not isinstance(grammar, LlamaGrammar):
            raise RequestError(f"grammar: expected a LlamaGrammar, found {safe_repr(grammar)}")
        changes["structured_outputs"] = grammar.structure
    if given.get("logprobs") is not None:
        changes["logprobs"] = int(given["logprobs"])
    return SamplingParams(**changes)


def _truncation(given: Mapping[str, Any]) -> dict[str, Any]:
    """The temperature, and the truncations as llama.cpp applies them.

    It applies ``min_p`` before the temperature, and this library after it: a token with the
    probability ``r`` times the best one's has ``r ** (1 / temperature)`` times afterwards.
    """
    temperature, mode = float(given["temperature"]), given["mirostat_mode"]
    if temperature < 0:  # the model's own distribution
        return {"temperature": 1.0, **_OFF}
    if mode:
        if mode != 2:
            raise RequestError(
                f"mirostat_mode: expected 0 or 2, found {safe_repr(mode)}; version 1 is not "
                "supported, use 2"
            )
        return {"temperature": 1.0, "mirostat_mode": 2, **_OFF} if temperature else _greedy()
    if temperature == 0:
        return _greedy()
    found = {"temperature": temperature, "top_k": max(given["top_k"], 0)}
    found["typical_p"] = min(float(given["typical_p"]), 1.0)
    found["top_p"] = min(float(given["top_p"]), 1.0)
    if found["top_p"] <= 0:  # one token is always kept
        return _greedy()
    if 0 < given["min_p"] < 1:
        found["min_p"] = given["min_p"] ** (1 / temperature)
    return found


def _greedy() -> dict[str, Any]:
    return {"temperature": 0.0, **_OFF}


def _clipped(bias: Any) -> float:
    """-100 already forbids a token; programs write -inf."""
    return float(min(max(float(bias), -_MOST_BIAS), _MOST_BIAS))
