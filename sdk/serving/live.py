"""``GET /live``: what the models do now, as server-sent events, for those who look."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from sdk.api.errors import EngineAsleepError, SdkError
from sdk.api.outputs import RequestOutput
from sdk.api.timeline import RequestEvent, Timeline
from sdk.engine.running_requests import RequestInfo
from sdk.serving.access import Refused
from sdk.serving.endpoint import Services
from sdk.serving.exchange import Departure, Exchange
from sdk.serving.models import Models, Served

#: Two states per second: a person sees no more.
PERIOD_S = 0.5
MAX_VIEWERS = 32
#: Requests listed per model. 1,000 would be 250 KB per event.
MAX_REQUESTS = 100
#: Requests whose timelines are sent after their end: 1 KB each, if nothing special happened.
MAX_ENDED = 10


class Live:
    """A handler whose response is a stream of states until the viewer leaves.

    An event is an object with ``time`` (seconds since 1970) and ``models``, a list of objects:

    * ``name``; ``state``: ``ready``, ``asleep``, or the error of a model that is closed or dead;
    * ``metrics``: :meth:`sdk.LLM.get_metrics`;
    * ``requests``: the first :data:`MAX_REQUESTS` unfinished answers, without their texts, and
      ``more``: how many there are besides;
    * ``ended``: the timelines of the last :data:`MAX_ENDED` requests of the server, latest first.

    A state is made when a viewer needs one, and shared by all: without viewers nothing runs.
    """

    def __init__(self, models: Models, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._models = models
        self._clock = clock
        self._closed = asyncio.Event()
        self._ended: dict[str, deque[tuple[str, Timeline]]] = {}
        self._made = -PERIOD_S
        self._event = b""
        self.viewers = 0

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
                    await exchange.write(self.event())
                    with contextlib.suppress(asyncio.TimeoutError):
                        await asyncio.wait_for(self._closed.wait(), PERIOD_S)
                await exchange.end()
        finally:
            self.viewers -= 1

    def close(self) -> int:
        """End all streams, and return how many: a server that waits for its requests must not wait
        for viewers."""
        self._closed.set()
        return self.viewers

    def ended(self, model: str, outputs: Iterable[RequestOutput]) -> None:
        """Requests to ``model`` have ended with ``outputs``. Keeps what they say about times."""
        kept = self._ended.setdefault(model, deque(maxlen=MAX_ENDED))
        for output in outputs:
            timeline = output.timeline
            if timeline is not None:
                kept.append((output.request_id, timeline))

    def event(self) -> bytes:
        """The event of this moment; viewers within half a period see the same one."""
        now = self._clock()
        if now - self._made > PERIOD_S / 2:
            self._made = now
            state = {"time": time.time(), "models": [self._model(one) for one in self._models]}
            self._event = b"data: " + json.dumps(state, separators=(",", ":")).encode() + b"\n\n"
        return self._event

    def _model(self, served: Served) -> dict[str, Any]:
        found: dict[str, Any] = {"name": served.name, "state": "ready", "metrics": {}}
        requests: list[RequestInfo] = []
        try:
            found["metrics"] = served.llm.get_metrics()
            requests = served.llm.list_requests()
        except EngineAsleepError:
            found["state"] = "asleep"
        except SdkError as error:
            found["state"] = str(error)
        found["requests"] = [_unfinished(one) for one in requests[:MAX_REQUESTS]]
        found["more"] = max(0, len(requests) - MAX_REQUESTS)
        found["ended"] = [_timeline(*one) for one in reversed(self._ended.get(served.name, ()))]
        return found


def _unfinished(one: RequestInfo) -> dict[str, Any]:
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


def _timeline(request_id: str, timeline: Timeline) -> dict[str, Any]:
    last = timeline.events[-1]
    return {
        "id": request_id,
        "reasons": timeline.finish_reasons,
        "seconds": last.ts + last.seconds - timeline.arrival_time,
        "generated_tokens": last.num_tokens if last.kind == "finished" else None,
        "events": [_event(one, timeline.arrival_time) for one in timeline.events],
    }


def _event(event: RequestEvent, arrival_time: float) -> dict[str, Any]:
    numbers = {
        "tokens": event.num_tokens,
        "pages": event.num_pages,
        "bits": event.kv_bits,
        "seconds": event.seconds,
        "events": event.num_events,
        "answer": event.answer,
    }
    shown = {name: number for name, number in numbers.items() if number}
    return {"kind": event.kind, "at": event.ts - arrival_time, **shown}
