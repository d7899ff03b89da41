"""The option ``speculative_config``: how draft tokens are found. Names follow vLLM."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sdk.errors import RequestError
from sdk.quant.safe_repr import safe_repr

METHODS = ("ngram", "grammar")
_OPTION = "speculative_config"
_MOST_DRAFTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How draft tokens are found, and how many.

    ``ngram`` looks for the last tokens of a request earlier in its prompt and answer, and in recent
    answers to other requests, and proposes what followed there. ``grammar`` proposes only the
    tokens of structured answers that leave no choice, which ``ngram`` does too.
    ``prompt_lookup_min``: a match has
    at least this many tokens; ``prompt_lookup_max``: more are not compared (``None``: all are).
    ``num_speculative_tokens``: the most drafts of one request in a step. ``adaptive``: verify only
    as many as pay off, by measured acceptance and step times; otherwise always as many as possible.
    """

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 2
    prompt_lookup_max: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise RequestError(
                f"{_OPTION}: method: expected {' or '.join(map(repr, METHODS))}, "
                f"found {safe_repr(self.method)}"
            )
        _check_count("num_speculative_tokens", self.num_speculative_tokens, 1, _MOST_DRAFTS)
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        _check_count("prompt_lookup_min", least, 1, 2**20)
        if most is not None:
            _check_count("prompt_lookup_max", most, 1, 2**20)
            if most < least:
                raise RequestError(
                    f"{_OPTION}: prompt_lookup_max: expected at least prompt_lookup_min "
                    f"({least}), found {most}"
                )
        if not isinstance(self.adaptive, bool):
            raise RequestError(
                f"{_OPTION}: adaptive: expected True or False, found {safe_repr(self.adaptive)}"
            )

    def __str__(self) -> str:
        longest = "" if self.prompt_lookup_max is None else f" to {self.prompt_lookup_max}"
        return (
            f"{self.method}: up to {self.num_speculative_tokens} draft tokens per request, after "
            f"matches of {self.prompt_lookup_min}{longest or ' or more'} tokens"
            + ("" if self.adaptive else ", not adaptive")
        )


def speculative_config(value: object) -> SpeculativeConfig | None:
    """The config for the value of the option: a dict, its JSON text, or just a method's name.

    :raises RequestError: a wrong key or value.
    """
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if isinstance(value, str):
        value = _parsed(value)
    if not isinstance(value, Mapping):
        raise RequestError(
            f"{_OPTION}: expected a dict such as {{'method': 'ngram'}}, found {safe_repr(value)}"
        )
    known = [field.name for field in fields(SpeculativeConfig)]
    for name in value:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"expected {', '.join(known)}"
            raise RequestError(f"{_OPTION}: unknown key {safe_repr(name)}; {hint}")
    if "method" not in value:
        raise RequestError(
            f"{_OPTION}: method is missing; expected {' or '.join(map(repr, METHODS))}"
        )
    return SpeculativeConfig(**value)


def _parsed(text: str) -> Any:
    if not text.lstrip().startswith("{"):
        return {"method": text}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{_OPTION}: expected a method's name or a JSON object, found {safe_repr(text)}"
        ) from error


def _check_count(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(
            f"{_OPTION}: {name}: expected an integer in {low}..{high}, found {safe_repr(value)}"
        )
