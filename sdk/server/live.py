"""``GET /live``: what the models do now, as server-sent events, for those who look."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable
from typing import Any

from sdk.errors import EngineAsleepError, SdkError
from sdk.server.access import Refused
from sdk.server.endpoint import Services
from sdk.server.exchange import Departure, Exchange
from sdk.server.models import Models, Served

#: Two states per second: a person sees no more.
PERIOD_S = 0.5
MAX_VIEWERS = 32
#: Requests listed per model. 1,000 would be 200 KB per event.
MAX_REQUESTS = 100


class Live:
    """A handler whose response is a stream of states until the viewer leaves.

    An event is an object with ``time`` (seconds since 1970) and ``models``, a list of objects:

    * ``name``; ``state``: ``ready``, ``asleep``, or the error of a model that is closed or dead;
    * ``metrics``: :meth:`sdk.LLM.get_metrics`;
    * ``requests``: the first :data:`MAX_REQUESTS` unfinished answers, without their texts, and
      ``more``: how many there are besides.

    A state is made when a viewer needs one, and shared by all: without viewers nothing runs.
    """

    def __init__(self, models: Models, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._models = models
        self._clock = clock
        self._closed = asyncio.Event()
        self.viewers = 0
        self._made = -PERIOD_S
        self._event = b""

    async def __call__(self, exchange: Exchange, services: Services) -> None:
        """:raises Refused: there are too many viewers, or the server is closing."""
        if self._closed.is_set():
            raise Refused(503, "the server is closing", "closing")
        if self.viewers >= MAX_VIEWERS:
            message = f"live view: expected at most {MAX_VIEWERS} viewers; close another one"
            raise Refused(429, message, "too_many_viewers", {"Retry-After": "10"})
        self.viewers += 1
        try:
            async with Departure(exchange):
                await exchange.stream()
                while not self._closed.is_set():
                    await exchange.write(self._state())
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._closed.wait(), PERIOD_S)
                await exchange.end()
        finally:
            self.viewers -= 1

    def close(self) -> None:
        """End all streams: a server that waits for its requests must not wait for viewers."""
        self._closed.set()

    def _state(self) -> bytes:
        """The event of this moment; viewers within half a period see the same one."""
        now = self._clock()
        if now - self._made > PERIOD_S / 2:
            self._made = now
            state = {"time": time.time(), "models": [_model(served) for served in self._models]}
            self._event = b"data: " + json.dumps(state, separators=(",", ":")).encode() + b"\n\n"
        return self._event


def _model(served: Served) -> dict[str, Any]:
    try:
        metrics, requests = served.llm.get_metrics(), served.llm.list_requests()
    except EngineAsleepError:
        return _empty(served.name, "asleep")
    except SdkError as error:
        return _empty(served.name, str(error))
    return {
        "name": served.name,
        "state": "ready",
        # JSON has no NaN and no infinity
        "metrics": {key: x if math.isfinite(x) else None for key, x in metrics.items()},
        "requests": [_request(one) for one in requests[:MAX_REQUESTS]],
        "more": max(0, len(requests) - MAX_REQUESTS),
    }


def _empty(name: str, state: str) -> dict[str, Any]:
    return {"name": name, "state": state, "metrics": {}, "requests": [], "more": 0}


def _request(one: Any) -> dict[str, Any]:
    answer = f"{one.request_id} #{one.index + 1}" if one.index else one.request_id
    return {
        "id": answer,
        "kind": one.kind,
        "state": one.state,
        "tenant": one.tenant,
        "adapter": one.adapter,
        "prompt_tokens": one.num_prompt_tokens,
        "cached_tokens": one.num_cached_tokens,
        "computed_tokens": one.num_computed_tokens,
        "generated_tokens": one.num_generated_tokens,
        "preemptions": one.num_preemptions,
        "age": one.age,
        "pages": {f"{bits}bit": count for bits, count in one.kv_pages.items()},
    }
