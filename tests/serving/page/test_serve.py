"""``embedlm serve`` and the page."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk.testing import tiny_model

Start = Callable[..., tuple[Any, int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """``start(*options)``: a server of a tiny model, which listens, and its port."""
    started: list[subprocess.Popen[str]] = []

    def run(*options: str) -> tuple[Any, int]:
        model = tiny_model(tmp_path / "model")
        command = [sys.executable, "-m", "sdk", "serve", f"tiny={model}", "--port", "0", *options]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(server)
        assert server.stderr is not None
        last = "listening" if "--no-page" in options else "page"
        for line in server.stderr:
            found = re.search(rf"{last} at http://127.0.0.1:(\d+)/", line)
            if found:
                return server, int(found[1])
        raise AssertionError(f"it ended with {server.wait()}")

    yield run
    for server in started:
        server.kill()
        server.communicate()


def get(port: int, path: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    return connection.getresponse()


@pytest.mark.slow
def test_somebody_who_looks_at_the_live_view_does_not_delay_the_end(start: Start) -> None:
    server, port = start("--drain-seconds", "250")
    assert b"<!doctype html>" in get(port, "/").read()
    viewer = get(port, "/live")
    assert viewer.readline().startswith(b"data: {")
    os.kill(server.pid, signal.SIGTERM)
    _, said = server.communicate(timeout=120)  # without waiting for the viewer
    assert server.returncode == 0
    assert "may end within" not in said
    viewer.read()  # has ended


@pytest.mark.slow
def test_a_server_without_the_page(start: Start) -> None:
    _, port = start("--no-page")
    assert [get(port, path).status for path in ("/", "/live", "/page/js/app.js")] == [404] * 3
    assert get(port, "/health").status == 200
