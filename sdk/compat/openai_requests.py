"""The arguments of openai's methods: which ones there are, and what of them is about a client."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sdk.api.outputs import CompletionOutput
from sdk.api.params import SamplingParams
from sdk.compat.openai_errors import APIError, APITimeoutError, BadRequestError, InternalServerError
from sdk.quant.safe_repr import safe_repr
from sdk.serving.openai.requests import IGNORED, Body, ChatRequest, CompletionRequest, Request

_CLIENT = ("timeout", "extra_body", "extra_headers", "extra_query")
_ALL = (
    *("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "best_of", "logit_bias", "logprobs", "stream_options", *_CLIENT, *IGNORED),
)
_CHAT = ("max_completion_tokens", "top_logprobs", "response_format", "reasoning_effort")
CHAT_ARGUMENTS = frozenset((*_ALL, *_CHAT, "tools", "tool_choice", "parallel_tool_calls"))
COMPLETION_ARGUMENTS = frozenset((*_ALL, "echo", "suffix"))
#: Fields of ``SamplingParams`` that only a caller in this process can set.
_PYTHON = ("output_kind", "logits_processors", "detokenize", "extra_args", "tenant")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Request = TypeVar("_Request", bound=Request)


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


def request_of(
    read: Callable[[Body, SamplingParams], _Request],
    known: frozenset[str],
    given: Mapping[str, Any],
    default: SamplingParams,
    **body: Any,
) -> _Request:
    """The request that the arguments ``given`` and ``body`` describe; ``read``: see
    :mod:`sdk.serving.openai.requests`.

    :raises TypeError: an argument is unknown. :raises RequestError: a value is invalid.
    """
    given = {name: value for name, value in given.items() if not _is_left_out(value)}
    unknown = sorted(given.keys() - known - {"stream"})
    if unknown:
        raise TypeError(f"create() got an unexpected keyword argument {unknown[0]!r}")
    extra = given.get("extra_body") or {}
    if not isinstance(extra, Mapping):
        raise BadRequestError(f"extra_body: expected a dict, found {safe_repr(extra)}")
    here = {name: value for name, value in given.items() if name not in _CLIENT}
    here |= {name: value for name, value in extra.items() if name not in _PYTHON}
    if given.get("timeout") is not None:
        here["deadline"] = given["timeout"]
    python = {name: extra[name] for name in _PYTHON if name in extra}
    return read(Body({**here, **body}), default.clone(**python) if python else default)


def _is_left_out(value: object) -> bool:
    """Whether it is openai's ``omit`` or ``NOT_GIVEN``, which programs pass for arguments without a
    value, those of later releases among them."""
    kind = type(value)
    return kind.__name__ in ("Omit", "NotGiven") and kind.__module__.split(".")[0] == "openai"


def check_ended(answer: CompletionOutput) -> None:
    """:raises APIError: the answer did not end by itself."""
    if answer.finish_reason == "error":
        raise InternalServerError(str(answer.stop_reason))
    if answer.finish_reason == "deadline":
        raise APITimeoutError("the timeout of the request has passed")
    if answer.finish_reason == "abort":
        raise APIError("the request was aborted")


__all__ = [
    "CHAT_ARGUMENTS",
    "COMPLETION_ARGUMENTS",
    "ChatRequest",
    "CompletionRequest",
    "check_ended",
    "request_of",
    "shows",
]
