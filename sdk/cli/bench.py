"""Measure prefill and decode speed, alone or beside llama.cpp on the same file.

Every engine gets the same random prompt ids, the same threads and greedy decoding without
end-of-text; rounds are interleaved and the median is reported. The memory's read bandwidth is
measured before and after, because it bounds decoding and tells whether the machine was quiet.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdk.cli.bench_engines import Engines, Load, OurEngine, PeerEngine, Sample
from sdk.cli.table import format_table
from sdk.demo import demo_model
from sdk.errors import RequestError

#: Read per thread and pass when the bandwidth is measured: far beyond any cache of two cores.
_BANDWIDTH_BYTES = 256 * 2**20


@dataclass(slots=True)
class Row:
    """All samples of one engine with one number of streams."""

    engine: str
    streams: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def prefill(self) -> float:
        return statistics.median(sample.prefill for sample in self.samples)

    @property
    def decode(self) -> float:
        return statistics.median(sample.decode for sample in self.samples)

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "streams": self.streams,
            "prefill_tokens_per_s": round(self.prefill, 2),
            "decode_tokens_per_s": round(self.decode, 2),
            "prefill_samples": [round(sample.prefill, 2) for sample in self.samples],
            "decode_samples": [round(sample.decode, 2) for sample in self.samples],
        }


def parse_streams(text: str) -> tuple[int, ...]:
    """``"1,8"`` -> ``(1, 8)``."""
    try:
        streams = tuple(int(piece) for piece in text.split(","))
    except ValueError:
        streams = ()
    if not streams or not all(1 <= count <= 256 for count in streams):
        raise argparse.ArgumentTypeError(f"expected numbers in 1..256 such as 1,8, found {text!r}")
    return streams


def parse_count(text: str) -> int:
    """A positive integer."""
    count = int(text) if text.isascii() and text.isdigit() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found {text!r}")
    return count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="the model (default: the demo model)")
    parser.add_argument("--streams", type=parse_streams, default=(1, 8), help="default: 1,8")
    parser.add_argument("--prompt-len", type=parse_count, default=128, help="default: 128 tokens")
    parser.add_argument("--output-len", type=parse_count, default=64, help="default: 64 tokens")
    parser.add_argument("--rounds", type=parse_count, default=5, help="default: 5")
    parser.add_argument("--threads", type=parse_count, help="default: the CPUs of this process")
    parser.add_argument("--against", choices=["llama.cpp"], help="measure this too")
    parser.add_argument(
        "--peer-python", help="the interpreter that has llama-cpp-python (default: this one)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all samples; - for stdout, no table")


def run(args: argparse.Namespace) -> int:
    if args.output_len < 2:
        raise RequestError("--output-len: expected at least 2, found 1 (nothing would be decoded)")
    model = args.file or str(demo_model())
    threads = args.threads or len(os.sched_getaffinity(0))
    before = read_bandwidth(threads)
    rows = measure(args, model, threads)
    after = read_bandwidth(threads)
    report = {
        "model": Path(model).name,
        "threads": threads,
        "machine": platform.machine(),
        "prompt_len": args.prompt_len,
        "output_len": args.output_len,
        "rounds": args.rounds,
        "read_bandwidth_gb_per_s": {"before": round(before, 2), "after": round(after, 2)},
        "results": [row.to_json() for row in rows],
    }
    if args.json == "-":
        print(json.dumps(report, indent=2))
        return 0
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")
    print(format_report(report, rows))
    return 0


def measure(args: argparse.Namespace, model: str, threads: int) -> list[Row]:
    """Open the engines and measure every number of streams, rounds interleaved."""
    most, context = max(args.streams), args.prompt_len + args.output_len
    peer = peer_python(args)
    rows: dict[tuple[str, int], Row] = {}
    with Engines() as engines:
        ours = OurEngine(model, threads, most, context)
        engines.opened.append(ours)
        if peer is not None:
            engines.opened.append(PeerEngine(peer, model, threads, most, context))
        for streams in args.streams:
            load = make_load(ours.vocab_size, streams, args.prompt_len, args.output_len)
            warm = Load(load.prompts, 2)
            for engine in engines.opened:
                engine.measure(warm)
            for number in range(args.rounds):
                for engine in engines.interleaved(number):
                    row = rows.setdefault((engine.name, streams), Row(engine.name, streams))
                    row.samples.append(engine.measure(load))
                _progress(f"{streams} streams: round {number + 1} of {args.rounds}")
    return sorted(rows.values(), key=lambda row: row.streams)


def peer_python(args: argparse.Namespace) -> str | None:
    """The interpreter to run the peer in, ``None`` when none was asked for."""
    if args.against is None:
        if args.peer_python is not None:
            raise RequestError("--peer-python: expected --against llama.cpp beside it")
        return None
    if args.peer_python is not None:
        return str(args.peer_python)
    if importlib.util.find_spec("llama_cpp") is None:
        raise RequestError(
            "--against llama.cpp: llama-cpp-python is not installed here; install it, or name an "
            "interpreter that has it with --peer-python"
        )
    return sys.executable


def make_load(vocab_size: int, streams: int, prompt_len: int, output_len: int) -> Load:
    """Random prompts, the same every time; the lowest ids (control tokens, bytes) are left out."""
    draw = random.Random(streams)
    low = min(1000, vocab_size // 2)
    prompts = tuple(
        tuple(draw.randrange(low, vocab_size) for _ in range(prompt_len)) for _ in range(streams)
    )
    return Load(prompts, output_len)


def read_bandwidth(threads: int) -> float:
    """10^9 bytes per second that ``threads`` threads read together, best of five passes."""
    import numpy

    blocks = [numpy.ones(_BANDWIDTH_BYTES // 4, numpy.int32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(numpy.max, blocks))
            best = max(best, threads * _BANDWIDTH_BYTES / (time.perf_counter() - start))
    return best / 1e9


def format_report(report: dict[str, Any], rows: Sequence[Row]) -> str:
    """The table, with what it was measured on above it."""
    bandwidth = report["read_bandwidth_gb_per_s"]
    head = (
        f"{report['model']}: {report['prompt_len']} prompt and {report['output_len']} output "
        f"tokens per stream, {report['threads']} threads, median of {report['rounds']} rounds\n"
        f"memory read bandwidth {bandwidth['before']} GB/s before, {bandwidth['after']} GB/s after"
    )
    cells = [[r.engine, str(r.streams), f"{r.prefill:.1f}", f"{r.decode:.1f}"] for r in rows]
    table = format_table(["engine", "streams", "prefill tok/s", "decode tok/s"], cells)
    return f"{head}\n\n{table}"


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
