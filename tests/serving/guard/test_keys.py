"""Keys: made, hashed, found, rotated, revoked, and read again while a server runs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from sdk.api.errors import RequestError
from sdk.serving.access import Caller, Headers, Refused
from sdk.serving.guard import ByKey, KeyFile, KnownCaller, Limits
from sdk.serving.guard.key_file import add_key, read_keys, revoke_key, rotate_key
from sdk.serving.guard.keys import KeyHolder, KeyTable, Secret, new_key
from tests.serving.guard.clock import Clock


def bearer(key: str) -> Headers:
    return [(b"authorization", b"Bearer " + key.encode())]


def enter(by: ByKey, headers: Headers) -> Caller:
    return asyncio.run(by(headers, ("10.0.0.7", 999)))


def refusal(by: ByKey, headers: Headers) -> Refused:
    with pytest.raises(Refused) as caught:
        enter(by, headers)
    return caught.value


def test_keys_are_random_and_name_themselves() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"sk-[0-9a-f]{12}-[0-9a-f]{48}", key) for key in keys)


def test_the_file_has_hashes_only_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, KeyHolder("alice", limits=Limits(concurrent=3)))
    secret = key.rpartition("-")[2]
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = read_keys(path).find(key.encode())
    assert found is not None
    assert (found[0].name, found[0].limits, found[1].id) == (
        "alice",
        Limits(concurrent=3),
        key.split("-")[1],
    )
    assert read_keys(path).find((key[:-1] + "x").encode()) is None


def test_bearer_and_x_api_key_find_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, KeyHolder("alice", frozenset(("metrics",)), tenant="team", weight=3.0))
    by = ByKey(file=KeyFile(path))
    for headers in (
        bearer(key),
        [(b"authorization", b"bearer   " + key.encode() + b" ")],
        [(b"x-api-key", key.encode())],
        [*bearer(key), (b"x-api-key", key.encode())],
    ):
        caller = enter(by, headers)
        assert isinstance(caller, KnownCaller)
        assert (caller.name, caller.tenant, caller.weight) == ("alice", "team", 3.0)
        assert caller.roles == {"metrics"} and caller.cache_salt == "team"
        assert (caller.key_id, caller.client) == (key.split("-")[1], "10.0.0.7")


def test_callers_have_salts_of_their_own_unless_they_share(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = [add_key(path, KeyHolder(name)) for name in ("alice", "bob")]
    salts = {enter(ByKey(file=KeyFile(path)), bearer(key)).cache_salt for key in keys}
    assert salts == {"alice", "bob"}
    shared = ByKey(file=KeyFile(path), share_prefixes=True)
    assert {enter(shared, bearer(key)).cache_salt for key in keys} == {None}


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic dXNlcjpwYXNz")],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer " + b"x" * 1_000_000)],
        [(b"authorization", b"Bearer \xff\xfe\x00")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", "schlüssel".encode())],
        [(b"x-api-key", b"right right")],
        [(b"x-api-key", b"righ")],
        [(b"x-api-key", b"RIGHT")],
        [(b"cookie", b"right")],
    ],
)
def test_wrong_or_missing_keys_are_refused(headers: Headers) -> None:
    error = refusal(ByKey(["right"]), headers)
    assert (error.status, error.code) == (401, "invalid_api_key")
    assert error.headers == {"www-authenticate": "Bearer"}
    assert "wrong" not in error.message and "right" not in error.message


def test_two_different_keys_are_refused() -> None:
    by = ByKey(["right", "other"])
    for headers in (
        [(b"authorization", b"Bearer right"), (b"authorization", b"Bearer other")],
        [(b"authorization", b"Bearer right"), (b"x-api-key", b"other")],
        [(b"authorization", b"Bearer right"), (b"x-api-key", b"")],
    ):
        assert refusal(by, headers).status == 400


def test_a_rotated_key_works_until_the_overlap_ends(tmp_path: Path) -> None:
    path, wall = tmp_path / "keys.json", Clock()
    old = add_key(path, KeyHolder("alice"))
    new = rotate_key(path, "alice", overlap=3600)
    created = read_keys(path).holders["alice"].secrets[1].created
    by = ByKey(file=KeyFile(path), wall=wall)
    wall.now = created + 3590
    assert enter(by, bearer(old)).name == enter(by, bearer(new)).name == "alice"
    wall.now = created + 3601
    assert "expired" in refusal(by, bearer(old)).message
    assert enter(by, bearer(new)).name == "alice"


def test_a_rotation_without_overlap_ends_the_old_key_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    old = add_key(path, KeyHolder("alice"))
    new = rotate_key(path, "alice", overlap=0)
    by = ByKey(file=KeyFile(path))
    assert refusal(by, bearer(old)).status == 401
    assert enter(by, bearer(new)).name == "alice"


def test_a_rotation_does_not_lengthen_the_life_of_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, KeyHolder("alice"), expires=2_000_000_000.0)
    for overlap in (10.0, 1e10):
        rotate_key(path, "alice", overlap)
    ends = [secret.expires for secret in read_keys(path).holders["alice"].secrets]
    assert ends[0] is not None and ends[0] < 2_000_000_000.0 and ends[2] is None


def test_revoking_a_name_or_one_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    old = add_key(path, KeyHolder("alice"))
    new = rotate_key(path, "alice", overlap=3600)
    bob = add_key(path, KeyHolder("bob"))
    assert revoke_key(path, old.split("-")[1]) == 1
    table = read_keys(path)
    assert table.find(old.encode()) is None and table.find(new.encode()) is not None
    assert revoke_key(path, "alice") == 1
    table = read_keys(path)
    assert table.find(new.encode()) is None and table.find(bob.encode()) is not None
    with pytest.raises(RequestError, match="nobody is called alice"):
        revoke_key(path, "alice")
    with pytest.raises(RequestError, match="nobody is called alice"):
        rotate_key(path, "alice", 0)


def test_a_name_cannot_be_added_twice(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, KeyHolder("alice"))
    with pytest.raises(RequestError, match="alice has a key already"):
        add_key(path, KeyHolder("alice"))


def test_a_server_notices_changes_of_its_file(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    alice = add_key(path, KeyHolder("alice"))
    by = ByKey(file=KeyFile(path, clock=clock))
    bob = add_key(path, KeyHolder("bob"))
    assert refusal(by, bearer(bob)).status == 401  # asked less than a second ago
    clock.now += 1
    assert enter(by, bearer(bob)).name == "bob"
    revoke_key(path, "alice")
    clock.now += 1
    assert refusal(by, bearer(alice)).status == 401


@pytest.mark.parametrize("damage", ["", "{", '{"version": 1, "holders": [{"name": 5}]}', None])
def test_a_damaged_file_changes_nothing_while_a_server_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str | None
) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    key = add_key(path, KeyHolder("alice"))
    by = ByKey(file=KeyFile(path, clock=clock))
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage)
    for _ in range(3):
        clock.now += 2
        assert enter(by, bearer(key)).name == "alice"
    assert caplog.text.count("the keys read before stay valid") == 1
    assert key not in caplog.text
    path.unlink(missing_ok=True)
    other = add_key(path, KeyHolder("carol"))
    clock.now += 2
    assert enter(by, bearer(other)).name == "carol"
    assert refusal(by, bearer(key)).status == 401


def test_a_file_that_others_may_change_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, KeyHolder("alice"))
    for mode in (0o622, 0o660, 0o666):
        path.chmod(mode)
        with pytest.raises(RequestError, match="chmod 600"):
            read_keys(path)
    path.chmod(0o644)  # a mounted secret
    assert len(read_keys(path)) == 1


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "keys.json"
    add_key(real, KeyHolder("alice"))
    link.symlink_to(real)
    add_key(link, KeyHolder("bob"))
    assert link.is_symlink() and set(read_keys(real).holders) == {"alice", "bob"}


def test_many_processes_add_keys_at_one_time(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    threads = [
        threading.Thread(target=add_key, args=(path, KeyHolder(f"user{i}"))) for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_keys(path)) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.json", "keys.json.lock"]


def test_a_failed_edit_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    add_key(path, KeyHolder("alice"))
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        add_key(path, KeyHolder("bob"))
    assert path.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.json", "keys.json.lock"]


def holder(**changes: Any) -> dict[str, Any]:
    key = {"id": "abc", "sha256": "0" * 64, "created": 5, "expires": None}
    return {"name": "a", "roles": ["user"], "keys": [key], **changes}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "expected a file of"),
        ({"version": 2, "holders": []}, "version 1"),
        ({"version": 1, "holders": {}}, "holders: expected a list"),
        ({"version": 1, "holders": [7]}, r"holders\[0\]: expected an object, found 7"),
        (holder(name=""), "name: expected up to 64"),
        (holder(name=None), "name: expected up to 64"),
        (holder(name="a\nb"), "name: expected up to 64"),
        (holder(name="x" * 65), "name: expected up to 64"),
        (holder(tenant=5), "tenant: expected up to 64"),
        (holder(roles=[]), "role of a: expected one or more of admin, metrics, user"),
        (holder(roles=["root"]), r"role of a: .* found .*root"),
        (holder(roles="user"), "roles: expected a list of strings"),
        (holder(weight=0), "weight of a: expected a number above 0"),
        (holder(weight="1"), "weight of a"),
        (holder(limits={"rpm": 1}), "limits: 'rpm' is unknown"),
        (holder(limits={"concurrent": 0}), "concurrent: expected a whole number"),
        (holder(limits=[1]), "expected an object"),
        (holder(secret="x"), "'secret' is unknown"),
        (holder(keys={}), "keys: expected a list"),
        (holder(keys=[{"id": "a", "sha256": "0" * 63, "created": 1}]), "sha256: expected 64"),
        (holder(keys=[{"id": "a", "sha256": "G" * 64, "created": 1}]), "sha256: expected 64"),
        (holder(keys=[{"id": "", "sha256": "0" * 64, "created": 1}]), "id: expected"),
        (holder(keys=[{"id": "a", "sha256": "0" * 64}]), "created: expected seconds"),
        (
            holder(keys=[{"id": "a", "sha256": "0" * 64, "created": 1, "expires": "x"}]),
            "expires: expected seconds",
        ),
        ({"version": 1, "holders": [holder(), holder()]}, "the name a occurs twice"),
        ({"version": 1, "holders": [holder(), holder(name="b")]}, "a and b have the same key"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, value: Any, message: str) -> None:
    path = tmp_path / "keys.json"
    if isinstance(value, dict) and "version" not in value:
        value = {"version": 1, "holders": [value]}
    path.write_text(json.dumps(value))
    path.chmod(0o600)
    with pytest.raises(RequestError, match=message) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "not json", "[" * 100_000, "\x00\xff"])
def test_what_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(RequestError, match=r"keys\.json: expected JSON"):
        read_keys(path)


@pytest.mark.parametrize("key", ["", "x" * 513, "schlüssel", "a b", "a\nb"])
def test_a_plain_key_must_fit_into_a_header(key: str) -> None:
    with pytest.raises(RequestError, match="API key"):
        ByKey([key])


def test_no_key_at_all_is_an_error() -> None:
    with pytest.raises(RequestError, match="expected an API key or a file"):
        ByKey()


def test_keys_are_in_no_log_and_no_repr(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    path, clock = tmp_path / "keys.json", Clock()
    key = add_key(path, KeyHolder("alice"))
    file = KeyFile(path, clock=clock)
    by = ByKey([key + "0"], file)
    os.utime(path, (1, 1))
    clock.now = 5
    caller = enter(by, bearer(key))
    secret = key.rpartition("-")[2]
    for text in (caplog.text, repr(caller), repr(file.table.holders), repr(by)):
        assert secret not in text
    assert "1 keys" in caplog.text


@pytest.fixture(scope="module")
def many() -> tuple[KeyTable, list[str]]:
    keys = [new_key() for _ in range(10_000)]
    return (
        KeyTable(
            KeyHolder(f"user{i}", secrets=(Secret.of(key, created=0),))
            for i, key in enumerate(keys)
        ),
        keys,
    )


def test_ten_thousand_keys_are_found_without_a_search(many: tuple[KeyTable, list[str]]) -> None:
    table, keys = many
    for index in range(0, 10_000, 97):
        found = table.find(keys[index].encode())
        assert found is not None and found[0].name == f"user{index}"
    # Not timed: one lookup hashes the given key once, however many keys there are.
    compared: list[bytes] = []

    class Counting(dict[bytes, Any]):
        def get(self, digest: bytes, default: Any = None) -> Any:
            compared.append(digest)
            return super().get(digest, default)

        def __iter__(self) -> Any:
            raise AssertionError("all keys were gone through")

        items = values = keys = __iter__  # type: ignore[assignment]

    table._found = Counting(table._found)
    assert table.find(b"nobody") is None
    assert len(compared) == 1


def test_a_file_of_ten_thousand_keys_is_read(
    tmp_path: Path, many: tuple[KeyTable, list[str]]
) -> None:
    table, keys = many
    path = tmp_path / "keys.json"
    value = {"version": 1, "holders": [one.to_json() for one in table.holders.values()]}
    path.write_text(json.dumps(value))
    path.chmod(0o600)
    by = ByKey(file=KeyFile(path))
    assert enter(by, bearer(keys[9_999])).name == "user9999"
