"""A client of a language server, as editors have one: what does it say at a place of a file?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any


class LanguageServer:
    """basedpyright's, which is Pyright's with more checks; Pylance is Pyright's too."""

    def __init__(self, root: Path, python: str = sys.executable) -> None:
        code = "from basedpyright.langserver import main; main()"
        self._process = subprocess.Popen(
            [python, "-c", code, "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._python, self._number = python, 0
        hover = {"hover": {"contentFormat": ["markdown"]}}
        folder = {"uri": root.as_uri(), "name": root.name}
        capabilities = {"textDocument": hover, "workspace": {"configuration": True}}
        self.ask(
            "initialize",
            processId=None,
            rootUri=root.as_uri(),
            workspaceFolders=[folder],
            capabilities=capabilities,
        )
        self._send({"method": "initialized", "params": {}})

    def __enter__(self) -> LanguageServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def open(self, path: Path, text: str) -> None:
        document = {"uri": path.as_uri(), "languageId": "python", "version": 1, "text": text}
        self._send({"method": "textDocument/didOpen", "params": {"textDocument": document}})

    def completions(self, path: Path, line: int, column: int) -> list[str]:
        found = self.ask("textDocument/completion", **self._place(path, line, column))
        return [item["label"] for item in (found or {}).get("items", [])]

    def hover(self, path: Path, line: int, column: int) -> str:
        found = self.ask("textDocument/hover", **self._place(path, line, column))
        return str(found["contents"]["value"]) if found else ""

    def ask(self, method: str, **params: Any) -> Any:
        """The result of a request; what the server asks meanwhile is answered."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            message = self._receive()
            if "method" in message and "id" in message:
                asked = message["params"].get("items", []) if message.get("params") else []
                settings = {"pythonPath": self._python}
                self._send({"id": message["id"], "result": [settings for _ in asked] or None})
            elif message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(message["error"])
                return message.get("result")

    @staticmethod
    def _place(path: Path, line: int, column: int) -> dict[str, Any]:
        position = {"line": line, "character": column}
        return {"textDocument": {"uri": path.as_uri()}, "position": position}

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        data = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(data), data))
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        length = 0
        while line := self._process.stdout.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        if not length:
            raise EOFError("the language server has ended")
        found: dict[str, Any] = json.loads(self._process.stdout.read(length))
        return found
