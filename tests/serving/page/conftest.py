"""A real browser, and the server's app on a loopback socket."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, expect, sync_playwright

from sdk.serving import create_app

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
#: Nothing but the page itself goes over the network.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
_OPEN = pytest.StashKey[tuple[Playwright, Browser | None]]()
TIMEOUT_MS = 20_000  # of each step: far more than any takes


def chromium(own: str) -> str:
    """The browser of this machine; ``own``: where playwright would have put one."""
    named = os.environ.get("EMBEDLM_CHROMIUM")
    found = [named] if named else [*filter(None, map(shutil.which, NAMES)), own]
    path = next((path for path in found if Path(path).is_file()), None)
    assert path, (
        f"no Chromium at {', '.join(found)}: run `make browser`, or set EMBEDLM_CHROMIUM to the "
        "path of a Chromium or Chrome"
    )
    return path


@pytest.fixture(scope="module")
def browser(pytestconfig: pytest.Config) -> Browser:
    """Chromium without a window, for tests of this folder that follow each other: it takes two
    seconds of CPU time to start.

    Playwright runs an event loop in this thread and has child processes. Tests of other areas find
    both, so it does not stay for the whole run.
    """
    if _OPEN not in pytestconfig.stash:
        expect.set_options(timeout=TIMEOUT_MS)
        tools = sync_playwright().start()
        pytestconfig.stash[_OPEN] = tools, None
        path = chromium(tools.chromium.executable_path)
        pytestconfig.stash[_OPEN] = (
            tools,
            tools.chromium.launch(executable_path=path, args=[*FLAGS]),
        )
    found = pytestconfig.stash[_OPEN][1]
    assert found is not None, "Chromium did not start"
    return found


@pytest.hookimpl(trylast=True)  # after the fixtures of the item
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path.parent == item.path.parent:
        return
    if _OPEN in item.config.stash:
        tools, found = item.config.stash[_OPEN]
        del item.config.stash[_OPEN]
        if found is not None:
            found.close()
        tools.stop()


class Served:
    """An app on a port of its own, which can go away and come back."""

    def __init__(self, models: Any, **options: Any) -> None:
        self.app = create_app(models, **{"page": True, **options})
        self._bind(0)
        self.port = self._socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/"
        self.start()

    def _bind(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))

    def start(self) -> None:
        if self._socket.fileno() < 0:
            self._bind(self.port)
        config = uvicorn.Config(self.app, log_config=None, access_log=False, lifespan="off")
        config.timeout_graceful_shutdown = 0
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    def _run(self) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await self._server.serve([self._socket])

        asyncio.run(serve())

    def call(self, function: Callable[[], object]) -> None:
        """Call it on the app's event loop."""
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._socket.close()


class Pace:
    """The ``sleep`` of a FakeLLM whose steps wait until the test allows them."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._free = False

    def __call__(self, seconds: float) -> None:
        if not self._free:
            self._steps.acquire(timeout=2 * TIMEOUT_MS / 1000)

    def allow(self, steps: int) -> None:
        self._steps.release(steps)

    def go(self) -> None:
        """Allow all."""
        self._free = True
        self.allow(1)


def wait_until(true: Callable[[], object]) -> None:
    """Return when it is true; a test that waits for what never comes fails after 20 s."""
    end = time.monotonic() + TIMEOUT_MS / 1000
    while not true():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """``serve(models, **options)``: the app of these models, with its page."""
    running: list[Served] = []

    def start(models: Any, **options: Any) -> Served:
        running.append(Served(models, **options))
        return running[-1]

    yield start
    for one in running:
        one.stop()


class Visitor:
    """Somebody who uses the page: a browser profile of its own, with what went wrong in it."""

    def __init__(self, context: BrowserContext) -> None:
        self.context = context
        self.errors: list[str] = []
        self.addresses: set[str] = set()
        self.page = self.tab()

    def tab(self) -> Page:
        page = self.context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._said)
        page.on("dialog", lambda box: (self.errors.append(f"dialog: {box.message}"), box.dismiss()))
        page.on("request", lambda request: self.addresses.add(request.url))
        return page

    def _said(self, message: Any) -> None:
        # The browser reports responses like 401 as errors, which tests provoke.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def ask(self, text: str) -> None:
        model = self.page.get_by_label("Model", exact=True)
        expect(model).not_to_have_value("")  # the list of models is there
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def ended(self) -> None:
        """Wait until no answer runs."""
        self.page.get_by_role("button", name="Send", exact=True).wait_for()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visitor]]:
    """``visit(address, **options)``: somebody opens the page. At the end of the test the page must
    have made no error, and asked no other server."""
    visitors: list[tuple[Visitor, str]] = []

    def start(address: str, view: str = "", **options: Any) -> Visitor:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        visitor = Visitor(context)
        visitors.append((visitor, address))
        visitor.page.goto(address + view)
        visitor.page.get_by_role("heading", name="embedlm").wait_for(state="attached")
        return visitor

    yield start
    for visitor, address in visitors:
        visitor.context.close()
        assert visitor.errors == []
        assert [url for url in visitor.addresses if not url.startswith((address, "blob:"))] == []
