"""The option ``speculative_config``: how draft tokens are found. Names follow vLLM."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sdk.api.errors import RequestError
from sdk.kernels.dataclass import dataclass
from sdk.quant.safe_repr import safe_repr

#: Methods with a head in files of its own that was trained for the model.
_HEADS = ("eagle", "eagle3", "medusa")
_MODELS = ("draft_model", *_HEADS)
#: The head in the model's own files.
_OWN_HEAD = "mtp"
METHODS = ("ngram", "grammar", "self", _OWN_HEAD, *_MODELS)
_EXPECTED = f"{', '.join(map(repr, METHODS[:-1]))} or {METHODS[-1]!r}"
#: Keys that only some methods use.
_OWN_KEYS = {
    "prompt_lookup_min": ("ngram", "self", _OWN_HEAD, *_MODELS),
    "prompt_lookup_max": ("ngram", "self", _OWN_HEAD, *_MODELS),
    "quantization": ("self", *_MODELS),
    "model": _MODELS,
}
#: Tokens that must match where nothing else proposes, and where weights could draft instead.
_LEAST_MATCH, _LEAST_MATCH_BEFORE_WEIGHTS = 1, 8
_OPTION = "speculative_config"
_MOST_DRAFTS = 64
#: How the model's own weights are packed to draft. Of three drafts in a row with SmolLM2-135M 91 %
#: are accepted. With 4 bits 67 % are, for a pass that takes 15 % less time (docs/log.md).
_OWN_SCHEME = "rtn-w6g64-h6"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How draft tokens are found, and how many.

    ``ngram`` looks for the last tokens of a request earlier in its prompt and answer, and in recent
    answers to other requests, and proposes what followed there. A match has at least
    ``prompt_lookup_min`` tokens (``None``: 1); more than ``prompt_lookup_max`` are not compared
    (``None``: all are). ``grammar`` proposes only the tokens of structured answers that leave no
    choice. All methods do that, and those below do what ``ngram`` does after matches of at least
    ``prompt_lookup_min`` tokens (``None``: 8; 0: never). ``self`` drafts with the model's own
    weights, packed by the scheme ``quantization`` (``None``: rtn-w6g64-h6). ``mtp`` drafts with the
    block of multi-token prediction that the model's own files have. ``draft_model`` drafts
    with the checkpoint ``model``, a smaller model of the same vocabulary, whose float weights
    ``quantization`` may pack. ``eagle``, ``eagle3`` and ``medusa`` draft with a head in the folder
    ``model`` that was trained for this model and reads its hidden states.
    ``num_speculative_tokens``: the most drafts of one request in a step. ``adaptive``: verify only
    as many as pay off, by measured acceptance and step times; otherwise always as many as possible.
    """

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    adaptive: bool = True
    quantization: str | None = None
    model: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise RequestError(
                f"{_OPTION}: method: expected {_EXPECTED}, found {safe_repr(self.method)}"
            )
        _check_count("num_speculative_tokens", self.num_speculative_tokens, 1, _MOST_DRAFTS)
        most = self.prompt_lookup_max
        if self.prompt_lookup_min is not None:
            fewest = 1 if self.method == "ngram" else 0
            _check_count("prompt_lookup_min", self.prompt_lookup_min, fewest, 2**20)
        if most is not None:
            _check_count("prompt_lookup_max", most, 1, 2**20)
            least = self.least_match
            if least is not None and most < least:
                raise RequestError(
                    f"{_OPTION}: prompt_lookup_max: expected at least prompt_lookup_min "
                    f"({least}), found {most}"
                )
        if self.method in _MODELS and not isinstance(self.model, str | os.PathLike):
            raise RequestError(
                f"{_OPTION}: model: expected the path or name of the model that drafts, "
                f"found {safe_repr(self.model)}"
            )
        if not isinstance(self.adaptive, bool):
            raise RequestError(
                f"{_OPTION}: adaptive: expected True or False, found {safe_repr(self.adaptive)}"
            )

    @property
    def least_match(self) -> int | None:
        """The tokens that must match before what followed them is proposed; None: never."""
        if self.method == "grammar" or self.prompt_lookup_min == 0:
            return None
        default = _LEAST_MATCH if self.method == "ngram" else _LEAST_MATCH_BEFORE_WEIGHTS
        return self.prompt_lookup_min or default

    @property
    def has_weights(self) -> bool:
        """Whether drafts come from weights, which take memory."""
        return self.method in ("self", _OWN_HEAD, *_MODELS)

    @property
    def is_head(self) -> bool:
        """Whether a head drafts, which reads the model's hidden states."""
        return self.method in (_OWN_HEAD, *_HEADS)

    @property
    def is_own_head(self) -> bool:
        """Whether that head is in the model's own files."""
        return self.method == _OWN_HEAD

    @property
    def scheme(self) -> str | None:
        """The scheme that packs the weights that draft."""
        return self.quantization or (_OWN_SCHEME if self.method == "self" else None)

    def __str__(self) -> str:
        longest = " or more" if self.prompt_lookup_max is None else f" to {self.prompt_lookup_max}"
        how = f"after matches of {self.least_match}{longest} tokens"
        if self.method == "grammar":
            how = "where a structured answer leaves no choice"
        if self.method == "self":
            how = f"from the model's weights in {self.scheme}"
        if self.is_own_head:
            how = "from the model's own block of multi-token prediction"
        if self.method in _MODELS:
            how = f"from {self.model}" + (f" in {self.scheme}" if self.scheme else "")
        return (
            f"{self.method}: up to {self.num_speculative_tokens} draft tokens per request, {how}"
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
    value = dict(value)
    if "method" not in value and isinstance(model := value.get("model"), str | os.PathLike):
        from sdk.loaders.folders.head_folder import method_of_folder  # imports torch

        value["method"] = method_of_folder(os.fspath(model)) or "draft_model"  # as in vLLM
    if value.get("method") == "draft":
        value["method"] = "draft_model"  # vLLM's name
    elif str(value.get("method")).endswith(f"_{_OWN_HEAD}"):
        value["method"] = _OWN_HEAD  # vLLM had one name for each model
    if "method" not in value:
        raise RequestError(f"{_OPTION}: method is missing; expected {_EXPECTED}")
    for name, methods in _OWN_KEYS.items():
        if name in value and value["method"] in METHODS and value["method"] not in methods:
            raise RequestError(
                f"{_OPTION}: {name} belongs to method {' or '.join(map(repr, methods))}; remove it "
                "or use that method"
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
