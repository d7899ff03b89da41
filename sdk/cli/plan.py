"""Show the memory that a model would take, from its headers alone: nothing is loaded.

If the budget is too small, a breakdown and advice go to stderr, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sdk.api.errors import KernelError, OutOfMemoryError
from sdk.cli.engine_arguments import add_engine_arguments, as_arguments, engine_options

if TYPE_CHECKING:
    from sdk.memory.plan import MemoryPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="a .gguf file, a folder with safetensors, or a hub id")
    add_engine_arguments(parser)
    parser.add_argument("--max-num-seqs", type=int, help="the most concurrent requests")
    parser.add_argument(
        "--skip-tokenizer-init",
        action="store_const",
        const=True,
        help="no memory for a tokenizer: prompts and answers are token ids",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return [args.file]


def run(args: argparse.Namespace) -> int:
    from sdk.api.sizes import format_bytes
    from sdk.llm import LLM
    from sdk.memory.disk_speed import disk_bandwidth
    from sdk.memory.plan import DISK_BANDWIDTH

    plan = LLM.plan(args.file, **engine_options(args, "max_num_seqs", "skip_tokenizer_init"))
    disk = DISK_BANDWIDTH if plan.experts is None else disk_bandwidth(args.file) or DISK_BANDWIDTH
    speed = _speed(plan, disk)
    if args.json:
        print(json.dumps({**to_json(plan), "decode_tokens_per_second": speed}, indent=2))
    elif plan.fits:
        print(plan)
        if speed is not None:
            said = "tokens/s expected for one request on this machine"
            if plan.offloaded:
                said += f", if the disk reads {DISK_BANDWIDTH / 1e9:g} GB/s"
            elif plan.experts is not None:
                said += (
                    f" if it reads {format_bytes(plan.experts.usual)} of experts for a token "
                    f"({plan.experts.basis}); the disk reads {disk / 1e9:.2g} GB/s"
                )
            print(f"decoding   {speed:>10.{0 if speed >= 10 else 1}f}  {said}")
    if not plan.fits and not args.json:
        raise OutOfMemoryError(as_arguments(plan.problem, args))
    return 0 if plan.fits else 2


def _speed(plan: MemoryPlan, disk: float) -> float | None:
    """Tokens per second by the read bandwidth, measured now; None without the native module."""
    from sdk.kernels.cpu.probe import read_bandwidth
    from sdk.memory.resolve import threads_of

    assert plan.config is not None
    try:
        bandwidth = read_bandwidth(threads_of(plan.config), seconds=0.02)
    except KernelError:
        return None
    return round(plan.tokens_per_second(bandwidth, disk=disk), 1)


def to_json(plan: MemoryPlan) -> dict[str, Any]:
    """The plan with sizes in bytes and lengths in tokens."""
    return {
        "budget": plan.budget,
        "weights": plan.weights,
        "offloaded": plan.offloaded,
        "experts": None if plan.experts is None else asdict(plan.experts),
        "workspace": plan.workspace,
        "graphs": plan.graphs,
        "scratch": plan.scratch,
        "tokenizer": plan.tokenizer,
        "images": None if plan.images is None else plan.images._asdict(),
        "loading": plan.loading,
        "kv_cache": plan.kv_cache,
        "total": plan.total,
        "kv_dtype": plan.kv_dtype,
        "kv_bytes_per_token": plan.page_bytes // plan.page_size,
        "page_size": plan.page_size,
        "page_bytes": plan.page_bytes,
        "num_pages": plan.num_pages,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "full_requests": round(plan.full_requests, 2),
        "problem": plan.problem,
        "kernels": [asdict(share) for share in plan.kernels],
        "alternatives": [
            {
                "options": dict(other.options),
                "total": other.plan.total,
                "max_model_len": other.plan.max_model_len,
                "loss": other.loss,
                "keeps_limits": other.keeps_limits,
            }
            for other in plan.alternatives
        ],
    }
