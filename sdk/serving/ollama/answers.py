"""``/api/chat`` and ``/api/generate``."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.reader import with_salt
from sdk.serving.answers import Answers, ask
from sdk.serving.endpoint import Services, Use, salted
from sdk.serving.errors import check_ended
from sdk.serving.exchange import Departure, Exchange
from sdk.serving.models import Target
from sdk.serving.ollama.lines import Lines, line
from sdk.serving.ollama.requests import (
    begin,
    images_of,
    message_of,
    thinking,
    translated,
    with_text,
)
from sdk.serving.openai.requests import Body, read_chat, read_completion
from sdk.serving.openai.responses import Responses
from sdk.serving.routes.generate import chat_template

_LINES = [(b"content-type", b"application/x-ndjson")]


async def chat(exchange: Exchange, services: Services) -> None:
    """The next message of a conversation; without messages the model is loaded."""
    body, target = await begin(exchange, services)
    streamed = body.take_flag("stream", True)
    if body.take("images"):
        raise RequestError("images: are not supported here; put them into a message")
    given = body.take("messages", [])
    if not isinstance(given, list):
        raise RequestError(f"messages: expected a list of messages, found {safe_repr(given)}")
    asked = {
        **translated(body),
        **body.take_all(("logprobs", "top_logprobs")),
        "messages": [message_of(one, target) for one in given],
        "tools": body.take("tools"),
        "chat_template_kwargs": thinking(body, target) or None,
    }
    body.end()
    await _converse(exchange, services, target, asked, streamed, chat=True)


async def generate(exchange: Exchange, services: Services) -> None:
    """The answer to a prompt: through the chat template, if there is one, unless ``raw``. Without a
    prompt the model is loaded."""
    body, target = await begin(exchange, services)
    streamed = body.take_flag("stream", True)
    images = images_of(body.take("images"), target)
    prompt, system, raw = body.take("prompt", ""), body.take("system"), body.take_flag("raw")
    suffix, logprobs = body.take("suffix"), body.take_all(("logprobs", "top_logprobs"))
    if body.take("context"):
        raise RequestError(
            "context: is not supported, because no answer has one; send the conversation to "
            "/api/chat"
        )
    if not isinstance(prompt, str):
        raise RequestError(f"prompt: expected a string, found {safe_repr(prompt)}")
    asked, variables = translated(body), thinking(body, target)
    body.end()
    plain = target.served.template is None  # then a prompt is continued, as in Ollama
    if (raw or suffix or plain) and (prompt or suffix):
        if system:
            other = "with raw" if raw else "with suffix" if suffix else "without a chat template"
            raise RequestError(f"system: is not supported {other}; put it into the prompt")
        if images:
            raise RequestError("images: are supported with a chat template alone, without raw")
        asked |= {"prompt": prompt, "suffix": suffix}
        await _continue(exchange, services, target, asked, _completion_logprobs(logprobs), streamed)
        return
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if prompt or images:
        content = with_text(images, prompt) if images else prompt
        messages.append({"role": "user", "content": content})
    else:
        messages = []
    asked |= {**logprobs, "messages": messages, "chat_template_kwargs": variables or None}
    await _converse(exchange, services, target, asked, streamed, chat=False)


def _completion_logprobs(given: dict[str, Any]) -> dict[str, Any]:
    """``logprobs`` of a completion is a number."""
    flag = Body(given).take_flag("logprobs")
    top = given.get("top_logprobs") or 0
    if not flag and top:
        raise RequestError("top_logprobs: needs logprobs=true")
    return {"logprobs": top} if flag else {}


async def _converse(
    exchange: Exchange,
    services: Services,
    target: Target,
    asked: dict[str, Any],
    streamed: bool,
    *,
    chat: bool,
) -> None:
    """Answer a conversation. Nothing but its roles is asked if it is empty."""
    empty = not asked["messages"]
    if empty:  # the parameters are checked all the same
        asked["messages"] = [{"role": "user", "content": ""}]
    found = read_chat(Body(asked), target.llm.get_default_sampling_params())
    tokenizer, top = target.llm.get_tokenizer(), found.params.logprobs
    made = Responses("chat", target.name, check_ended, tokenizer, top)
    lines = Lines(target.name, made, chat=chat)
    if empty:
        await _respond(exchange, lines.loaded(), streamed)
        return
    template = chat_template(found, target, salted(exchange.caller, found.cache_salt))
    await _answer(
        exchange, services, target, found.messages, found.params, lines, streamed, template
    )


async def _continue(
    exchange: Exchange,
    services: Services,
    target: Target,
    asked: dict[str, Any],
    logprobs: dict[str, Any],
    streamed: bool,
) -> None:
    """Continue a text, without the chat template."""
    found = read_completion(Body({**asked, **logprobs}), target.llm.get_default_sampling_params())
    tokenizer, top = target.llm.get_tokenizer(), found.params.logprobs
    lines = Lines(
        target.name, Responses("cmpl", target.name, check_ended, tokenizer, top), chat=False
    )
    [given] = found.prompts
    prompt = with_salt(given, salted(exchange.caller, found.cache_salt))
    await _answer(exchange, services, target, prompt, found.params, lines, streamed)


async def _answer(
    exchange: Exchange,
    services: Services,
    target: Target,
    prompt: Any,
    params: SamplingParams,
    lines: Lines,
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


async def _respond(exchange: Exchange, value: dict[str, Any], streamed: bool) -> None:
    """An answer that has one line."""
    if not streamed:
        await exchange.respond_json(value)
        return
    await exchange.stream(_LINES)
    await exchange.end(line(value))


async def _stream(exchange: Exchange, answers: Answers, use: Use, lines: Lines) -> None:
    async for number, output in answers.pieces():
        use.outputs[number] = output
        data = lines.of(number, output)
        if not exchange.status:
            await exchange.stream(_LINES)
        if data:
            await exchange.write(data)
    await exchange.end(lines.end(use.outputs))
