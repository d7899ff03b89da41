"""A small server on 127.0.0.1 that speaks what the Hugging Face hub speaks of models."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Repository:
    files: dict[str, bytes]
    commit: str = COMMIT
    gated: bool = False


@dataclass
class Hub:
    """What the server has, what it was asked, and how it is to fail."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    #: (method, path, Range header)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    #: Bytes after which the next this many answers with a file's content break off.
    cut_after: list[int] = field(default_factory=list)
    ignore_range: bool = False
    url: str = ""

    def add(self, repo: str, **files: bytes) -> Repository:
        made = self.repositories[repo] = Repository({})
        made.files.update(files)
        return made

    def got(self, method: str = "GET") -> list[str]:
        """Names of the files that were asked for."""
        found = [path for how, path, _ in self.asked if how == method and "/resolve/" in path]
        return [path.split("/", 5)[5] for path in found]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._info("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main", body)
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
        else:
            self._fail(404, "RepoNotFound", body)

    def _repository(self, repo: str, revision: str, body: bool) -> Repository | None:
        found = self.hub.repositories.get(repo)
        if found is None:
            self._fail(404, "RepoNotFound", body)
        elif revision not in ("main", found.commit):
            self._fail(404, "RevisionNotFound", body)
        else:
            return found
        return None

    def _info(self, repo: str, revision: str, body: bool) -> None:
        found = self._repository(repo, revision, body)
        if found is not None:
            siblings = [
                {"rfilename": name, "size": len(data)} for name, data in found.files.items()
            ]
            answer = {"id": repo, "sha": found.commit, "siblings": siblings}
            self._send(200, json.dumps(answer).encode(), {}, body)

    def _file(self, repo: str, revision: str, name: str, body: bool) -> None:
        found = self._repository(repo, revision, body)
        if found is None:
            return
        if found.gated:
            self._fail(403, "GatedRepo", body)
            return
        data = found.files.get(name)
        if data is None:
            self._fail(404, "EntryNotFound", body)
            return
        etag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": found.commit, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked is None or self.hub.ignore_range:
            self._send(200, data, headers, body)
            return
        begin = int(asked.removeprefix("bytes=").partition("-")[0])
        headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        self._send(206, data[begin:], headers, body)

    def _fail(self, status: int, code: str, body: bool) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        if "ETag" in headers and self.hub.cut_after:
            self.wfile.write(data[: self.hub.cut_after.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(data)


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
