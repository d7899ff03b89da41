"""Images in the page: chosen, pasted, dropped, shown, sent, kept; none for a model of text."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Page, expect

from sdk.testing import FakeLLM
from tests.serving.page.conftest import Served, Visitor, wait_until

Serve = Callable[..., Served]
Visit = Callable[..., Visitor]
ADD = "Add images"


def png(width: int = 40, height: int = 30, color: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def seeing(serve: Serve, visit: Visit) -> tuple[FakeLLM, Visitor]:
    llm = FakeLLM("It is red.", images=True)
    visitor = visit(serve({"tiny": llm, "reader": FakeLLM("Words.")}).address)
    expect(visitor.page.get_by_role("button", name=ADD)).to_be_visible()
    return llm, visitor


def choose(page: Page, *files: tuple[str, bytes]) -> None:
    given: Any = [
        {"name": name, "mimeType": f"image/{Path(name).suffix[1:]}", "buffer": data}
        for name, data in files
    ]
    page.locator("input[type=file]").set_input_files(given)


def transfer(page: Page, data: bytes, kind: str, event: str, target: str) -> None:
    """A file from outside of the page, as the browser hands it over."""
    page.evaluate(
        """([text, kind, event, target]) => {
          const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
          const found = new DataTransfer();
          found.items.add(new File([bytes], "photo.png", { type: kind }));
          const key = event === "paste" ? "clipboardData" : "dataTransfer";
          const type = event === "paste" ? ClipboardEvent : DragEvent;
          const made = new type(event, { [key]: found, bubbles: true, cancelable: true });
          window.taken = !document.querySelector(target).dispatchEvent(made);
        }""",
        [base64.b64encode(data).decode(), kind, event, target],
    )


def sent(llm: FakeLLM, request: int = -1) -> list[Any]:
    messages: Any = llm.requests[request].prompt
    content: Any = messages[-1]["content"]
    return content if isinstance(content, list) else [content]


def test_chosen_images_are_shown_removed_sent_and_kept(seeing: tuple[FakeLLM, Visitor]) -> None:
    llm, visitor = seeing
    page = visitor.page
    choose(page, ("a.png", png()), ("b.png", png(color="blue")))
    chosen = page.get_by_role("list", name="Images of the next message")
    expect(chosen.get_by_role("img")).to_have_count(2)
    page.get_by_role("button", name="Remove the image b.png").click()
    expect(chosen.get_by_role("img")).to_have_count(1)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    visitor.ask("What is it?")
    visitor.ended()
    expect(chosen).to_be_hidden()
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    assert sent(llm) == [image, {"type": "text", "text": "What is it?"}]
    mine = page.get_by_role("article", name="You")
    expect(mine.get_by_role("img", name="a.png")).to_be_visible()
    assert mine.get_by_role("img").evaluate("one => one.naturalWidth") == 40
    page.reload()
    expect(mine.get_by_role("img", name="a.png")).to_be_visible()
    visitor.ask("Sure?")
    wait_until(lambda: len(llm.requests) == 2)
    visitor.ended()
    first: Any = llm.requests[1].prompt
    assert first[0]["content"][0] == image
    # an edited message keeps its image
    mine.first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("Which color?")
    page.get_by_role("button", name="Save and ask").click()
    wait_until(lambda: len(llm.requests) == 3)
    assert sent(llm) == [image, {"type": "text", "text": "Which color?"}]


def test_an_image_alone_is_a_message_and_large_ones_become_smaller(
    seeing: tuple[FakeLLM, Visitor],
) -> None:
    llm, visitor = seeing
    page = visitor.page
    noise = np.random.default_rng(0).integers(0, 256, (300, 3000, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    choose(page, ("large.png", file.getvalue()))
    expect(page.get_by_role("img", name="large.png")).to_be_visible()
    page.get_by_role("button", name="Send", exact=True).click()
    wait_until(lambda: llm.requests)
    visitor.ended()
    [part] = sent(llm)
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (2048, 205)
    expect(page.get_by_role("button", name="Delete “large.png”")).to_be_visible()


@pytest.mark.parametrize("event", ["paste", "drop"])
def test_pasted_and_dropped_images(seeing: tuple[FakeLLM, Visitor], event: str) -> None:
    llm, visitor = seeing
    page = visitor.page
    target = "#message" if event == "paste" else ".messages"
    transfer(page, png(), "image/png", event, target)
    assert page.evaluate("window.taken")
    expect(page.get_by_role("img", name="photo.png")).to_be_visible()
    visitor.ask("What?")
    wait_until(lambda: llm.requests)
    assert [one["type"] for one in sent(llm)] == ["image_url", "text"]
    # the page is not left for another file, and a pasted text is a text
    transfer(page, b"words", "text/plain", event, target)
    assert page.evaluate("window.taken") is (event == "drop")


def test_what_is_no_image_is_said(seeing: tuple[FakeLLM, Visitor]) -> None:
    _, visitor = seeing
    page = visitor.page
    choose(page, ("broken.png", b"nothing"), ("a.png", png()))
    expect(
        page.get_by_text("broken.png is not an image that this browser can read.")
    ).to_be_visible()
    expect(page.locator(".composer").get_by_role("img")).to_have_count(1)


def test_a_model_of_text_takes_no_images(seeing: tuple[FakeLLM, Visitor]) -> None:
    _, visitor = seeing
    page = visitor.page
    page.get_by_label("Model", exact=True).select_option("reader")
    expect(page.get_by_role("button", name=ADD)).to_be_hidden()
    transfer(page, png(), "image/png", "drop", ".messages")
    expect(page.get_by_text("This model reads text only.")).to_be_visible()
    expect(page.locator(".composer").get_by_role("img")).to_have_count(0)
