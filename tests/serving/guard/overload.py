"""Many connections at one time: ``python -m tests.serving.guard.overload PORT --connections 1000``.

The server is any, or ``python -m tests.serving.guard.overload 0``: one with a fake model, which
prints its port. Each connection asks again and again until the time is over. What is refused waits
for its ``Retry-After``. Prints one JSON object: latencies in milliseconds of refusals (429, 503)
and of the first token of answers, counts by status, and what went wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import socket
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any


class Load:
    """The connections, and what they saw."""

    def __init__(self, args: argparse.Namespace) -> None:
        body = {
            "model": args.model,
            "prompt": "Once upon a time",
            "max_tokens": args.max_tokens,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
        }
        data = json.dumps(body).encode()
        self.request = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n"
            + (f"Authorization: Bearer {args.key}\r\n" if args.key else "")
            + "\r\n"
        ).encode() + data
        self.args = args
        self.refused: list[float] = []
        self.first: list[float] = []
        self.whole: list[float] = []
        self.status: Counter[int] = Counter()
        self.errors: Counter[str] = Counter()
        self.end = 0.0
        self.start = asyncio.Event()

    async def connection(self, number: int, opened: asyncio.Semaphore) -> None:
        async with opened:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.args.port)
        self.ready += 1
        await self.start.wait()
        await asyncio.sleep(random.uniform(0, self.args.spread))
        try:
            while time.perf_counter() < self.end:
                wait = await self.ask(reader, writer)
                if wait and not self.args.impatient:
                    wait *= random.uniform(1.0, 1.5)
                    await asyncio.sleep(min(wait, max(0, self.end - time.perf_counter())))
        except (OSError, EOFError, KeyError) as error:
            self.errors[repr(error)] += 1
        finally:
            writer.close()

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
        """One request; how long to wait before the next."""
        began = time.perf_counter()
        writer.write(self.request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        status = int(head[0].split()[1])
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        self.status[status] += 1
        if status != 200:
            await reader.readexactly(int(headers["content-length"]))
            self.refused.append(time.perf_counter() - began)
            return float(headers["retry-after"])
        first = True
        while size := int(await reader.readline(), 16):
            await reader.readexactly(size + 2)
            if first:
                self.first.append(time.perf_counter() - began)
                first = False
        await reader.readline()
        self.whole.append(time.perf_counter() - began)
        return 0.0

    async def run(self) -> dict[str, Any]:
        self.ready = 0
        opened = asyncio.Semaphore(100)
        count = self.args.connections
        tasks = [asyncio.create_task(self.connection(n, opened)) for n in range(count)]
        while self.ready < count:
            await asyncio.sleep(0.01)
            for task in tasks:
                if task.done():
                    task.result()
        self.end = time.perf_counter() + self.args.seconds
        self.start.set()
        await asyncio.gather(*tasks)
        return {
            "connections": count,
            "status": dict(sorted(self.status.items())),
            "errors": dict(self.errors),
            "refused_ms": percentiles(self.refused),
            "first_token_ms": percentiles(self.first),
            "whole_ms": percentiles(self.whole),
        }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile and the longest, in milliseconds."""
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    values = {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98], "max": max(seconds)}
    return {name: round(value * 1000, 1) for name, value in values.items()}


def cpu_seconds(process: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(args: argparse.Namespace) -> None:
    """A protected server with a fake model: 32 requests in a step of 5 ms, 64 inside."""
    import uvicorn

    from sdk.serving.app import create_app
    from sdk.serving.guard import Gate, HttpLimits, protected, uvicorn_options
    from sdk.testing import FakeLLM

    # the first connections wait for the last ones before they send: on a busy machine that takes
    # longer than the 10 s after which the server closes a connection without a request
    limits = HttpLimits(requests=64, head_seconds=60)
    gate = Gate(limits.requests)
    llm = FakeLLM("word " * 100, seconds_per_token=0.005, max_num_seqs=32)
    app = protected(create_app(llm), limits=limits, gate=gate)
    if args.full:
        gate.inside = limits.requests
    options = uvicorn_options(limits, None if args.full == "through-uvicorn" else gate)
    config = uvicorn.Config(app, log_config=None, lifespan="off", **options)
    listener = socket.create_server(("127.0.0.1", 0), backlog=limits.connections)
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(config).run([listener])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--spread", type=float, default=2, help="seconds of the first requests")
    parser.add_argument("--key")
    parser.add_argument("--impatient", action="store_true", help="do not wait for Retry-After")
    parser.add_argument("--process", type=int, help="of the server: report its CPU time")
    parser.add_argument(
        "--full",
        choices=("at-once", "through-uvicorn"),
        help="with port 0: refuse every request, and where",
    )
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    if args.port == 0:
        serve(args)
        return
    before = cpu_seconds(args.process) if args.process else 0.0
    result = asyncio.run(start(args))
    if args.process:
        used = cpu_seconds(args.process) - before
        result["server_cpu_us_per_request"] = round(used * 1e6 / sum(result["status"].values()))
    print(json.dumps(result))


async def start(args: argparse.Namespace) -> dict[str, Any]:
    return await Load(args).run()


if __name__ == "__main__":
    main()
