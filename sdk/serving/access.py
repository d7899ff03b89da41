"""Who may use the server, and how much: what the routes ask before and tell after a request.

The routes know only these types. :class:`Open` lets everybody in; an application may pass its own
object to ``create_app(access=...)``. The order of the calls for one HTTP request:

1. ``enter`` before the body is read: who is it?
2. the route compares ``Caller.roles`` with the role that it needs,
3. ``admit`` after the prompt was tokenized and before it is queued: may it use that much?
4. ``Admission.finish`` exactly once, however the request ends: what did it use?

``enter`` and ``admit`` may raise :class:`Refused`, which becomes the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

#: ``user``: the routes that use a model. ``metrics``: ``/metrics`` and the live view. ``admin``:
#: routes that change the server (adapters, sleep).
Role = Literal["user", "metrics", "admin"]
ALL_ROLES: frozenset[Role] = frozenset(("user", "metrics", "admin"))

#: The headers of an ASGI scope: names in lower case; a name may occur more than once.
Headers = Sequence[tuple[bytes, bytes]]
#: The host and the port of the peer, if the server knows them.
Client = tuple[str, int] | None


class Refused(Exception):
    """A request is not served: becomes a response with OpenAI's error shape.

    ``status``: the HTTP status (400, 401, 403, 408, 413, 429, ...). ``message``: for the caller; it
    must not contain secrets. ``code``: OpenAI's short code, such as ``invalid_api_key`` or
    ``rate_limit_exceeded``. ``headers``: response headers, such as ``Retry-After``. ``param``: the
    parameter that is wrong, if it is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})
        self.param = param


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request.

    ``name`` is for logs and limits; it is not a secret. ``tenant`` and ``weight``: its share of the
    model (``SamplingParams.tenant``). ``cache_salt``: prefixes are shared only among callers with
    the same salt, so that others cannot find out by time what was asked before.
    """

    name: str = ""
    tenant: str | None = None
    weight: float = 1.0
    cache_salt: str | None = None
    roles: frozenset[Role] = ALL_ROLES


@dataclass(frozen=True, slots=True)
class Demand:
    """The most that a request may use: known before anything runs.

    ``prompt_tokens``: of all prompts together. ``max_tokens``: the most that one of the ``n``
    answers per prompt may have, or 0 for embeddings and scores. ``prompts``: how many there are.
    ``model``: as the request names it; an adapter has its own name. ``body``: the request itself,
    for an audit log that was asked to keep it. ``answer_tokens``: of all answers together, if that
    is not the product: after a shorter prompt there is room for a longer answer.
    """

    prompt_tokens: int
    max_tokens: int
    n: int
    model: str
    prompts: int = 1
    body: Mapping[str, object] | None = field(default=None, repr=False, compare=False)
    answer_tokens: int | None = None

    @property
    def most_tokens(self) -> int:
        """Prompt and answers at their longest."""
        if self.answer_tokens is not None:
            return self.prompt_tokens + self.answer_tokens
        return self.prompt_tokens + self.max_tokens * self.n * self.prompts


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request used and how it ended.

    ``reason``: the finish reason of its (last) answer, ``"cancelled"`` if the client has gone, or
    ``"error"``. ``status``: the HTTP status that was sent (499: the client has gone before).
    ``seconds``: from its arrival. ``completion_tokens``: ``None`` if they are not known, because
    the client has gone before its whole answer was complete: count what was reserved.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int | None
    reason: str
    status: int = 200
    seconds: float = 0.0
    error: str | None = None


class Admission(Protocol):
    """One admitted request."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers for its response, such as ``x-ratelimit-remaining-tokens``."""

    def finish(self, outcome: Outcome) -> None:
        """The request has ended. Called once, on the event loop; must not block."""


class Access(Protocol):
    """Decides about the requests of one app. All methods run on its event loop."""

    async def enter(self, headers: Headers, client: Client) -> Caller:
        """Who sends this request. Called before the body is read. :raises Refused: nobody known."""

    async def admit(self, caller: Caller, demand: Demand) -> Admission:
        """Reserve what the request may use. :raises Refused: it is too much, or too much now."""


@dataclass(slots=True)
class _Free:
    """An admission without limits."""

    headers: Mapping[str, str] = field(default_factory=dict)

    def finish(self, outcome: Outcome) -> None:
        """Nothing was reserved."""


class Open:
    """Everybody may do everything: for an app whose host has its own authentication."""

    def __init__(self, caller: Caller | None = None) -> None:
        self._caller = caller or Caller()
        self._free = _Free()

    async def enter(self, headers: Headers, client: Client) -> Caller:
        return self._caller

    async def admit(self, caller: Caller, demand: Demand) -> Admission:
        return self._free
