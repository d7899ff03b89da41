"""Serve one rank of a model for an engine on another host.

Says what happens on stderr. Ctrl-C or SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sdk.cluster.distributed import run_worker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="the model of the engine: a path on this host, or a hub id")
    parser.add_argument(
        "--connect", required=True, metavar="HOST:PORT", help="where the engine waits for workers"
    )
    parser.add_argument(
        "--token-file", required=True, type=Path, metavar="FILE", help="the token of the engine"
    )
    parser.add_argument("--num-threads", type=int, help="default: the CPUs of this process")
    parser.add_argument("--rank", type=int, help="which rank to be (default: the engine decides)")
    parser.add_argument(
        "--once", action="store_true", help="end with the first engine instead of waiting for more"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="how long to wait for an engine"
    )


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return [args.model]


def run(args: argparse.Namespace) -> int:
    run_worker(
        args.model,
        connect=args.connect,
        token_file=args.token_file,
        num_threads=args.num_threads,
        rank=args.rank,
        once=args.once,
        timeout=args.timeout,
        on_event=say,
    )
    return 0


def say(text: str) -> None:
    """One line on stderr."""
    if sys.stderr is not None:
        print(f"embedlm: {text}", file=sys.stderr, flush=True)
