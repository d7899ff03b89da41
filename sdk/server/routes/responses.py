"""``/v1/responses``: OpenAI's Responses API without stored responses."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import Any

from sdk.openai.items import chat_body, items_of, new_id
from sdk.openai.requests import Body, ChatRequest, read_chat
from sdk.openai.responses import stream_usage
from sdk.outputs import CompletionOutput, RequestOutput
from sdk.server.answers import ask
from sdk.server.endpoint import Services, salted
from sdk.server.errors import check_ended
from sdk.server.exchange import Departure, Exchange
from sdk.server.response_events import ResponseEvents
from sdk.server.routes.generate import chat_template, stream_answers


async def responses(exchange: Exchange, services: Services) -> None:
    """An answer as items: reasoning, a message, tool calls."""
    given = await exchange.read_json(services.max_body_bytes)
    body = Body(given)
    target = services.models.resolve(body.take("model"))
    chat = chat_body(body)
    asked = read_chat(Body({**body.rest(), **chat}), target.llm.get_default_sampling_params())
    made = ResponseObject(target.name, asked, given)
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


class ResponseObject:
    """The object that describes one response: before, while and after it is made."""

    def __init__(self, model: str, asked: ChatRequest, given: dict[str, Any]) -> None:
        params = asked.params
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
            "previous_response_id": None,
            "reasoning": given.get("reasoning"),
            "store": False,
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
        return {
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
