"""The page for everybody: by keyboard, with a screen reader, small, enlarged, light and dark."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from sdk.testing import FakeLLM
from tests.serving.page.conftest import Served, Visitor

Serve = Callable[..., Served]
Visit = Callable[..., Visitor]

ANSWER = (
    "# Title\n\nText with `code` and a [link](https://a.example).\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('a very long line of code' * 100)\n```\n\n"
    "- [x] done\n- [ ] open\n\n> quoted\n\n" + "A paragraph.\n\n" * 30
)


def axe() -> str:
    """The source of axe-core, from the package that carries it."""
    found = importlib.util.find_spec("axe_playwright_python")
    assert found is not None and found.origin, "axe-playwright-python is missing: run `make lint`"
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong, in WCAG 2.2 AA and its best practices."""
    if not page.evaluate("() => Boolean(window.axe)"):
        page.evaluate(axe())
    rules = "{'target-size': {enabled: true}}"  # of WCAG 2.2; off by default
    run = f"axe.run(document, {{resultTypes: ['violations'], rules: {rules}}})"
    found = page.evaluate(f"{run}.then((results) => results.violations)")
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found
        for node in one["nodes"]
    ]


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        pytest.param("light", 1280, marks=pytest.mark.slow),
        pytest.param("dark", 1280, marks=pytest.mark.slow),
        ("dark", 320),
    ],
)
def test_axe_finds_nothing(serve: Serve, visit: Visit, scheme: str, width: int) -> None:
    served = serve({"tiny": FakeLLM(ANSWER)})
    size = {"width": width, "height": 700}
    visitor = visit(served.address, color_scheme=scheme, viewport=size, bypass_csp=True)
    page = visitor.page
    assert violations(page) == []
    visitor.ask("Hello")
    visitor.ended()
    assert violations(page) == []
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Top p", exact=True).fill("7")
    assert violations(page) == []
    if width < 1000:
        page.keyboard.press("Escape")
    page.get_by_role("button", name="Key").click()
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Live").click()
    page.get_by_role("heading", name="KV pages").wait_for()
    assert violations(page) == []
    page.evaluate("document.documentElement.removeAttribute('lang')")
    assert violations(page)[0].startswith("html-has-lang")  # it looks, and finds


def test_everything_works_by_keyboard(serve: Serve, visit: Visit) -> None:
    long = " ".join(f"word{i}" for i in range(3500))
    llm = FakeLLM([long, "short", "third"], seconds_per_token=0.02)
    visitor = visit(serve({"tiny": llm}).address)
    page = visitor.page
    keys = page.keyboard
    page.get_by_label("Model", exact=True).wait_for()
    focus(page, "Skip to the message box", "Shift+Tab")
    keys.press("Enter")
    box = page.get_by_label("Message", exact=True)
    expect(box).to_be_focused()
    keys.type("One")
    keys.press("Shift+Enter")
    keys.type("Two")
    keys.press("Enter")
    answer = page.get_by_role("article", name="Answer of tiny")
    expect(answer).to_contain_text("word3")
    keys.press("Escape")
    expect(answer.locator(".note")).to_have_text("Stopped.")
    expect(box).to_be_focused()
    assert llm.requests[0].prompt[-1]["content"] == "One\nTwo"
    focus(page, "Regenerate", "Shift+Tab")
    keys.press("Enter")
    expect(answer).to_contain_text("short")
    expect(box).to_be_focused()
    focus(page, "Edit", "Shift+Tab")
    keys.press("Enter")
    expect(page.get_by_label("Edit your message")).to_be_focused()
    keys.press("Escape")
    expect(page.get_by_role("button", name="Edit")).to_be_focused()
    focus(page, "Settings", "Shift+Tab")
    keys.press("Enter")
    expect(page.get_by_label("Temperature", exact=True)).to_be_focused()
    focus(page, "Delete “One Two”", "Shift+Tab")
    keys.press("Enter")
    expect(page.get_by_role("button", name="New conversation").first).to_be_focused()


def focus(page: Page, name: str, key: str) -> None:
    """Press a key until the control with this name has the focus."""
    for _ in range(40):
        page.keyboard.press(key)
        node = "document.activeElement"
        if page.evaluate(f"{node}.ariaLabel || {node}.innerText.trim()") == name:
            # who sees the page sees where the focus is
            assert page.evaluate(f"getComputedStyle({node}).outlineStyle") == "solid"
            return
    raise AssertionError(f"{name} cannot be reached with {key}")


@pytest.mark.slow
def test_a_screen_reader_hears_paragraphs_and_not_tokens(serve: Serve, visit: Visit) -> None:
    paragraphs = ["First **words** here.", "```python\nprint(1)\n```", "Last."]
    llm = FakeLLM("\n\n".join(paragraphs), seconds_per_token=0.02)
    visitor = visit(serve({"tiny": llm}).address)
    page = visitor.page
    page.evaluate(
        """() => {
          window.heard = [];
          const live = document.querySelector('[role=log]');
          const watch = (changes) => {
            for (const { addedNodes } of changes) {
              for (const node of addedNodes) window.heard.push(node.textContent);
            }
          };
          new MutationObserver(watch).observe(live, {childList: true, subtree: true});
        }"""
    )
    visitor.ask("Hello")
    visitor.ended()
    heard = page.evaluate("window.heard")
    assert heard[0] == "Answering."
    assert heard[-1].startswith("Answer complete: ")
    assert " ".join(heard[1:-1]) == "First words here. Code, python. Last."
    assert len(heard) <= 5
    # nothing else that changes with each token is a live region
    assert page.locator(".messages [aria-live], .messages [role=log]").count() == 0


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("view", ["#chat", "#live"])
@pytest.mark.parametrize(
    ("width", "height"), [(320, 568), pytest.param(640, 400, marks=pytest.mark.slow)]
)
def test_narrow_and_enlarged_pages_scroll_in_one_direction_only(
    serve: Serve, visit: Visit, width: int, height: int, view: str
) -> None:
    # 640 by 400 is a window of 1280 by 800 at 200 %
    served = serve({"a-very-long-name-of-a-model-without-any-space": FakeLLM(ANSWER)})
    visitor = visit(served.address, viewport={"width": width, "height": height})
    page = visitor.page
    visitor.ask("word" * 50)
    visitor.ended()
    page.goto(served.address + view)
    page.get_by_role("link", name="Chat").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("Conversations", "Settings") if view == "#chat" else ():
        page.get_by_role("button", name=name).click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelector('#main').inert")
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name=name)).to_be_focused()
        assert not page.evaluate("document.querySelector('#main').inert")


@pytest.mark.slow
def test_colors_follow_the_system_until_one_is_chosen(serve: Serve, visit: Visit) -> None:
    visitor = visit(serve({"tiny": FakeLLM()}).address, color_scheme="dark")
    page = visitor.page
    back = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(back)
    page.get_by_role("button", name="Colors: as the system").click()
    light = page.evaluate(back)
    assert light == "rgb(255, 255, 255)" != dark
    page.reload()
    page.get_by_role("button", name="Colors: light").click()
    assert page.evaluate(back) == dark


@pytest.mark.slow
def test_nothing_moves_for_those_who_asked_for_less_motion(serve: Serve, visit: Visit) -> None:
    visitor = visit(serve({"tiny": FakeLLM()}).address, reduced_motion="reduce")
    moving = """[...document.querySelectorAll('*')].filter((node) => {
      const style = getComputedStyle(node);
      return style.animationName !== 'none' || style.transitionDuration !== '0s';
    }).length"""
    assert visitor.page.evaluate(moving) == 0
