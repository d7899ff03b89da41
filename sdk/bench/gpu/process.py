"""The measuring process, seen from its parent: rows in, findings out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from queue import Empty, Queue
from threading import Thread
from typing import Any

from sdk.api.errors import RequestError, SdkError
from sdk.bench.engines import own_environment

#: Seconds that a killed process may take to end.
_ENDING_S = 3


class NoCard(RequestError):
    """There is no GPU that can run the kernels."""


class Worker:
    """The measuring process; ``worker.py`` has the protocol."""

    def __init__(
        self, measured: Mapping[str, float], log: Any, *, rehearsing: bool = False
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sdk.bench.gpu.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=own_environment(),
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the other
        )
        self._lines: Queue[str] = Queue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self._say(json.dumps({"measured": measured, "rehearsing": rehearsing}))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended; reading its answer reports that
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def hello(self, seconds: float) -> dict[str, Any]:
        """:raises NoCard: there is no GPU. :raises SdkError: the process ends or hangs."""
        found = self._answer(time.monotonic() + seconds)
        if "no_card" in found:
            raise NoCard(f"bench gpu: {found['no_card']}")
        return found

    def answers(self, name: str, seconds: float) -> Iterator[dict[str, Any]]:
        """One row's answers, including its end. :raises SdkError: the process ends or hangs."""
        end = time.monotonic() + seconds
        self._say(name)
        answer: dict[str, Any] = {}
        while "done" not in answer:
            answer = self._answer(end)
            yield answer

    def _answer(self, end: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
        except Empty:
            raise SdkError("took too long and was ended") from None
        if not line:
            raise SdkError(f"its process ended, exit code {self._exit_code()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _exit_code(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_ENDING_S)
        return None

    def kill(self) -> None:
        """Kill the process and those it started; a waiting thread gets an error."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process. One that waits for a lost card does not end even so, and is left."""
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        self._reader.join(_ENDING_S)
        if self._reader.is_alive():  # closing what it reads would wait for it
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
