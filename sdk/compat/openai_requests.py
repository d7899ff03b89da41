"""From the arguments of openai's methods to ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sdk.compat._responses import structure_of
from sdk.compat.openai_errors import APIError, APITimeoutError, BadRequestError, InternalServerError
from sdk.outputs import CompletionOutput
from sdk.params import SamplingParams
from sdk.quant.safe_repr import safe_repr

#: Arguments that have the same name and meaning in ``SamplingParams``.
_SAME = (
    *("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "best_of"),
)
#: Arguments about a request that are valid and change nothing here.
_IGNORED = (
    *("user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_key"),
    *("prompt_cache_options", "prompt_cache_retention", "extra_headers", "extra_query"),
)
_CHAT = ("max_completion_tokens", "logprobs", "top_logprobs", "response_format", "reasoning_effort")
_ALL = (*_SAME, *_IGNORED, "logit_bias", "timeout", "extra_body", "stream_options")
CHAT_ARGUMENTS = frozenset((*_ALL, *_CHAT))
COMPLETION_ARGUMENTS = frozenset((*_ALL, "echo", "suffix", "logprobs"))
TOOL_ARGUMENTS = ("tools", "tool_choice", "parallel_tool_calls")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def shows(*names: str) -> Callable[[_Function], _Function]:
    """Make ``inspect.signature``, and so notebooks, show ``names`` instead of ``**given``."""

    def show(function: _Function) -> _Function:
        signature = inspect.signature(function)
        kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        kind = inspect.Parameter.KEYWORD_ONLY
        more = [inspect.Parameter(name, kind, default=None) for name in sorted(names)]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*kept, *more]
        )
        return function

    return show


def sampling_params(
    method: str, known: frozenset[str], given: Mapping[str, Any], default: SamplingParams
) -> SamplingParams:
    """The parameters of one request; ``None`` means the default.

    :raises TypeError: an argument is unknown. :raises BadRequestError: one is not supported.
    """
    unknown = sorted(given.keys() - known)
    if unknown:
        raise TypeError(f"{method}() got an unexpected keyword argument {unknown[0]!r}")
    values = {name: value for name, value in given.items() if value is not None}
    changes: dict[str, Any] = {name: values[name] for name in _SAME if name in values}
    if "max_completion_tokens" in values:
        changes["max_tokens"] = values["max_completion_tokens"]
    if isinstance(bias := values.get("logit_bias"), Mapping):  # keys of JSON are strings
        changes["logit_bias"] = {_token_id(token): add for token, add in bias.items()}
    if "timeout" in values:
        changes["deadline"] = values["timeout"]
    for name in ("echo", "suffix", "reasoning_effort"):
        if values.get(name):
            raise BadRequestError(f"{name}: is not supported; leave it out")
    if "response_format" in values:
        changes["structured_outputs"] = structure_of(values["response_format"])
    if values.get("logprobs"):
        if known is COMPLETION_ARGUMENTS:
            raise BadRequestError("logprobs: supported only by chat.completions; leave it out")
        changes["logprobs"] = values.get("top_logprobs", 0)
    elif "top_logprobs" in values:
        raise BadRequestError("top_logprobs: needs logprobs=True")
    extra = values.get("extra_body", {})
    if not isinstance(extra, Mapping):
        raise BadRequestError(f"extra_body: expected a dict, found {safe_repr(extra)}")
    changes |= extra
    try:
        return default.clone(**changes)
    except TypeError as error:
        raise BadRequestError(f"extra_body: {error}") from error


def _token_id(token: object) -> object:
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def includes_usage(options: object) -> bool:
    """Whether ``stream_options`` asks for a last chunk with the usage."""
    return isinstance(options, Mapping) and bool(options.get("include_usage"))


def check_ended(answer: CompletionOutput) -> None:
    """:raises APIError: the answer did not end by itself."""
    if answer.finish_reason == "error":
        raise InternalServerError(str(answer.stop_reason))
    if answer.finish_reason == "deadline":
        raise APITimeoutError("the timeout of the request has passed")
    if answer.finish_reason == "abort":
        raise APIError("the request was aborted")
