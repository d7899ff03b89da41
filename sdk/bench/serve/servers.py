"""Servers that a comparison starts, each in its own process: ours and those of peers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sdk.api.errors import SdkError
from sdk.bench.engines import OURS, Peer, environment
from sdk.bench.peers.opening import Opening
from sdk.bench.serve.http_connection import Address, HttpClient, ProtocolError
from sdk.bench.serve.http_target import find_model
from sdk.bench.serve.subjects import Server

#: Peers with a server of their own.
SERVERS = ("llama.cpp", "vllm", "vllm-bf16")
#: vLLM takes a minute to start on two cores, longer on busy ones.
_START_S = 300.0
_STOP_S = 15.0
#: The end of a server's output that an error shows.
_SHOWN = 600


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is started with. ``requests``: the most at a time; ``context``: tokens of
    each."""

    model: str
    threads: int
    requests: int
    context: int


def command(peer: Peer, launch: Launch, port: int) -> list[str]:
    """The command line of an engine's own server."""
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    threads, context = str(launch.threads), str(launch.context)
    if peer.engine == OURS:
        limits = ["--max-model-len", context, "--max-num-seqs", str(launch.requests)]
        limits += ["--threads", threads]
        return [peer.python, "-m", "sdk", "serve", launch.model, *listen, *limits]
    if peer.engine == "llama.cpp":
        # It answers one request at a time, so one context is all it needs.
        limits = ["--n_ctx", context, "--n_threads", threads, "--n_threads_batch", threads]
        return [
            *(peer.python, "-m", "llama_cpp.server", "--model", launch.model),
            # By default a new request ends the stream of the one before it.
            *(*listen, *limits, "--verbose", "false", "--interrupt_requests", "false"),
        ]
    dtype = "bfloat16" if peer.engine.endswith("-bf16") else "float32"
    limits = ["--max-model-len", context, "--max-num-seqs", str(launch.requests)]
    return [
        *(peer.python, "-m", "vllm.entrypoints.openai.api_server", "--model", launch.model),
        *(*listen, *limits, "--dtype", dtype, "--disable-uvicorn-access-log"),
    ]


class ServerProcess:
    """A started server that answers. A context manager that ends it."""

    def __init__(
        self,
        name: str,
        argv: list[str],
        env: dict[str, str],
        port: int,
        *,
        start_s: float = _START_S,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name = name
        self.address = Address("127.0.0.1", port, False, "/v1")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("supervise.py")), *argv],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the others
        )
        try:
            progress(f"starting {name}")
            self._wait(time.monotonic() + start_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, end: float) -> None:
        while not asyncio.run(_answers(self.address)):
            code = self._process.poll()
            if code is not None:
                raise SdkError(f"{self.name}: the server ended with code {code}: {self._said()}")
            if time.monotonic() > end:
                raise SdkError(f"{self.name}: the server does not answer: {self._said()}")
            time.sleep(0.2)

    def _said(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _SHOWN))
        return self._log.read().decode("utf-8", "replace").strip() or "no output"

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the server: as by Ctrl-C, after fifteen seconds by force."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_STOP_S)
        with contextlib.suppress(ProcessLookupError):  # also processes that it left behind
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._log.close()


async def _answers(address: Address) -> bool:
    client = HttpClient(address)
    try:
        response = await asyncio.wait_for(client.get("/models"), 10)
    except (OSError, ProtocolError, asyncio.TimeoutError):
        return False
    finally:
        client.close()
    return response.status == 200


def start(
    peer: Peer, launch: Launch, progress: Callable[[str], None], *, ignore_eos: bool = True
) -> tuple[ServerProcess, Server]:
    """Start an engine's server and find its model.

    :raises SdkError: it does not start; with the end of its output.
    """
    port = free_port()
    opening = Opening(peer.engine, launch.model, launch.threads, launch.requests, launch.context)
    env = environment(opening)
    env["PYTHONUNBUFFERED"] = "1"
    process = ServerProcess(peer.engine, command(peer, launch, port), env, port, progress=progress)
    try:
        server = server_at(peer.engine, process.address, None, {}, {}, ignore_eos=ignore_eos)
    except BaseException:
        process.close()
        raise
    return process, server


def server_at(
    name: str,
    address: Address,
    model: str | None,
    headers: dict[str, str],
    body: dict[str, object],
    *,
    ignore_eos: bool = True,
) -> Server:
    """A server that runs already. :raises SdkError: it does not answer."""

    async def find() -> str:
        client = HttpClient(address, headers)
        try:
            return await find_model(client, name, model)
        finally:
            client.close()

    return Server(name, address, asyncio.run(find()), headers, body, ignore_eos)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


#: The interpreter of our own server: this one.
OWN = Peer(OURS, sys.executable)
