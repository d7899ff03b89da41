"""What every route does around its own work: who asks, errors, clients that leave."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace

from sdk.api.image_options import ImageFetcher
from sdk.api.outputs import RequestOutput
from sdk.serving.access import Access, Admission, Caller, Demand, Outcome, Refused, Role
from sdk.serving.errors import INTERNAL, STOPPING, error_response
from sdk.serving.exchange import ClientGone, Exchange, Receive, Scope, Send
from sdk.serving.guard.body_limits import BodyLimits
from sdk.serving.interfaces import interface_of
from sdk.serving.kept_responses import KeptResponses
from sdk.serving.models import Models

logger = logging.getLogger("sdk")


@dataclass(frozen=True, slots=True)
class Services:
    """What the routes of one app share."""

    models: Models
    access: Access
    max_body_bytes: int
    limits: BodyLimits | None
    kept: KeptResponses
    #: Told the model and the last outputs of each use that has ended.
    on_end: Callable[[str, Iterable[RequestOutput]], None] | None = None
    #: Gets images that requests name by a URL; None: they must be in the request.
    fetch_image: ImageFetcher | None = None


Handler = Callable[[Exchange, Services], Awaitable[None]]


class Endpoint:
    """An ASGI application for one route. ``role``: what its caller must be; ``None``: anybody."""

    def __init__(
        self,
        handler: Handler,
        services: Services,
        role: Role | None = "user",
    ) -> None:
        self._handler = handler
        self._services = services
        self._role = role

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._services.limits
        check = None if limits is None else limits.check
        exchange = Exchange(scope, receive, send, check, interface_of(scope["path"]))
        try:
            if self._role is not None:
                await self._enter(exchange, self._role)
            await self._handler(exchange, self._services)
        except ClientGone:
            return
        except asyncio.CancelledError:  # the server stops, and the time to drain is over
            await exchange.fail(STOPPING)
        except Exception as error:
            response = error_response(error)
            if response is None:
                logger.exception("request %s failed", exchange.id)
                response = INTERNAL
            await exchange.fail(response)

    async def _enter(self, exchange: Exchange, role: Role) -> None:
        access = self._services.access
        exchange.caller = await access.enter(exchange.request_headers, exchange.client)
        if role not in exchange.caller.roles:
            raise Refused(403, f"this key may not be used here: the role is {role}", "forbidden")


class Use:
    """One admitted use of a model: tells the access control how it ended. A context manager.

    ``outputs``: the newest output of each prompt, which the route keeps here.
    """

    def __init__(
        self, admission: Admission, exchange: Exchange, services: Services, demand: Demand
    ) -> None:
        self._admission = admission
        self._exchange = exchange
        self._services = services
        self._demand = demand
        self.outputs: dict[int, RequestOutput] = {}

    def __enter__(self) -> Use:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        status, text, reason = self._exchange.status or 200, None, "stop"
        cached, generated = 0, 0
        for output in self.outputs.values():
            cached += output.num_cached_tokens or 0
            if output.metrics is not None:
                generated += output.metrics.num_generation_tokens
            if output.outputs:
                reason = output.outputs[-1].finish_reason or reason
        if error is not None:
            gone = not isinstance(error, Exception) or isinstance(error, ClientGone)
            reason = "cancelled" if gone else "error"
            response = error_response(error) if isinstance(error, Exception) else None
            text = None if gone else (response or INTERNAL).message
            status = self._exchange.status or (499 if gone else (response or INTERNAL).status)
        self._admission.finish(
            Outcome(
                request_id=self._exchange.id,
                prompt_tokens=self._demand.prompt_tokens,
                cached_tokens=cached,
                completion_tokens=generated if self.outputs or error is None else None,
                reason=reason,
                status=status,
                seconds=time.monotonic() - self._exchange.began,
                error=text,
            )
        )
        if self._services.on_end is not None:
            self._services.on_end(self._demand.model, self.outputs.values())


async def admitted(exchange: Exchange, services: Services, demand: Demand) -> Use:
    """Ask the access control. :raises Refused: it is too much."""
    demand = replace(demand, body=exchange.body)
    admission = await services.access.admit(exchange.caller, demand)
    exchange.headers.update(admission.headers)
    return Use(admission, exchange, services, demand)


def salted(caller: Caller, salt: str | None) -> str | None:
    """The cache salt of a request: it may divide its caller's share further, not leave it."""
    if caller.cache_salt is None or salt is None:
        return caller.cache_salt or salt
    return f"{len(caller.cache_salt)}:{caller.cache_salt}:{salt}"
