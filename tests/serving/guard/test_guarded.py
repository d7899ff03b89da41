"""Keys, limits and the audit log behind the protocol that the routes ask."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sdk.serving.access import Access, Caller, Client, Demand, Headers, Outcome, Refused
from sdk.serving.guard import AuditLog, ByKey, GuardedAccess, KeyFile, KnownCaller, Limits, Meter
from sdk.serving.guard.key_file import add_key
from sdk.serving.guard.keys import KeyHolder

CLIENT = ("10.0.0.7", 4711)


def demand(prompt: int = 10, most: int = 20, n: int = 1, **more: Any) -> Demand:
    return Demand(prompt, most, n, more.pop("model", "smollm"), **more)


def outcome(prompt: int = 10, completion: int | None = 5, **more: Any) -> Outcome:
    return Outcome("req-1", prompt, 0, completion, more.pop("reason", "stop"), **more)


def audited(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_is_reserved_settled_and_recorded(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    keys = tmp_path / "keys.json"
    key = add_key(keys, KeyHolder("alice"))
    access: Access = GuardedAccess(
        ByKey(file=KeyFile(keys)), limits=Limits(tokens_per_minute=100), audit=log
    )

    async def request() -> None:
        caller = await access.enter([(b"x-api-key", key.encode())], CLIENT)
        admission = await access.admit(caller, demand(10, 20, n=2, prompts=2))
        assert admission.headers["x-ratelimit-remaining-tokens"] == "10"
        with pytest.raises(Refused, match="tokens per minute"):
            await access.admit(caller, demand(1, 10))
        admission.finish(outcome(10, 5, seconds=0.5))
        admission = await access.admit(caller, demand(10, 75))
        admission.finish(outcome(10, None, reason="cancelled", status=499))
        with pytest.raises(Refused):  # what is not known counts as if it had been used
            await access.admit(caller, demand(1, 0))

    asyncio.run(request())
    assert isinstance(access, GuardedAccess)
    access.close()
    first, second, third, fourth = (
        {k: v for k, v in record.items() if k != "time"} for record in audited(log.path)
    )
    about = {
        "name": "alice",
        "model": "smollm",
        "key": key.split("-")[1],
        "client": "10.0.0.7",
    }
    over = {**about, "event": "refused", "status": 429, "code": "rate_limit_exceeded"}
    assert first == fourth == over
    assert second == {
        **about,
        "event": "request",
        "id": "req-1",
        "status": 200,
        "outcome": "stop",
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "completion_tokens": 5,
        "seconds": 0.5,
    }
    assert third["outcome"] == "cancelled" and "completion_tokens" not in third


def test_wrong_keys_are_recorded_without_them(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    access = GuardedAccess(ByKey(["right"]), audit=log)
    with pytest.raises(Refused):
        asyncio.run(access.enter([(b"x-api-key", b"my-guess")], CLIENT))
    access.close()
    (record,) = audited(log.path)
    del record["time"]
    assert record == {
        "client": "10.0.0.7",
        "event": "refused",
        "status": 401,
        "code": "invalid_api_key",
    }


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_recorded_only_if_asked(tmp_path: Path, asked: bool) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    access = GuardedAccess(audit=log, audit_requests=asked)

    async def request() -> None:
        caller = await access.enter([], CLIENT)
        admission = await access.admit(caller, demand(body={"prompt": "a secret"}))
        admission.finish(outcome())

    asyncio.run(request())
    access.close()
    (record,) = audited(log.path)
    assert ("a secret" in json.dumps(record)) == asked
    assert not asked or json.loads(record["request"]) == {"prompt": "a secret"}


def test_nothing_is_admitted_while_the_audit_log_fails_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AuditLog(tmp_path / "audit.jsonl", on_error="closed")
    access = GuardedAccess(audit=log, limits=Limits(concurrent=1))
    monkeypatch.setattr(AuditLog, "accepting", False)
    caller = asyncio.run(access.enter([], CLIENT))
    with pytest.raises(Refused, match="audit log cannot be written") as caught:
        asyncio.run(access.admit(caller, demand()))
    assert caught.value.status == 503
    monkeypatch.undo()
    asyncio.run(access.admit(caller, demand()))  # the refused request took no place
    access.close()


def test_a_host_may_authenticate_itself() -> None:
    async def by_session(headers: Headers, client: Client) -> Caller:
        for name, value in headers:
            if name == b"cookie" and value == b"session=7":
                return KnownCaller("user7", limits=Limits(concurrent=1))
        raise Refused(401, "Log in first.")

    access = GuardedAccess(by_session, limits=Limits(concurrent=5))

    async def requests() -> None:
        with pytest.raises(Refused, match="Log in first"):
            await access.enter([], None)
        caller = await access.enter([(b"cookie", b"session=7")], None)
        await access.admit(caller, demand())
        with pytest.raises(Refused, match="the limit is 1"):
            await access.admit(caller, demand())

    asyncio.run(requests())


def test_a_caller_without_limits_of_its_own_has_those_of_the_server() -> None:
    access = GuardedAccess(limits=Limits(requests_per_minute=1), meter=Meter())

    async def requests() -> None:
        plain = Caller("someone")
        await access.admit(plain, demand())
        with pytest.raises(Refused):
            await access.admit(plain, demand())

    asyncio.run(requests())
