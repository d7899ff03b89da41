"""Bodies of OpenAI's requests, with vLLM's further parameters, as arguments of ``LLM``'s methods.

A body is a dict of parsed JSON. What is unknown is an error that names it: a parameter without
effect would be a wrong answer that nobody notices.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.reader import PromptLike, is_conversation

#: Valid parameters about a request that change nothing in its answer.
IGNORED = frozenset(
    (
        *("user", "metadata", "store", "safety_identifier", "service_tier", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention"),
    )
)
#: Those that only servers get.
_IGNORED_TOO = ("verbosity", "moderation", "guided_decoding_backend", "request_id")
#: Parameters that are accepted with the values that ask for nothing special.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "include_reasoning": (True,),
    "prediction": (),
    "audio": (),
    "web_search_options": (),
    "functions": (),
    "function_call": ("none", "auto"),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "chat_template": (),
    "prompt_embeds": (),
}
_INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "use_beam_search": "LLM.beam_search does that",
    "chat_template": "the owner of the model chooses its template",
}
#: Fields of ``SamplingParams`` that a body must not set: Python objects, the kind of outputs, and
#: what the server decides.
_NOT_IN_A_BODY = frozenset(
    (
        *("output_kind", "logits_processors", "detokenize", "extra_args", "tenant"),
        *("structured_outputs", "guided_decoding", "logprobs", "logit_bias"),
    )
)
SAMPLING = frozenset(one.name for one in fields(SamplingParams)) - _NOT_IN_A_BODY
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_KINDS = ("text", "json_object", "json_schema", "structural_tag")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """``stream`` and ``stream_options``. ``every``: each chunk has the usage so far."""

    stream: bool = False
    usage: bool = False
    every: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What every generating request has. ``cache_salt``: see ``LLM``'s prompts."""

    params: SamplingParams
    streaming: StreamOptions = StreamOptions()
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Request):
    """``/v1/chat/completions``. ``template``: the keyword arguments of ``LLM.chat``."""

    messages: Sequence[Mapping[str, Any]]
    template: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Request):
    """``/v1/completions``. ``echo``: the text begins with the prompt. ``scores``: nothing is
    generated (``max_tokens=0``); one token is drawn and left out."""

    prompts: list[PromptLike]
    echo: bool = False
    scores: bool = False


class Body:
    """The parameters of one body that are set. Each is taken once; the rest is unknown."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in given.items() if value is not None}
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """A value, or ``default`` if it is not set."""
        self._taken.add(name)
        return self._left.pop(name, default)

    def take_all(self, names: Iterable[str]) -> dict[str, Any]:
        """The values of ``names`` that are set."""
        names = set(names)
        self._taken |= names
        return {name: self._left.pop(name) for name in names & self._left.keys()}

    def take_flag(self, name: str, default: bool = False) -> bool:
        """:raises RequestError: the value is not a boolean."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise RequestError(f"{name}: expected true or false, found {safe_repr(value)}")
        return value

    def take_text(self, name: str) -> str | None:
        """:raises RequestError: the value is not a string, or is empty."""
        value = self.take(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise RequestError(f"{name}: expected a non-empty string, found {safe_repr(value)}")
        return value

    def rest(self) -> dict[str, Any]:
        """What nobody has taken."""
        return dict(self._left)

    def end(self) -> None:
        """:raises RequestError: a parameter is unknown or not supported."""
        self.take_all(IGNORED)
        self.take_all(_IGNORED_TOO)
        for name, allowed in _ONLY.items():
            if name in self._left and self._left.pop(name) not in allowed:
                instead = _INSTEAD.get(name, "leave it out")
                raise RequestError(f"{name}: is not supported; {instead}")
        if self._left:
            name = next(iter(self._left))
            near = difflib.get_close_matches(name, self._taken, 1)
            hint = f"; did you mean {near[0]}?" if near else "; leave it out"
            raise RequestError(f"{safe_repr(name)[1:-1]}: unknown parameter{hint}")


def param_of(message: str) -> str | None:
    """The parameter that an error message is about: our messages begin with it."""
    found = re.match(r"([a-z_0-9]+)(?:\[[^\]]*\])?(?:: | must )", message)
    return None if found is None else found[1]


def structure_of(wanted: object) -> dict[str, Any] | None:
    """``structured_outputs`` for a ``response_format``. A ``json_object`` may have a ``schema``.

    :raises RequestError: it is not one.
    """
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if not isinstance(wanted, Mapping) or kind not in _KINDS:
        raise RequestError(
            "response_format: expected a dict with the type 'text', 'json_object', 'json_schema' "
            f"or 'structural_tag', found {safe_repr(wanted)}"
        )
    if kind == "text":
        return None
    if kind == "structural_tag":
        return {"structural_tag": {key: one for key, one in wanted.items() if key != "type"}}
    if kind == "json_object":
        schema = wanted.get("schema")
        return {"json_object": True} if schema is None else {"json": schema}
    named = wanted.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if schema is None:
        raise RequestError(
            "response_format: expected {'type': 'json_schema', 'json_schema': {'name': ..., "
            f"'schema': {{...}}}}}}, found {safe_repr(wanted)}"
        )
    return {"json": schema}


def read_chat(body: Body, default: SamplingParams) -> ChatRequest:
    """The body of ``/v1/chat/completions`` without its model.

    :raises RequestError: a parameter is invalid, unknown or not supported.
    """
    messages = body.take("messages")
    if not is_conversation(messages):
        raise RequestError(f"messages: expected a list of messages, found {safe_repr(messages)}")
    streaming, salt = read_stream(body), body.take_text("cache_salt")
    template = {**body.take_all(_TEMPLATE), **_tools(body)}
    if template.get("continue_final_message"):
        template.setdefault("add_generation_prompt", False)
    effort = body.take_text("reasoning_effort")
    if effort is not None:  # a template that knows efforts reads them; others have one
        variables = template.get("chat_template_kwargs", {})
        if isinstance(variables, Mapping):
            template["chat_template_kwargs"] = {"reasoning_effort": effort, **variables}
    changes = _sampling(body)
    if body.take_flag("logprobs"):
        changes["logprobs"] = body.take("top_logprobs", 0)
    elif body.take("top_logprobs", 0) != 0:
        raise RequestError("top_logprobs: needs logprobs=true")
    body.end()
    return ChatRequest(
        params=default.clone(**changes),
        streaming=streaming,
        cache_salt=salt,
        messages=messages,
        template=template,
    )


def _tools(body: Body) -> dict[str, Any]:
    """The arguments about tools. An empty list means the same as none."""
    given = body.take_all(TOOLS)
    if given.get("tools"):
        return given
    given.pop("tools", None)
    given.pop("parallel_tool_calls", None)
    if given.get("tool_choice", "none") != "none":
        raise RequestError("tool_choice: expected tools too, found none")
    return {}


def read_completion(body: Body, default: SamplingParams) -> CompletionRequest:
    """The body of ``/v1/completions`` without its model.

    :raises RequestError: a parameter is invalid, unknown or not supported.
    """
    prompts = prompts_of(body.take("prompt"))
    streaming, salt = read_stream(body), body.take_text("cache_salt")
    echo, suffix = body.take_flag("echo"), body.take("suffix")
    if body.take("add_special_tokens", True) is not True:
        raise RequestError("add_special_tokens: expected true; pass token ids to leave them out")
    changes = _sampling(body)
    logprobs = body.take("logprobs")
    if logprobs is not None:
        changes["logprobs"] = logprobs
        if echo:
            changes["prompt_logprobs"] = logprobs
    scores = changes.get("max_tokens") == 0 and echo
    if scores:
        changes["max_tokens"] = 1
    body.end()
    if suffix is not None and suffix != "":
        if echo:
            raise RequestError("suffix: cannot be combined with echo; pass one of them")
        prompts = [_with_suffix(prompt, suffix) for prompt in prompts]
    return CompletionRequest(
        params=default.clone(**changes),
        streaming=streaming,
        cache_salt=salt,
        prompts=prompts,
        echo=echo,
        scores=scores,
    )


def _with_suffix(prompt: PromptLike, suffix: object) -> PromptLike:
    if not isinstance(prompt, str):
        raise RequestError("suffix: expected a prompt that is a text, found token ids")
    return {"prompt": prompt, "suffix": suffix}


def prompts_of(given: object, name: str = "prompt") -> list[PromptLike]:
    """A text, a list of token ids, or a list of either, as a list of prompts.

    :raises RequestError: it is nothing of that, or empty.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray) or not given:
        raise RequestError(
            f"{name}: expected a text, a list of token ids, or a list of them, found "
            f"{safe_repr(given)}"
        )
    if isinstance(given[0], int):
        return [given]
    for one in given:
        if not isinstance(one, str | Sequence):
            raise RequestError(
                f"{name}: expected texts or lists of token ids, found {safe_repr(one)}"
            )
    return list(given)


def read_stream(body: Body) -> StreamOptions:
    """``stream`` and ``stream_options``. :raises RequestError: one is invalid."""
    stream, options = body.take_flag("stream"), body.take("stream_options", {})
    if not isinstance(options, Mapping):
        raise RequestError(f"stream_options: expected an object, found {safe_repr(options)}")
    usage = options.get("include_usage") or False
    every = options.get("continuous_usage_stats") or False
    if not isinstance(usage, bool) or not isinstance(every, bool):
        raise RequestError(
            f"stream_options: expected include_usage to be true or false, found {safe_repr(usage)}"
        )
    return StreamOptions(stream, stream and usage, stream and usage and every)


def _sampling(body: Body) -> dict[str, Any]:
    """Changes of the default parameters, without ``logprobs``."""
    changes = body.take_all(SAMPLING)
    most = body.take("max_completion_tokens")
    if most is not None:
        changes["max_tokens"] = most
    if changes.get("max_tokens") == -1:  # llama.cpp's "no limit"
        changes["max_tokens"] = None
    bias = body.take("logit_bias")
    if isinstance(bias, Mapping):  # keys of JSON are strings
        bias = {_token_id(token): add for token, add in bias.items()}
    if bias is not None:
        changes["logit_bias"] = bias
    structure = _structure(body)
    if structure is not None:
        changes["structured_outputs"] = structure
    return changes


def _structure(body: Body) -> Any:
    """The structure that a body asks for, under whichever name."""
    found: dict[str, Any] = {}
    for name in ("structured_outputs", "guided_decoding"):
        if (value := body.take(name)) is not None:
            found[name] = value
    wanted = body.take("response_format")
    if wanted is not None and (form := structure_of(wanted)) is not None:
        found["response_format"] = form
    guided = body.take_all(_GUIDED)
    pattern = body.take("guided_whitespace_pattern")
    for name, value in guided.items():
        found[name] = {_GUIDED[name]: value}
        if pattern is not None:
            found[name]["whitespace_pattern"] = pattern
    if len(found) > 1:
        raise RequestError(
            f"{min(found)}: expected one structure, found {' and '.join(sorted(found))}"
        )
    return next(iter(found.values()), None)


def _token_id(token: object) -> object:
    return int(token) if isinstance(token, str) and re.fullmatch(r"\d{1,10}", token) else token
