"""The static files: what is served, with which headers, and what is not."""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sdk.serving.web_page import page_files
from sdk.testing import FakeLLM
from tests.serving.page.conftest import Served

FOLDER = Path(__file__).parents[3] / "sdk" / "serving" / "page"
Get = Callable[..., http.client.HTTPResponse]


@pytest.fixture(scope="module")
def get() -> Iterator[Get]:
    served = Served({"tiny": FakeLLM()})
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)

    def run(
        path: str, headers: dict[str, str] | None = None, method: str = "GET"
    ) -> http.client.HTTPResponse:
        connection.request(method, path, headers=headers or {})
        response = connection.getresponse()
        response.content = response.read()  # type: ignore[attr-defined]
        return response

    yield run
    connection.close()
    served.stop()


def test_the_page_needs_nothing_that_is_not_served(get: Get) -> None:
    page = get("/")
    assert page.status == 200 and page.getheader("content-type") == "text/html; charset=utf-8"
    names = re.findall(r'(?:src|href)="(page/[^"]+)"', page.content.decode())  # type: ignore[attr-defined]
    assert {"page/js/app.js", "page/style/base.css", "page/icon.svg"} <= set(names)
    imported = {f"page/js/{name}" for name in modules()}
    for name in {*names, *imported}:
        found = get("/" + name)
        assert found.status == 200, name
        kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
        assert found.getheader("content-type", "").startswith(kind[name.rpartition(".")[2]])
    on_disk = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert set(page_files()) == on_disk
    assert {f"page/{name}" for name in on_disk} - {"page/index.html"} == {*names, *imported}


def modules() -> set[str]:
    """The modules that app.js imports, and those that they import."""
    known: set[str] = set()
    new = {"app.js"}
    while new:
        known |= new
        texts = [(FOLDER / "js" / name).read_text() for name in new]
        found = {name for text in texts for name in re.findall(r'from "\./([\w.]+)"', text)}
        new = found - known
    return known


def test_files_have_headers_that_keep_others_out(get: Get) -> None:
    for path in ("/", "/page/js/app.js", "/page/style/base.css"):
        response = get(path)
        policy = response.getheader("content-security-policy", "")
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == "'none'" and rules["script-src"] == "'self'"
        assert rules["style-src"] == rules["connect-src"] == "'self'"
        assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        assert response.getheader("x-content-type-options") == "nosniff"
        assert response.getheader("referrer-policy") == "no-referrer"
        assert response.getheader("access-control-allow-origin") is None


def test_a_browser_that_has_a_file_gets_it_only_when_it_changed(get: Get) -> None:
    tag = get("/page/js/app.js").getheader("etag", "")
    again = get("/page/js/app.js", {"If-None-Match": tag})
    assert (again.status, again.content) == (304, b"")  # type: ignore[attr-defined]
    assert get("/page/js/app.js", {"If-None-Match": '"other"'}).status == 200
    assert get("/page/js/app.js", method="HEAD").status == 200
    assert get("/page/js/app.js", method="POST").status == 405


@pytest.mark.parametrize(
    "path",
    [
        *("/page/../../llm.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page//etc/passwd"),
        *("/page/", "/page/js", "/page/js/", "/page/js/app.js/", "/page/js\\app.js"),
        *("/page/js/app.js%00", "/page/./js/app.js", "/page/JS/app.js"),
    ],
)
def test_only_the_files_of_the_page_are_served(get: Get, path: str) -> None:
    assert get(path).status == 404


def test_each_text_of_the_page_is_used(get: Get) -> None:
    words = (FOLDER / "js" / "words.js").read_text()
    rest = "".join(
        path.read_text() for path in (FOLDER / "js").glob("*.js") if path.stem != "words"
    )
    names = set(re.findall(r"^\s+([a-z]\w*):", words, re.MULTILINE))
    looked_up = {"auto", "light", "dark", "required", "none", "stop", "length", "abort", "error"}
    looked_up |= {"deadline", "waiting", "prefill", "decoding", "preempted", "finished"}
    looked_up |= {"swapped_in", "recoded", "omitted"}
    unused = {name for name in names - looked_up if not re.search(rf"\b{name}\b", rest)}
    assert unused == set()
