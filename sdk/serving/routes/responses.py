"""``/v1/responses``: OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.serving.answers import ask
from sdk.serving.endpoint import Services, salted
from sdk.serving.errors import check_ended
from sdk.serving.exchange import Departure, Exchange
from sdk.serving.openai.items import chat_body, items_of, messages_of, new_id
from sdk.serving.openai.requests import Body, ChatRequest, read_chat
from sdk.serving.openai.responses import stream_usage
from sdk.serving.response_events import ResponseEvents
from sdk.serving.routes.generate import chat_template, stream_answers


async def responses(exchange: Exchange, services: Services) -> None:
    """An answer as items: reasoning, a message, tool calls."""
    given = await exchange.read_json(services.max_body_bytes)
    body, kept, caller = Body(given), services.kept, exchange.caller
    target = services.models.resolve(body.take("model"))
    store = body.take_flag("store", True) and kept.max_bytes > 0
    previous = body.take("previous_response_id")
    earlier = [] if previous is None else kept.conversation(caller, previous)
    chat = chat_body(body, earlier, images=target.served.sees)
    asked = read_chat(Body({**body.rest(), **chat}), target.llm.get_default_sampling_params())
    conversation = asked.messages[1:] if given.get("instructions") else asked.messages

    def ended(response: dict[str, Any]) -> None:
        kept.keep(caller, response, messages_of(response["output"], conversation))

    made = ResponseObject(target.name, asked, given, ended if store else None)
    salt = salted(exchange.caller, asked.cache_salt)
    streamed = asked.streaming.stream
    async with Departure(exchange), AsyncExitStack() as stack:
        answers, use = await ask(
            stack,
            exchange,
            services,
            target,
            [asked.messages],
            asked.params.clone(n=1, best_of=None),
            streamed=streamed,
            template=chat_template(asked, target, salt),
        )
        if streamed:
            await stream_answers(exchange, answers, use, ResponseEvents(made))
            return
        use.outputs = dict(enumerate(await answers.whole()))
        await exchange.respond_json(made.whole(use.outputs[0]))


async def retrieve(exchange: Exchange, services: Services) -> None:
    """A response that is kept."""
    response_id = exchange.path_parameter("response_id")
    await exchange.respond_json(services.kept.response(exchange.caller, response_id))


async def delete(exchange: Exchange, services: Services) -> None:
    """Forget a response."""
    response_id = exchange.path_parameter("response_id")
    services.kept.forget(exchange.caller, response_id)
    await exchange.respond_json({"id": response_id, "object": "response", "deleted": True})


class ResponseObject:
    """The object that describes one response: before, while and after it is made.

    ``on_end`` gets it when its answer is whole, if it shall be kept.
    """

    def __init__(
        self,
        model: str,
        asked: ChatRequest,
        given: dict[str, Any],
        on_end: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        params = asked.params
        self._on_end = on_end
        self._facts: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": given.get("instructions"),
            "max_output_tokens": params.max_tokens,
            "metadata": given.get("metadata") or {},
            "output": [],
            "parallel_tool_calls": asked.template.get("parallel_tool_calls", True),
            "previous_response_id": given.get("previous_response_id"),
            "reasoning": given.get("reasoning"),
            "store": on_end is not None,
            "temperature": params.temperature,
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools") or [],
            "top_p": params.top_p,
            "truncation": given.get("truncation", "disabled"),
            "usage": None,
            "user": given.get("user"),
        }

    def begun(self) -> dict[str, Any]:
        """Before there is anything of the answer."""
        return dict(self._facts)

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """:raises AnswerError: the answer failed."""
        [answer] = output.outputs
        return self.ended(output, answer, items_of(answer))

    def ended(
        self, output: RequestOutput, answer: CompletionOutput, items: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The whole response with the items of its answer."""
        check_ended(answer)
        usage = stream_usage([output])
        cut = answer.finish_reason in ("length", "deadline")
        cached = (
            0
            if usage.prompt_tokens_details is None
            else (usage.prompt_tokens_details.cached_tokens)
        )
        response = {
            **self._facts,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
        }
        if self._on_end is not None:
            self._on_end(response)
        return response
