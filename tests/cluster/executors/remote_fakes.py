"""Workers on "other hosts" with the fake runner: processes that join over TCP."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import rank_runner

from sdk.api.remote_workers import Address, RemoteWorkers
from sdk.cluster.executors.process import ProcessExecutor
from sdk.cluster.executors.remote.engine_codec import PROTOCOL, engine_codec, whole
from sdk.cluster.executors.remote.ranks import RemoteRanks
from sdk.cluster.executors.remote.serve import WorkerOptions, WorkerParts, serve_engines
from sdk.cluster.wire.codec import Codec
from sdk.cluster.wire.stream import Stream
from sdk.cluster.wire.tls import SharedToken

HERE = Path(__file__).parent
TOKEN = "0123456789abcdef-of-these-tests"


def fake_codec() -> Codec:
    codec = engine_codec()
    more = Codec([whole(rank_runner.FakeConfig)], [rank_runner.whereabouts])
    codec._records |= more._records
    codec._functions |= more._functions
    return codec


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def remote(port: int, **options) -> RemoteWorkers:
    options = {"timeout": 60.0, "token": TOKEN, **options}
    return RemoteWorkers(listen=f"127.0.0.1:{port}", **options)


def executor_at(port: int, faults=None, size: int = 2, folder: str = "", **options):
    """An executor of the fake runner whose other ranks are remote; not started."""
    config = rank_runner.FakeConfig(faults or {}, folder)
    given = remote(port, **options.pop("remote", {}))
    return ProcessExecutor(
        rank_runner.FakeRunner,
        config,
        size,
        workers=lambda: RemoteRanks(given, fake_codec()),
        **options,
    )


class WorkerProcess:
    """A process of ``embedlm worker`` with the fake runner; its lines of text are kept.

    It ends with its test, unless ``shared`` says that others will use it.
    """

    #: Those to end after the test.
    running: ClassVar[list[WorkerProcess]] = []

    def __init__(
        self, port: int, *, host: str = "127.0.0.1", command=(), shared: bool = False, **options
    ) -> None:
        if not shared:
            self.running.append(self)
        given = json.dumps({"host": host, "port": port, "token": TOKEN, **options})
        self.process = subprocess.Popen(
            [*command, sys.executable, __file__, given], stdout=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.strip())
                self._changed.notify_all()

    def says(self, text: str, seconds: float = 60.0) -> bool:
        """Wait for a line with ``text``, and forget it and the lines before."""

        def found() -> bool:
            for index, line in enumerate(self.lines):
                if text in line:
                    del self.lines[: index + 1]
                    return True
            return False

        with self._changed:
            return self._changed.wait_for(found, seconds)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


@functools.cache
def shared(token: str = TOKEN, protocol: str = PROTOCOL) -> SharedToken:
    """Made once: it takes a tenth of a second."""
    return SharedToken(token.encode(), protocol)


@contextlib.contextmanager
def connected(
    worker: SharedToken | None = None, listener: SharedToken | None = None
) -> Iterator[tuple[Stream | Exception, Stream | Exception]]:
    """Both ends of an encrypted connection, or what they raised."""
    found: list[Stream | Exception] = [EOFError(), EOFError()]

    def answer() -> None:
        try:
            found[1] = (listener or shared()).accept(server.accept()[0], 5.0)
        except Exception as error:
            found[1] = error

    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=answer)
        answering.start()
        try:
            found[0] = (worker or shared()).connect(Address(*server.getsockname()), 5.0)
        except Exception as error:
            found[0] = error
        answering.join()
    yield found[0], found[1]
    for end in found:
        if isinstance(end, Stream):
            end.close()


def main(given: str) -> None:
    options = json.loads(given)
    parts = WorkerParts(fake_codec(), rank_runner.FakeRunner, lambda config, _: config)
    worker = WorkerOptions(
        model="",
        address=Address(options["host"], options["port"]),
        token=options["token"].encode(),
        num_threads=1,
        rank=options.get("rank"),
        timeout=options.get("timeout"),
    )
    say(f"pid {os.getpid()}")
    try:
        serve_engines(worker, once=options.get("once", False), parts=parts, on_event=say)
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
        sys.exit(2)


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    import logging

    logging.getLogger("sdk").addHandler(logging.StreamHandler(sys.stdout))
    main(sys.argv[1])
