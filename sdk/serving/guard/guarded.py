"""The access control of a server: keys, limits and the audit log, as one :class:`Access`."""

from __future__ import annotations

from collections.abc import Mapping

from sdk.api.flags import check_flags
from sdk.serving.access import Admission, Caller, Client, Demand, Headers, Outcome, Refused
from sdk.serving.guard.audit import AuditLog
from sdk.serving.guard.authenticate import Anyone, Authenticate, KnownCaller, address
from sdk.serving.guard.limits import UNLIMITED, Limits
from sdk.serving.guard.usage import Meter, Reservation


class GuardedAccess:
    """Decides about requests (:class:`~sdk.serving.access.Access`).

    ``authenticate``: who it is (default: anyone). ``limits``: of each caller that has none of its
    own. ``meter``: counts what callers use; give one with a journal if daily quotas shall survive a
    restart. ``audit``: where requests are recorded, ``audit_requests`` with their prompts.
    """

    def __init__(
        self,
        authenticate: Authenticate | None = None,
        *,
        limits: Limits | None = None,
        meter: Meter | None = None,
        audit: AuditLog | None = None,
        audit_requests: bool = False,
    ) -> None:
        check_flags(audit_requests=audit_requests)
        self._authenticate = authenticate or Anyone()
        self._limits = limits or UNLIMITED
        self._meter = meter or Meter()
        self._audit = audit
        self._audit_requests = audit_requests

    async def enter(self, headers: Headers, client: Client) -> Caller:
        """Who sends this request. :raises Refused: 401 without a valid key."""
        try:
            return await self._authenticate(headers, client)
        except Refused as refused:
            self._record(refused, {"client": address(client)})
            raise

    async def admit(self, caller: Caller, demand: Demand) -> Admission:
        """Reserve what the request may use.

        :raises Refused: 429 over a limit; 503 while the audit log fails closed.
        """
        own = caller.limits if isinstance(caller, KnownCaller) else UNLIMITED
        limits = own.or_else(self._limits)
        about = self._about(caller, demand)
        try:
            if self._audit is not None and not self._audit.accepting:
                raise Refused(
                    503,
                    "The audit log cannot be written, so no request is served. Try again later.",
                    "audit_unavailable",
                    {"retry-after": "5"},
                )
            reservation = self._meter.reserve(caller.name, limits, demand.most_tokens)
        except Refused as refused:
            self._record(refused, about)
            raise
        headers = self._meter.headers(caller.name, limits)
        return _Admitted(headers, reservation, self._audit, about)

    def close(self) -> None:
        """Write what waits for the audit log, and close the files. Idempotent."""
        self._meter.close()
        if self._audit is not None:
            self._audit.close()

    def _about(self, caller: Caller, demand: Demand) -> dict[str, object]:
        about: dict[str, object] = {"name": caller.name, "model": demand.model}
        if isinstance(caller, KnownCaller):
            about |= {"key": caller.key_id or None, "client": caller.client or None}
        if self._audit_requests and demand.body is not None:
            about["request"] = demand.body
        return about

    def _record(self, refused: Refused, about: Mapping[str, object]) -> None:
        if self._audit is not None:
            self._audit.write(
                {
                    **about,
                    "event": "refused",
                    "status": refused.status,
                    "code": refused.code,
                }
            )


class _Admitted:
    """An admitted request."""

    def __init__(
        self,
        headers: Mapping[str, str],
        reservation: Reservation,
        audit: AuditLog | None,
        about: Mapping[str, object],
    ) -> None:
        self.headers = headers
        self._reservation = reservation
        self._audit = audit
        self._about = about

    def finish(self, outcome: Outcome) -> None:
        """Count what was used, and record it."""
        self._reservation.settle(self._used(outcome))
        if self._audit is not None:
            self._audit.write(
                {
                    **self._about,
                    "event": "request",
                    "id": outcome.request_id,
                    "status": outcome.status,
                    "outcome": outcome.reason,
                    "prompt_tokens": outcome.prompt_tokens,
                    "cached_tokens": outcome.cached_tokens,
                    "completion_tokens": outcome.completion_tokens,
                    "seconds": outcome.seconds,
                    "error": outcome.error,
                }
            )

    def _used(self, outcome: Outcome) -> int:
        if outcome.completion_tokens is not None:
            return outcome.prompt_tokens + outcome.completion_tokens
        # Who leaves may have used all of it. Errors without an answer are not paid for.
        return self._reservation.tokens if outcome.reason == "cancelled" else 0
