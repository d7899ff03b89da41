"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from sdk.serving.answers import Answers, ask
from sdk.serving.anthropic.events import MessageEvents, Messages
from sdk.serving.anthropic.requests import chat_body
from sdk.serving.endpoint import Services, salted
from sdk.serving.exchange import Departure, Exchange
from sdk.serving.images import with_images
from sdk.serving.models import Target
from sdk.serving.openai.requests import Body, ChatRequest, read_chat
from sdk.serving.routes.generate import chat_template, stream_answers


async def messages(exchange: Exchange, services: Services) -> None:
    """The next message of a conversation, as blocks: thinking, text, calls of tools."""
    target, asked, stops = await _read(exchange, services)
    salt = salted(exchange.caller, asked.cache_salt)
    made = Messages(target.name, stops)
    async with Departure(exchange), AsyncExitStack() as stack:
        answers, use = await ask(
            stack,
            exchange,
            services,
            target,
            [asked.messages],
            asked.params.clone(n=1, best_of=None),
            streamed=asked.streaming.stream,
            template=chat_template(asked, target, salt),
        )
        if asked.streaming.stream:
            await stream_answers(exchange, answers, use, MessageEvents(made))
            return
        use.outputs = dict(enumerate(await answers.whole()))
        await exchange.respond_json(made.whole(use.outputs[0]))


async def count_tokens(exchange: Exchange, services: Services) -> None:
    """How many tokens the prompt of such a request has; nothing runs."""
    target, asked, _ = await _read(exchange, services)
    template = chat_template(asked, target, None)
    messages = await with_images(asked.messages, target.llm, services.fetch_image)
    stream = target.llm.astream(messages, asked.params, lora_request=target.lora, **template)
    async with Departure(exchange), Answers([stream]) as answers:
        await exchange.respond_json({"input_tokens": await answers.tokenized()})


async def _read(
    exchange: Exchange, services: Services
) -> tuple[Target, ChatRequest, Sequence[str]]:
    """The model, what it is asked, and the stop sequences of the request, not of the model."""
    exchange.headers["request-id"] = exchange.id  # where Anthropic's clients look for it
    body = Body(await exchange.read_json(services.max_body_bytes))
    target = services.models.resolve(body.take("model"))
    chat = chat_body(body, images=target.served.sees)
    default = target.llm.get_default_sampling_params()
    asked = read_chat(Body({**body.rest(), **chat}), default)
    return target, asked, () if chat["stop"] is None else asked.params.stop or ()
