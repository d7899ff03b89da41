"""Ollama's ``/api/chat``, ``/api/generate``, ``/api/tags`` and ``/api/version``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import datetime, timezone
from typing import Any

from sdk import __version__
from sdk.errors import RequestError
from sdk.openai.requests import Body, read_chat, read_completion
from sdk.outputs import CompletionOutput, RequestOutput
from sdk.params import SamplingParams
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts import with_salt
from sdk.server.answers import Answers, ask
from sdk.server.endpoint import Services, Use, salted
from sdk.server.errors import ErrorShape, Problem, check_ended
from sdk.server.exchange import Departure, Exchange
from sdk.server.models import Target
from sdk.server.routes.generate import chat_template
from sdk.tools.messages import arguments_of
from sdk.typed_outputs import MessageAnswer

#: ``options`` of a request: the same with our names.
_OPTIONS = {
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "seed")},
    **{name: name for name in ("stop", "presence_penalty", "frequency_penalty")},
}
#: Options about how a model is loaded; here its owner has decided. Others are unknown.
_LOADING = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "num_keep")
_LINES = [(b"content-type", b"application/x-ndjson")]


def _error(problem: Problem) -> bytes:
    return json.dumps({"error": problem.message}).encode()


ERRORS = ErrorShape(_error, lambda body: body + b"\n")


async def tags(exchange: Exchange, services: Services) -> None:
    """The models."""
    cards = [
        {
            "name": served.name,
            "model": served.name,
            "modified_at": _time(served.created),
            "size": 0,
            "digest": "",
            "details": {"format": "", "family": "", "parameter_size": "", "quantization_level": ""},
        }
        for served in services.models
    ]
    await exchange.respond_json({"models": cards})


async def version(exchange: Exchange, services: Services) -> None:
    """Our version."""
    await exchange.respond_json({"version": __version__})


async def chat(exchange: Exchange, services: Services) -> None:
    """The next message of a conversation."""
    body, target, streamed = await _begin(exchange, services)
    messages = [_message(one) for one in body.take("messages") or []]
    translated = {**_translated(body), "messages": messages, "tools": body.take("tools")}
    if (think := body.take("think")) is not None:
        translated["chat_template_kwargs"] = {"enable_thinking": think}
    body.end()
    asked = read_chat(Body(translated), target.llm.get_default_sampling_params())
    salt = salted(exchange.caller, asked.cache_salt)
    template = chat_template(asked, target, salt)
    lines = _Lines(target.name, chat=True)
    await _answer(
        exchange, services, target, asked.messages, asked.params, lines, streamed, template
    )


async def generate(exchange: Exchange, services: Services) -> None:
    """The answer to a prompt: through the chat template unless ``raw``."""
    body, target, streamed = await _begin(exchange, services)
    prompt, system, raw = body.take("prompt", ""), body.take("system"), body.take_flag("raw")
    translated = _translated(body)
    suffix = body.take("suffix")
    body.take("context")  # an older way to continue, without effect on a model with a template
    body.end()
    default = target.llm.get_default_sampling_params()
    lines = _Lines(target.name, chat=False)
    if raw or suffix:
        text = Body({**translated, "prompt": prompt, "suffix": suffix})
        continued = read_completion(text, default)
        salt = salted(exchange.caller, continued.cache_salt)
        [given] = continued.prompts
        prompt = with_salt(given, salt)
        await _answer(exchange, services, target, prompt, continued.params, lines, streamed)
        return
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    asked = read_chat(Body({**translated, "messages": messages}), default)
    template = chat_template(asked, target, salted(exchange.caller, None))
    await _answer(exchange, services, target, messages, asked.params, lines, streamed, template)


async def _begin(exchange: Exchange, services: Services) -> tuple[Body, Target, bool]:
    """The body, the model and whether the answer is streamed, which is the default."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    name = body.take("model")
    if isinstance(name, str):
        name = name.removesuffix(":latest")
    body.take("keep_alive")
    if body.take("images"):
        raise RequestError("images: are not supported; leave them out")
    if body.take("template") is not None:
        raise RequestError("template: is not supported; the owner of the model chooses it")
    return body, services.models.resolve(name), body.take_flag("stream", True)


def _translated(body: Body) -> dict[str, Any]:
    """``options`` and ``format`` with our names. :raises RequestError: an option is unknown."""
    options = body.take("options", {})
    if not isinstance(options, Mapping):
        raise RequestError(f"options: expected an object, found {safe_repr(options)}")
    made: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OPTIONS:
            made[_OPTIONS[name]] = value
        elif name not in _LOADING:
            raise RequestError(f"options: {safe_repr(name)} is unknown; leave it out")
    if made.get("max_tokens") in (-1, -2):  # no limit; to the end of the context
        del made["max_tokens"]
    form = body.take("format")
    if form == "json":
        made["response_format"] = {"type": "json_object"}
    elif form not in (None, ""):
        made["structured_outputs"] = {"json": form}
    return made


def _message(given: Any) -> Any:
    """A message with OpenAI's shape: arguments of calls are texts, calls have ids."""
    if not isinstance(given, Mapping):
        return given
    if given.get("images"):
        raise RequestError("images: are not supported; leave them out")
    message = {key: value for key, value in given.items() if key not in ("images", "thinking")}
    if "tool_name" in message:
        message["name"] = message.pop("tool_name")
    return message


class _Lines:
    """The lines of one answer: each is a JSON object."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._model = model
        self._chat = chat

    def of(self, number: int, output: RequestOutput) -> bytes:
        parts = [self._piece(answer) for answer in output.outputs]
        return b"".join(_line({**self._facts(), **part, "done": False}) for part in parts if part)

    def end(self, outputs: dict[int, RequestOutput]) -> bytes:
        [last] = outputs.values()
        return _line({**self._facts(), **self._shown("", "", []), **self._summary(last)})

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The whole answer."""
        [answer] = output.outputs
        check_ended(answer)
        text, thinking, calls = answer.text, "", []
        if isinstance(answer, MessageAnswer):
            found = answer.message
            text, thinking = found.content, found.reasoning
            calls = [_call(call.name, call.arguments) for call in found.tool_calls]
        return {**self._facts(), **self._shown(text, thinking, calls), **self._summary(output)}

    def _piece(self, answer: CompletionOutput) -> dict[str, Any]:
        check_ended(answer)
        if not isinstance(answer, MessageAnswer):
            return self._shown(answer.text, "", []) if answer.text else {}
        found = answer.delta
        calls: list[dict[str, Any]] = []
        if answer.finished:  # a call comes whole
            calls = [_call(call.name, call.arguments) for call in answer.message.tool_calls]
        if not (found.content or found.reasoning or calls):
            return {}
        return self._shown(found.content, found.reasoning, calls)

    def _shown(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._chat:
            return {"response": text, **more}
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text, **more}}

    def _facts(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": _time()}

    def _summary(self, output: RequestOutput) -> dict[str, Any]:
        cut = any(answer.finish_reason in ("length", "deadline") for answer in output.outputs)
        reason = "length" if cut else "stop"
        made: dict[str, Any] = {"done": True, "done_reason": reason}
        times = output.metrics
        if times is not None and times.first_token_ts and times.last_token_ts:
            made |= {
                "total_duration": _nanoseconds(times.last_token_ts - times.arrival_time),
                "load_duration": 0,
                "prompt_eval_count": len(output.prompt_token_ids),
                "prompt_eval_duration": _nanoseconds(times.first_token_ts - times.arrival_time),
                "eval_count": times.num_generation_tokens,
                "eval_duration": _nanoseconds(times.last_token_ts - times.first_token_ts),
            }
        return made


async def _answer(
    exchange: Exchange,
    services: Services,
    target: Target,
    prompt: Any,
    params: SamplingParams,
    lines: _Lines,
    streamed: bool,
    template: dict[str, Any] | None = None,
) -> None:
    async with Departure(exchange), AsyncExitStack() as stack:
        answers, use = await ask(
            stack,
            exchange,
            services,
            target,
            [prompt],
            params.clone(n=1, best_of=None),
            streamed=streamed,
            template=template,
        )
        if streamed:
            await _stream(exchange, answers, use, lines)
            return
        use.outputs = dict(enumerate(await answers.whole()))
        await exchange.respond_json(lines.whole(use.outputs[0]))


async def _stream(exchange: Exchange, answers: Answers, use: Use, lines: _Lines) -> None:
    async for number, output in answers.pieces():
        use.outputs[number] = output
        data = lines.of(number, output)
        if not exchange.status:
            await exchange.stream(_LINES)
        if data:
            await exchange.write(data)
    await exchange.end(lines.end(use.outputs))


def _call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call; its arguments are an object."""
    try:
        return {"function": {"name": name, "arguments": arguments_of(arguments)}}
    except ValueError:
        return {"function": {"name": name, "arguments": {}}}


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _time(seconds: float | None = None) -> str:
    moment = datetime.now(timezone.utc)
    if seconds is not None:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat().replace("+00:00", "Z")
