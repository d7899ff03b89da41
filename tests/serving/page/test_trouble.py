"""What the page says when the server refuses, is busy, or is gone."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from sdk.serving import Caller, Demand, Open, Refused
from sdk.serving.access import Admission, Client, Headers
from sdk.testing import FakeAnswer, FakeLLM
from tests.serving.page.conftest import Served, Visitor

Serve = Callable[..., Served]
Visit = Callable[..., Visitor]


class OneKey(Open):
    """Lets in who has the key, and remembers the roles it gives."""

    async def enter(self, headers: Headers, client: Client) -> Caller:
        if (b"authorization", b"Bearer right") not in headers:
            raise Refused(401, "expected a key in the header Authorization", "invalid_api_key")
        return Caller("somebody", roles=frozenset({"user"}))


class Busy(Open):
    """Refuses the first ``count`` requests."""

    def __init__(self, count: int, seconds: str) -> None:
        super().__init__()
        self.count = count
        self.seconds = seconds

    async def admit(self, caller: Caller, demand: Demand) -> Admission:
        self.count -= 1
        if self.count >= 0:
            raise Refused(429, "too many tokens per minute", None, {"Retry-After": self.seconds})
        return await super().admit(caller, demand)


def test_a_wrong_key_is_asked_for_again_and_kept_for_the_tab_only(
    serve: Serve, visit: Visit
) -> None:
    visitor = visit(serve({"tiny": FakeLLM("hello")}, access=OneKey()).address)
    page = visitor.page
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    box = dialog.get_by_label("Key", exact=True)
    expect(box).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("Type a key.")
    box.fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("The server did not accept this key.")
    box.fill("right")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.get_by_label("Model", exact=True)).to_have_value("tiny")
    visitor.ask("Hi")
    expect(page.locator(".message").get_by_text("hello")).to_be_visible()
    assert page.evaluate("sessionStorage.getItem('embedlm.key')") == "right"
    assert "right" not in page.evaluate("JSON.stringify({...localStorage})")
    # its role does not allow the live view
    page.get_by_role("link", name="Live").click()
    expect(page.get_by_text("needs a key with the role “metrics”")).to_be_visible()
    page.get_by_role("button", name="Key").click()
    page.get_by_role("button", name="Forget the key").click()
    expect(dialog).to_be_visible()  # the list of models needs one
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


@pytest.mark.slow
def test_a_server_that_is_gone_is_noticed_and_so_is_its_return(serve: Serve, visit: Visit) -> None:
    long = " ".join(f"word{i}" for i in range(3500))
    llm = FakeLLM([long, "complete"], seconds_per_token=0.02)
    served = serve({"tiny": llm})
    visitor = visit(served.address)
    page = visitor.page
    visitor.ask("Count")
    answer = page.get_by_role("article", name="Answer of tiny")
    expect(answer).to_contain_text("word3")
    served.stop()
    expect(answer.locator(".error-text")).to_have_text(
        re.compile("The connection broke before the answer was complete.|the server is stopping")
    )
    expect(answer).to_contain_text("word3")
    banner = page.locator(".banner")
    expect(banner).to_contain_text("The server does not answer.")
    # asking now says so too, and loses nothing
    visitor.ask("Are you there?")
    expect(page.locator(".message .error-text:visible").last).to_have_text(
        "The server does not answer."
    )
    served.start()
    page.get_by_role("button", name="Try now").click()
    expect(banner).to_contain_text("The server answers again.")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".message").get_by_text("complete")).to_be_visible()
    assert llm.requests[1].prompt[-1]["content"] == "Are you there?"
    assert "Undo" not in page.locator(".notices").inner_text()  # nothing was replaced


@pytest.mark.slow
def test_a_busy_server_says_when_to_try_again(serve: Serve, visit: Visit) -> None:
    visitor = visit(serve({"tiny": FakeLLM("hello")}, access=Busy(1, "90")).address)
    page = visitor.page
    visitor.ask("Hi")
    said = page.locator(".message .error-text:visible").first
    expect(said).to_contain_text("too many tokens per minute")
    expect(said).to_contain_text("The server asks to wait 1 min")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".message").get_by_text("hello")).to_be_visible()


def test_errors_of_the_server_are_shown_in_its_words(serve: Serve, visit: Visit) -> None:
    broken = FakeAnswer("Some words", error=ValueError("the disk is full"))
    llm = FakeLLM([broken, "fine"], max_model_len=64)
    visitor = visit(serve({"tiny": llm}).address)
    page = visitor.page
    visitor.ask("Hi")
    said = page.locator(".message .error-text:visible").last
    expect(said).to_contain_text("the disk is full")
    expect(page.get_by_role("article", name="Answer of tiny")).to_contain_text("Some words")
    visitor.ask("word " * 100)
    expect(page.locator(".message .error-text:visible").last).to_contain_text("64")


@pytest.mark.slow
def test_without_storage_the_page_works_and_says_what_that_means(
    serve: Serve, visit: Visit
) -> None:
    visitor = visit(serve({"tiny": FakeLLM("hello")}).address)
    page = visitor.page
    page.add_init_script(
        "Storage.prototype.setItem = () => { throw new DOMException('', 'QuotaExceededError'); }"
    )
    page.reload()
    visitor.ask("Hi")
    expect(page.locator(".message").get_by_text("hello")).to_be_visible()
    expect(page.get_by_text("The browser allows no storage here")).to_be_visible()
