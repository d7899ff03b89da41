"""Workers on "other hosts" with the fake runner: processes that join over TCP."""

from __future__ import annotations

import contextlib
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
from sdk.cluster.executors.remote.codec import Codec
from sdk.cluster.executors.remote.handshake import answer_handshake, open_handshake
from sdk.cluster.executors.remote.messages import engine_codec, whole
from sdk.cluster.executors.remote.ranks import RemoteRanks
from sdk.cluster.executors.remote.serve import WorkerOptions, WorkerParts, serve_engines
from sdk.cluster.executors.remote.wire import SignedWire, Wire

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


@contextlib.contextmanager
def connected() -> Iterator[tuple[Wire, Wire]]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = Wire(socket.create_connection(server.getsockname()))
        other = Wire(server.accept()[0])
    try:
        yield one, other
    finally:
        one.close()
        other.close()


def shake_hands(
    worker: Wire, listener: Wire, tokens: tuple[bytes, bytes] = (TOKEN.encode(),) * 2
) -> tuple[SignedWire | Exception, SignedWire | Exception]:
    """What both ends get, at the same time: the connection, or the error."""
    found: list[SignedWire | Exception] = [EOFError(), EOFError()]

    def run(index: int, call, wire: Wire) -> None:
        try:
            found[index] = call(wire, tokens[index], 5.0)
        except Exception as error:
            found[index] = error

    other = threading.Thread(target=run, args=(1, answer_handshake, listener))
    other.start()
    run(0, open_handshake, worker)
    other.join()
    return found[0], found[1]


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
