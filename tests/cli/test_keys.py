"""``embedlm keys``, and what ``embedlm serve`` makes of its options for protection."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sdk.api.errors import RequestError
from sdk.cli import build_parser, main
from sdk.serving.access import Demand, Refused
from sdk.serving.guard.key_file import read_keys
from sdk.serving.guard_arguments import (
    Protection,
    add_guard_arguments,
    protection,
    warning,
    with_images,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def keys(*words: str, file: Path) -> int:
    return main(["keys", *words, "--file", str(file)])


def test_a_key_is_printed_once_and_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["add", "alice", "--role", "user", "--role", "admin", "--weight", "4"]
    assert keys(*words, "--concurrent", "2", "--tenant", "team", "--expires", "12h", file=file) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"sk-[0-9a-f]{12}-[0-9a-f]{48}\n", out)
    assert err == f"embedlm: {file}: added alice; the key is shown only now\n"
    found = read_keys(file).find(out.strip().encode())
    assert found is not None
    holder, secret = found
    assert holder.roles == {"user", "admin"} and holder.limits.concurrent == 2
    assert (holder.tenant, holder.weight) == ("team", 4.0)
    assert secret.expires is not None
    assert 43_200 <= secret.expires - secret.created < 43_202


def test_list_shows_ids_and_no_keys(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys("add", "alice", "--tokens-per-day", "9", file=file)
    keys("rotate", "alice", file=file)
    both = capsys.readouterr().out.split()
    assert keys("list", file=file) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 4
    for key in both:
        assert key.split("-")[1] in out and key.split("-")[2] not in out
    assert "tokens_per_day=9" in out and out.count("never") == 1


def test_rotate_and_revoke(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys("add", "alice", file=file)
    keys("rotate", "alice", "--overlap", "0s", file=file)
    old, new = capsys.readouterr().out.split()
    table = read_keys(file)
    assert table.find(old.encode()) is None and table.find(new.encode()) is not None
    assert keys("revoke", new.split("-")[1], file=file) == 0
    assert len(read_keys(file)) == 0
    capsys.readouterr()
    assert keys("list", file=file) == 0
    assert capsys.readouterr().err == f"embedlm: {file}: no keys\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "a b"], "name: expected up to 64 letters"),
        (["add", "x", "--concurrent", "0"], "concurrent: expected a whole number"),
        (["add", "x", "--weight", "0"], "weight of x: expected a number above 0"),
        (["rotate", "nobody"], "nobody is called nobody; `embedlm keys list`"),
        (["revoke", "nobody"], "nobody is called nobody, and no key has this id"),
    ],
)
def test_mistakes_are_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    keys("add", "alice", file=file)
    capsys.readouterr()
    assert keys(*words, file=file) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def test_a_missing_file_or_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys("list", file=tmp_path / "none.json") == 2
    assert "none.json" in capsys.readouterr().err
    assert keys("add", "alice", file=tmp_path / "none" / "keys.json") == 2
    assert "none/keys.json', which cannot be read and written" in capsys.readouterr().err


def test_a_reader_that_has_closed_our_output_is_not_an_error_of_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keys("add", "alice", file=file) == 0

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    args = build_parser("keys").parse_args(["keys", "list", "--file", str(file)])
    with pytest.raises(BrokenPipeError):  # of which `main` says nothing
        args.run(args)


@pytest.mark.parametrize("text", ["5", "-5m", "1w", "", "1.5h", "9999999999s"])
def test_a_wrong_time_is_refused(file: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        keys("add", "alice", f"--expires={text}", file=file)
    assert "expected a time such as 90s" in capsys.readouterr().err


def arguments(*words: str, host: str = "127.0.0.1") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_guard_arguments(parser)
    args = parser.parse_args(words)
    args.host = host
    return args


def enter(guard: Protection, key: str | None) -> Any:
    headers = [] if key is None else [(b"x-api-key", key.encode())]
    return asyncio.run(guard.access.enter(headers, None))


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMBEDLM_API_KEY", raising=False)


def test_the_options_of_serve_make_a_guard(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys("add", "alice", file=file)
    key = capsys.readouterr().out.strip()
    monkeypatch.setenv("EMBEDLM_API_KEY", "from-environment")
    args = arguments(
        *("--keys", str(file), "--api-key", "from-option", "--requests-per-minute", "1"),
        *("--usage-file", str(tmp_path / "usage"), "--audit-log", str(tmp_path / "audit")),
        *("--limit", "body_bytes=1MiB", "--limit", "n=3", "--limit", "request_seconds=2.5"),
        *("--limit", "body_seconds=5"),
    )
    with protection(args) as guard:
        names = [enter(guard, k).name for k in (key, "from-environment", "from-option")]
        assert names[0] == "alice" and names[1] == names[2] != "alice"
        with pytest.raises(Refused):
            enter(guard, None)
        caller = enter(guard, key)
        asyncio.run(guard.access.admit(caller, Demand(1, 1, 1, "m")))
        with pytest.raises(Refused, match="requests per minute"):
            asyncio.run(guard.access.admit(caller, Demand(1, 1, 1, "m")))
        assert (guard.http.body_bytes, guard.body.n) == (2**20, 3)
        assert (guard.http.request_seconds, guard.http.body_seconds) == (2.5, 5.0)
        with pytest.raises(RequestError, match="in use by another process"), protection(args):
            pass
    records = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [record["status"] for record in records] == [401, 429]
    with protection(args):  # everything was given back
        pass


def test_bodies_have_room_for_images_unless_a_limit_was_given() -> None:
    for words, expected in (
        ((), 32 * 2**20),
        (("--limit", "n=2"), 32 * 2**20),
        (("--limit", "body_bytes=1MiB"), 2**20),
        (("--limit", "body_bytes=4MiB"), 2**22),
        (("--limit", "buffered_bytes=20MiB"), 20 * 2**20),
        (("--limit", "buffered_bytes=1MiB"), 4 * 2**20),
    ):
        args = arguments(*words)
        with protection(args) as guard:
            assert guard.http.body_bytes == (2**20 if "body_bytes=1MiB" in words else 2**22)
            assert with_images(guard, args).http.body_bytes == expected


def test_without_keys_everybody_may_come_and_a_warning_says_so() -> None:
    with protection(arguments()) as guard:
        assert enter(guard, None).roles == {"user", "metrics", "admin"}
    assert warning(arguments()) is None
    assert warning(arguments("--api-key", "x", host="0.0.0.0")) is None
    text = warning(arguments(host="0.0.0.0"))
    assert text is not None and "0.0.0.0" in text and "--keys" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "nonsense=5"], "--limit nonsense=5: expected NAME=VALUE with one of answers"),
        (["--limit", "n"], "--limit n: expected a whole number, found ''"),
        (["--limit", "n=0"], "n: expected a whole number of at least 1"),
        (["--limit", "requests=1.5"], "expected a whole number, found '1.5'"),
        (["--limit", "body_seconds=x"], "expected a number of seconds, found 'x'"),
        (["--limit", "body_seconds=nan"], "body_seconds: expected a number above 0"),
        (["--limit", "body_bytes=many"], "--limit body_bytes: expected a size"),
        (["--api-key", "a b"], "must not contain spaces"),
        (["--allowed-origin", "example.com"], "allowed origin: expected one such as"),
        (["--allowed-host", "http://x"], "allowed host: expected a name"),
        (["--audit-log", "x", "--audit-max-bytes", "5"], "at least 4.0 KiB per file"),
        (["--tokens-per-day", "-1"], "tokens_per_day: expected a whole number"),
    ],
)
def test_wrong_options_of_serve(words: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)), protection(arguments(*words)):
        pass


def test_a_missing_file_of_keys_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(RequestError, match="--keys: expected a file of hashed keys"),
        protection(
            arguments("--keys", str(tmp_path / "none.json"), "--audit-log", str(tmp_path / "a"))
        ),
    ):
        pass
