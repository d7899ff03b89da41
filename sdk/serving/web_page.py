"""The page at ``/``: static files with headers that keep it from running anything else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

#: Only files of the page run, and only the server is asked: what a model writes stays text even if
#: the page has a mistake. ``trusted-types 'none'`` turns innerHTML and its relatives off.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # data: the images of the user, which are nowhere else
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # the browser asks each time, and gets 304
}


def page_routes() -> list[Route]:
    """``GET /`` and ``GET /page/...``. They need no key: the files hold no secrets.

    The addresses in the page are relative, so that it also works where an app is mounted.
    """
    known = page_files()

    async def index(request: Request) -> Response:
        return known["index.html"].respond(request)

    async def file(request: Request) -> Response:
        found = known.get(request.path_params["path"])
        if found is None:
            return Response("Not found\n", 404, media_type="text/plain")
        return found.respond(request)

    return [
        Route("/", index, methods=["GET"], include_in_schema=False),
        Route("/page/{path:path}", file, methods=["GET"], include_in_schema=False),
    ]


def page_files() -> dict[str, PageFile]:
    """The files by name, also from inside a zip file: ``index.html``, ``js/app.js``, ..."""
    return dict(_read(files("sdk.serving") / "page", ""))


class PageFile:
    """A file of the page, read once: all are 120 KB together."""

    def __init__(self, name: str, content: bytes) -> None:
        self.content = content
        tag = hashlib.sha256(content).hexdigest()[:32]
        suffix = name[name.rindex(".") :]
        self._headers = {**_HEADERS, "Content-Type": _TYPES[suffix], "ETag": f'"{tag}"'}

    def respond(self, request: Request) -> Response:
        if self._headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=self._headers)
        return Response(self.content, headers=self._headers)


def _read(folder: Any, prefix: str) -> Iterator[tuple[str, PageFile]]:
    # ``folder`` is a Traversable, which Python 3.10 has in another module. Only names found in it
    # are served: a path with ".." matches none of them.
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _read(entry, f"{name}/")
        elif name.endswith(tuple(_TYPES)):
            yield name, PageFile(name, entry.read_bytes())
