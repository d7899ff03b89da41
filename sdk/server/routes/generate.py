"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack

from sdk.openai.completions import CompletionResponses
from sdk.openai.requests import Body, read_chat, read_completion, with_salt
from sdk.openai.responses import Responses
from sdk.server.answers import Answers, ask
from sdk.server.endpoint import Services, Use, salted
from sdk.server.errors import check_ended
from sdk.server.events import ChatEvents, CompletionEvents
from sdk.server.exchange import Departure, Exchange


async def chat_completions(exchange: Exchange, services: Services) -> None:
    """A conversation's next message."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    asked = read_chat(body, target.llm.get_default_sampling_params())
    template = dict(asked.template)
    if (salt := salted(exchange.caller, asked.cache_salt)) is not None:
        template["cache_salt"] = salt
    if "tools" not in template and target.served.reasons:
        template["tools"] = []  # splits the reasoning from the answer
    made = Responses("chatcmpl", target.name, check_ended)
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
            template=template,
        )
        if streaming.stream:
            await stream_answers(exchange, answers, use, ChatEvents(made, streaming))
            return
        use.outputs = dict(enumerate(await answers.whole()))
        await exchange.respond(_json(made.chat(use.outputs[0]).wire()))


async def completions(exchange: Exchange, services: Services) -> None:
    """The continuations of one or more texts."""
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    asked = read_completion(body, target.llm.get_default_sampling_params())
    salt, streaming = salted(exchange.caller, asked.cache_salt), asked.streaming
    prompts = [with_salt(prompt, salt) for prompt in asked.prompts]
    text_of = target.llm.get_tokenizer().decode
    made = CompletionResponses(target.name, check_ended, asked, text_of)
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


async def stream_answers(
    exchange: Exchange, answers: Answers, use: Use, events: ChatEvents | CompletionEvents
) -> None:
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
