"""Measure speed and accuracy on this machine, alone or side by side with other engines.

Every engine gets the same prompt ids, the same number of threads, and greedy decoding without
end-of-text. Rounds are interleaved, and the median is reported. The machine's limits are measured
before and after: they bound every speed, and show whether the machine was quiet.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.load_progress import is_terminal
from sdk.bench.engines import PEERS, check_peer, parse_peers
from sdk.bench.lora import parse_lora
from sdk.bench.models import ModelFiles, Work, files_of, work_of
from sdk.bench.plots import check_matplotlib, write_plots
from sdk.bench.random_models import SHAPES
from sdk.bench.real_shapes import REAL_SHAPES
from sdk.bench.report import Section, to_markdown, to_text
from sdk.bench.settings import Settings, least_output
from sdk.bench.suites import SUITES, measure
from sdk.demo import MINILM, SMOLLM2
from sdk.kernels.packages import check_installed
from sdk.kernels.system import SYSTEM

#: Defaults of all options that affect results; a report's command lists those that differ.
DEFAULTS: dict[str, Any] = {
    "suite": ("prefill", "decode"),
    "against": (),
    "prompt_len": (512,),
    "streams": (1, 8),
    "context": (256, 1024, 2048, 4096),
    "output_len": 64,
    "kv_dtype": "auto",
    "lora": "random:16",
    "lora_dtype": "auto",
    "gguf": None,
    "texts": 1000,
    "rounds": 5,
    "threads": None,
}


#: Suites that compute with it themselves.
_NEED_TORCH = {"accuracy", "gemm"}


def parse_numbers(text: str, low: int, high: int) -> tuple[int, ...]:
    """``"1,8"`` -> ``(1, 8)``, each number once."""
    pieces = text.split(",")
    numbers = tuple(int(piece) for piece in pieces if piece.isascii() and piece.isdigit())
    if len(numbers) < len(pieces) or not all(low <= number <= high for number in numbers):
        raise argparse.ArgumentTypeError(
            f"expected numbers in {low}..{high} such as {low},{min(8 * low, high)}, found {text!r}"
        )
    return tuple(dict.fromkeys(numbers))


def parse_streams(text: str) -> tuple[int, ...]:
    return parse_numbers(text, 1, 256)


def parse_lengths(text: str) -> tuple[int, ...]:
    return parse_numbers(text, 1, 2**20)


def parse_count(text: str) -> int:
    """A positive integer."""
    count = int(text) if text.isascii() and text.isdigit() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, found {text!r}")
    return count


def parse_suites(text: str) -> tuple[str, ...]:
    decoding = (name for name in SUITES if name != "embed")  # which takes another model
    names = tuple(decoding) if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in SUITES:
            raise argparse.ArgumentTypeError(
                f"expected all or names of {', '.join(SUITES)}; found {name!r}"
            )
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        help=f"the model (default: the demo model); {' and '.join(SHAPES)} create a file of random "
        f"4-bit weights, 0.5 GB, in a temporary folder; {', '.join(REAL_SHAPES)} have the shapes "
        "of published models, 0.5 to 18 GB, and stay in the user's cache; gpu measures a GPU's "
        "kernels on random weights",
    )
    parser.add_argument(
        "--suite",
        type=parse_suites,
        metavar="NAME[,...]",
        help=f"all (but embed), or names of {', '.join(SUITES)} (default: prefill,decode)",
    )
    parser.add_argument(
        "--against",
        type=parse_peers,
        metavar="NAME[=PYTHON][,...]",
        help=f"other engines to measure: {', '.join(PEERS)}, each with the interpreter that has it "
        "(default: this one)",
    )
    parser.add_argument(
        "--prompt-len",
        metavar="N[,...]",
        type=parse_lengths,
        help="prompt tokens of the prefill suite (default: 512)",
    )
    parser.add_argument(
        "--streams",
        metavar="N[,...]",
        type=parse_streams,
        help="concurrent requests of the decode suite (default: 1,8)",
    )
    parser.add_argument(
        "--context",
        metavar="N[,...]",
        type=parse_lengths,
        help="prompt tokens of the context suite (default: 256,1024,2048,4096)",
    )
    parser.add_argument(
        "--output-len", type=parse_count, help="decoded tokens per request (default: 64)"
    )
    parser.add_argument(
        "--kv-dtype",
        help="type of keys and values for us, llama.cpp (int8 is q8_0, int4 q4_0), openvino (u8, "
        "u4) and mistral.rs (only float16, float32); default: auto, each engine's own",
    )
    _add_arguments_of_suites(parser)
    parser.add_argument("--rounds", type=parse_count, help="rounds of measuring (default: 5)")
    parser.add_argument("--threads", type=parse_count, help="default: the CPUs of this process")
    _add_gpu_arguments(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write all samples; - for stdout instead of the table"
    )
    parser.add_argument("--markdown", metavar="FILE", help="write the tables and the command")
    parser.add_argument("--plots", metavar="FOLDER", help="draw one PNG per suite (matplotlib)")
    parser.set_defaults(**DEFAULTS)


def _add_arguments_of_suites(parser: argparse.ArgumentParser) -> None:
    text = "adapters of the lora suite: random ones, or one of yours (default: random:16)"
    parser.add_argument("--lora", metavar="random:RANK|PATH", help=text)
    text = "type of their factors in memory (default: auto, 16 bits)"
    parser.add_argument("--lora-dtype", choices=("auto", "int8"), help=text)
    text = "the same model as a GGUF file, for llama.cpp in the embed suite"
    parser.add_argument("--gguf", metavar="FILE", help=text)
    text = "texts in one call of the embed suite (default: 1000)"
    parser.add_argument("--texts", metavar="N", type=parse_count, help=text)


def _add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    of_gpu = parser.add_argument_group("options of `bench gpu`")
    of_gpu.add_argument("--rows", metavar="NAME[,...]", help="measure only these rows")
    of_gpu.add_argument(
        "--seconds",
        type=parse_count,
        help="time limit for all rows; rows left out are reported (default: 540)",
    )
    of_gpu.add_argument("--log", metavar="FILE", help="write the measuring process's messages")


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return [*([] if args.file == "gpu" else files_of(args.file)), *files_of(args.gguf)]


def run(args: argparse.Namespace) -> int:
    if args.file == "gpu":
        from sdk.bench import gpu

        return gpu.run(args)
    if args.output_len < 2:
        raise RequestError("--output-len: expected at least 2, found 1 (nothing would be decoded)")
    least = least_output(max(args.streams))
    if {"decode", "phases"} & {*args.suite} and args.output_len < least:
        raise RequestError(
            f"--output-len: expected at least {least} with {max(args.streams)} requests, found "
            f"{args.output_len} (the first requests would end before the last ones begin)"
        )
    for peer in args.against:
        check_peer(peer)
    if args.plots:
        check_matplotlib()
    for suite in _NEED_TORCH & {*args.suite}:
        check_installed("torch", f"--suite {suite} needs")
    if "embed" in args.suite and len(args.suite) > 1:
        raise RequestError("--suite: expected embed alone, because it takes an embedding model")
    with ModelFiles(args.file, MINILM if "embed" in args.suite else SMOLLM2) as model:
        settings = Settings(
            model=model.path,
            threads=args.threads or SYSTEM.num_cpus(),
            rounds=args.rounds,
            kv=args.kv_dtype,
            peers=args.against,
            requests=args.streams,
            prompt_lens=args.prompt_len,
            contexts=args.context,
            output_len=args.output_len,
            unpacked=model.unpacked,
            with_vocabulary=model.with_vocabulary,
            progress=_progress,
            lora=parse_lora(args.lora),
            lora_dtype=args.lora_dtype,
            gguf=args.gguf,
            texts=args.texts,
        )
        work = work_of(model.path)
        before = machine_limits(settings.threads)
        sections = measure(settings, args.suite)
        report = make_report(args, settings, before, machine_limits(settings.threads))
    report["failures"] = list(dict.fromkeys(settings.failures))
    report["results"] = {
        name: [result.to_json() for result in section.results] for name, section in sections
    }
    _write(args, report, dict(sections), work)
    return 1 if settings.failures else 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The machine's limits: 10^9 bytes read and 10^12 8-bit operations per second; nanoseconds
    from core to core, None with one thread."""

    simd: str
    read: float
    int8: float
    core_to_core: float | None


def machine_limits(threads: int) -> Limits:
    """:raises KernelError: without the native module."""
    from sdk.kernels.cpu import simd_level
    from sdk.kernels.cpu.probe import core_to_core, int8_peak, read_bandwidth

    read = read_bandwidth(threads)
    level = simd_level() or "portable"
    peak = int8_peak(threads, level)
    apart = round(1e9 * core_to_core(threads), 1) if threads > 1 else None
    return Limits(level, round(read / 1e9, 2), round(peak / 1e12, 3), apart)


def make_report(
    args: argparse.Namespace, settings: Settings, before: Limits, after: Limits
) -> dict[str, Any]:
    """The report without results: how to repeat the run, and the machine it ran on."""
    return {
        "command": command(args),
        "model": Path(settings.model).name,
        "machine": {
            "cpu": SYSTEM.cpu_name(),
            "cpus": SYSTEM.num_cpus(),
            "simd": before.simd,
            "python": platform.python_version(),
            "read_gb_per_s": {"before": before.read, "after": after.read},
            "int8_tops": {"before": before.int8, "after": after.int8},
            "core_to_core_ns": {"before": before.core_to_core, "after": after.core_to_core},
        },
        "settings": {
            "threads": settings.threads,
            "rounds": settings.rounds,
            "output_len": settings.output_len,
        },
    }


def command(args: argparse.Namespace) -> str:
    """The command line that repeats this run, without local paths."""
    words = ["embedlm", "bench"]
    if args.file:
        words.append(Path(args.file).name)
    for option, default in DEFAULTS.items():
        value = getattr(args, option)
        if value == default:
            continue
        if option == "against":
            value = tuple(peer.engine for peer in value)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{option.replace('_', '-')}", text]
    return shlex.join(words)


def _write(
    args: argparse.Namespace, report: dict[str, Any], sections: dict[str, Section], work: Work
) -> None:
    data = json.dumps(report, indent=2)
    if args.json and args.json != "-":
        Path(args.json).write_text(data + "\n")
    if args.markdown:
        Path(args.markdown).write_text(to_markdown(report, sections.values()))
    if args.plots:
        write_plots(Path(args.plots), report, sections, work)
    print(data if args.json == "-" else to_text(report, sections.values()))


def _progress(text: str) -> None:
    if is_terminal(sys.stderr):
        print(text, file=sys.stderr)
