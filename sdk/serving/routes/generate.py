"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any, Protocol

from sdk.api.outputs import RequestOutput
from sdk.requests.prompts.reader import with_salt
from sdk.serving.answers import Answers, ask
from sdk.serving.endpoint import Services, Use, salted
from sdk.serving.errors import check_ended
from sdk.serving.events import ChatEvents, CompletionEvents
from sdk.serving.exchange import Departure, Exchange
from sdk.serving.models import Target
from sdk.serving.openai.completions import CompletionResponses
from sdk.serving.openai.requests import Body, ChatRequest, read_chat, read_completion
from sdk.serving.openai.responses import Responses


async def chat_completions(exchange: Exchange, services: Services) -> None:
    """A conversation's next message."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    asked = read_chat(body, target.llm.get_default_sampling_params())
    salt = salted(exchange.caller, asked.cache_salt)
    tokenizer, top = target.llm.get_tokenizer(), asked.params.logprobs
    made = Responses("chatcmpl", target.name, check_ended, tokenizer, top)
    streaming = asked.streaming
    async with Departure(exchange), AsyncExitStack() as stack:
        answers, use = await ask(
            stack,
            exchange,
            services,
            target,
            [asked.messages],
            asked.params,
            streamed=streaming.stream,
            template=chat_template(asked, target, salt),
        )
        if streaming.stream:
            await stream_answers(exchange, answers, use, ChatEvents(made, streaming))
            return
        use.outputs = dict(enumerate(await answers.whole()))
        await exchange.respond(_json(made.chat(use.outputs[0]).wire()))


def chat_template(asked: ChatRequest, target: Target, salt: str | None) -> dict[str, Any]:
    """The keyword arguments of ``LLM.astream`` for a conversation."""
    template = dict(asked.template)
    if salt is not None:
        template["cache_salt"] = salt
    if "tools" not in template and target.served.reasons:
        template["tools"] = []  # splits the reasoning from the answer
    return template


class Events(Protocol):
    """Makes the bytes of a stream."""

    def of(self, number: int, output: RequestOutput) -> bytes:
        """Those of one output of prompt ``number``; empty if it has nothing new to show."""

    def end(self, outputs: dict[int, RequestOutput]) -> bytes:
        """The last ones. ``outputs``: the last one of each prompt."""


async def completions(exchange: Exchange, services: Services) -> None:
    """The continuations of one or more texts."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    asked = read_completion(body, target.llm.get_default_sampling_params())
    salt, streaming = salted(exchange.caller, asked.cache_salt), asked.streaming
    prompts = [with_salt(prompt, salt) for prompt in asked.prompts]
    made = CompletionResponses(target.name, check_ended, asked, target.llm.get_tokenizer())
    async with Departure(exchange), AsyncExitStack() as stack:
        answers, use = await ask(
            stack,
            exchange,
            services,
            target,
            prompts,
            asked.params,
            streamed=streaming.stream,
        )
        if streaming.stream:
            events = CompletionEvents(made, streaming, asked.params.n)
            await stream_answers(exchange, answers, use, events)
            return
        outputs = await answers.whole()
        use.outputs = dict(enumerate(outputs))
        await exchange.respond(_json(made.whole(outputs).wire()))


async def stream_answers(exchange: Exchange, answers: Answers, use: Use, events: Events) -> None:
    """Send the pieces as they come. The response begins with the first one, so that a request
    that is rejected before has its own status."""
    async for number, output in answers.pieces():
        use.outputs[number] = output
        data = events.of(number, output)
        if data:
            if not exchange.status:
                await exchange.stream()
            await exchange.write(data)
    if not exchange.status:
        await exchange.stream()
    await exchange.end(events.end(use.outputs))


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
