"""The answers to one HTTP request: admitted, submitted, collected or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from sdk.api.outputs import RequestOutput
from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.serving.access import Demand
from sdk.serving.endpoint import Services, Use, admitted
from sdk.serving.exchange import Exchange
from sdk.serving.images import with_images
from sdk.serving.models import Target

#: A prompt's number and a piece of its answers.
Piece = tuple[int, RequestOutput]


class Answers:
    """The requests for one or more prompts. A context manager: they are aborted if it ends early.

    Nothing is submitted before :meth:`whole` or :meth:`pieces`.
    """

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams

    async def tokenized(self) -> int:
        """Tokenize and check all prompts; how many tokens they have.

        :raises RequestError: one is invalid, or too long.
        """
        for stream in self._streams:
            await stream
        return sum(len(stream.prompt_token_ids) for stream in self._streams)

    def rooms(self, max_model_len: int) -> list[int]:
        """The most tokens that fit after each prompt."""
        return [max_model_len - len(stream.prompt_token_ids) for stream in self._streams]

    async def whole(self) -> list[RequestOutput]:
        """The last outputs, in the order of the prompts."""
        if len(self._streams) == 1:
            return [await _last(self._streams[0])]
        tasks = [asyncio.ensure_future(_last(stream)) for stream in self._streams]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            await _cancelled(tasks)

    async def pieces(self) -> AsyncIterator[Piece]:
        """The outputs as they come."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, output
            return
        ready: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

        async def collect(number: int, stream: Any) -> None:
            try:
                async for output in stream:
                    ready.put_nowait((number, output))
                ready.put_nowait(None)
            except Exception as error:
                ready.put_nowait(error)

        tasks = [asyncio.ensure_future(collect(*pair)) for pair in enumerate(self._streams)]
        try:
            running = len(tasks)
            while running:
                found = await ready.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    running -= 1
                else:
                    yield found
        finally:
            await _cancelled(tasks)

    async def __aenter__(self) -> Answers:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for stream in self._streams:
            await stream.aclose()


async def _last(stream: Any) -> RequestOutput:
    last: RequestOutput | None = None
    async with aclosing(stream):
        async for output in stream:
            last = output
    assert last is not None
    return last


async def _cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ask(
    stack: AsyncExitStack,
    exchange: Exchange,
    services: Services,
    target: Target,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    streamed: bool,
    template: dict[str, Any] | None = None,
) -> tuple[Answers, Use]:
    """Prepare answers to ``prompts`` (or to one conversation, with ``template``), and have them
    admitted. They end with ``stack``.

    :raises RequestError: an invalid request. :raises Refused: it was not admitted.
    """
    kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
    params = params.clone(output_kind=kind, tenant=exchange.caller.tenant)
    target.served.weigh(exchange.caller)
    if template is not None:
        prompts = [await with_images(one, target.llm, services.fetch_image) for one in prompts]
    more = {"lora_request": target.lora, **(template or {})}
    streams = [target.llm.astream(prompt, params, **more) for prompt in prompts]
    answers = await stack.enter_async_context(Answers(streams))
    count = await answers.tokenized()
    rooms = answers.rooms(target.llm.max_model_len)
    if params.max_tokens is not None:
        rooms = [min(params.max_tokens, room) for room in rooms]
    n = params.num_answers
    total = sum(rooms) * n if len(set(rooms)) > 1 else None
    demand = Demand(count, max(rooms), n, target.name, len(prompts), answer_tokens=total)
    use = stack.enter_context(await admitted(exchange, services, demand))
    return answers, use
