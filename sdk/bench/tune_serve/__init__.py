"""Find the options of an engine that serve the most requests within an SLO.

A load is replayed on engines with different options in this process. The result is a JSON object
for `LLM(**options)` and the option --options of other commands.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdk.api.errors import RequestError
from sdk.bench import parse_count
from sdk.bench.models import ModelFiles, files_of
from sdk.bench.serve.options import (
    add_workload_arguments,
    arrivals_of,
    parse_positive,
    parse_share,
    workload_of,
)
from sdk.bench.serve.workload import Workload
from sdk.bench.tune_serve.search import Found, Search
from sdk.bench.tune_serve.space import (
    NAMES,
    SPACE,
    Dimension,
    Options,
    default_options,
    parse_values,
)
from sdk.bench.tune_serve.trials import EngineTrials
from sdk.cli.engine_arguments import add_engine_arguments, engine_options
from sdk.cli.table import format_table

#: How often the defaults and the result are measured in turn at the end.
_CONFIRMATIONS = 2
CLOCKS = {"cpu": time.thread_time, "wall": time.perf_counter}


def parse_names(text: str) -> tuple[str, ...]:
    """Names of options, each once."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(
                f"expected names of {', '.join(NAMES)}; found {name!r}"
            )
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="a file or folder (default: the demo model)")
    parser.add_argument(
        "--search",
        type=parse_names,
        default=NAMES,
        metavar="NAME[,...]",
        help=f"options to change (default: {','.join(NAMES)}); others keep their values",
    )
    parser.add_argument(
        "--values",
        type=parse_values,
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="the values to try of an option, such as max_num_seqs=8,16,32; may be repeated",
    )
    parser.add_argument(
        "--goodput",
        type=parse_share,
        default=0.99,
        metavar="SHARE",
        help="share of requests that must keep the --slo (default: 0.99)",
    )
    parser.add_argument(
        "--num-requests",
        type=parse_count,
        default=100,
        metavar="N",
        help="sessions of a run (default: 100)",
    )
    parser.add_argument(
        "--qps",
        type=parse_positive,
        default=4.0,
        metavar="RATE",
        help="sessions per second to begin with (default: 4)",
    )
    parser.add_argument(
        "--seconds",
        type=parse_positive,
        default=900.0,
        help="the search ends after this time, then the result is confirmed (default: 900)",
    )
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="cpu",
        help="what a step takes: CPU time, which other programs hardly change, or time on the "
        "wall (default: cpu)",
    )
    parser.add_argument(
        "--grid", action="store_true", help="measure every combination instead of searching"
    )
    add_workload_arguments(parser)
    engine = parser.add_argument_group("options that all engines have")
    add_engine_arguments(engine)
    engine.add_argument("--max-num-seqs", type=parse_count, help="the most requests at a time")
    engine.add_argument("--threads", type=parse_count, help="default: the CPUs of this process")
    parser.add_argument("--write", metavar="FILE", help="write the options, a JSON object")


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return files_of(args.model)


def run(args: argparse.Namespace) -> int:
    if args.slo is None:
        raise RequestError("tune serve: needs an --slo, such as --slo ttft=0.5,itl=0.05")
    if args.trace is not None:
        raise RequestError("tune serve: needs rates that it can choose: leave out --trace")
    workload = workload_of(args)
    given = engine_options(args, "max_num_seqs")
    if args.threads:
        given["num_threads"] = args.threads
    if args.write:
        Path(args.write).touch()  # fails before anything is measured if it is not writable
    listed = {dimension.name: dimension for dimension in args.values}
    searched = [listed.get(one.name, one) for one in SPACE if one.name in args.search]
    space = [one for one in searched if one.name not in given]
    if not space:
        raise RequestError("tune serve: every option of --search has a value already")
    with ModelFiles(args.model) as files:
        trials = make_trials(args, workload, files.path, given, args.seconds)
        search = Search(trials, args.goodput, say)
        try:
            if args.grid:
                print_grid(list(search.grid(args.qps, space)))
                return 0
            start = {one.name: default_options()[one.name] for one in space}
            best = search.descend(start, args.qps, space)
        finally:
            trials.close()
        confirmed = confirm(args, workload, files.path, given, [Found(start, best.rate), best])
    report(args, space, confirmed, given)
    return 0


def make_trials(
    args: argparse.Namespace, workload: Workload, model: str, given: Options, seconds: float
) -> EngineTrials:
    def open_engine(options: Options) -> Any:
        from sdk.llm import LLM

        return LLM(model, **{**given, **options})

    return EngineTrials(
        open_engine,
        workload,
        arrivals_of(args, args.qps),
        args.slo,
        args.num_requests,
        args.goodput,
        chat=args.chat,
        clock=CLOCKS[args.clock],
        seconds=seconds,
    )


def confirm(
    args: argparse.Namespace,
    workload: Workload,
    model: str,
    given: Options,
    candidates: Sequence[Found],
) -> list[Found]:
    """The highest rates of the candidates with other requests than the search had, in turn."""
    say("confirming with other requests")
    other = replace(workload, seed=workload.seed + 1)
    trials = make_trials(args, other, model, given, math.inf)
    search = Search(trials, args.goodput, say)
    found: list[list[float]] = [[] for _ in candidates]
    try:
        for _ in range(_CONFIRMATIONS):
            for rates, candidate in zip(found, candidates, strict=True):
                rates.append(search.capacity(candidate.options, candidate.rate or args.qps))
    finally:
        trials.close()
    return [
        Found(candidate.options, statistics.median(rates))
        for candidate, rates in zip(candidates, found, strict=True)
    ]


def report(
    args: argparse.Namespace, space: Sequence[Dimension], confirmed: Sequence[Found], given: Options
) -> None:
    """Print the result, and write its options. The defaults stay if the other is not better."""
    start, best = confirmed
    if best.rate <= start.rate:
        best = start
    rows = []
    for dimension in space:
        before, after = (found.options[dimension.name] for found in (start, best))
        rows.append([dimension.name, str(before), str(after), dimension.why])
    print(format_table(["option", "default", "found", ""], rows, left=4))
    share = f"{100 * args.goodput:g} % within {args.slo}"
    if not best.rate:
        print(f"\nno rate was found at which {share}: loosen --slo or ask for less")
    elif best is start:
        print(f"\nthe defaults are as good: {best.rate:.3g} requests per second, {share}")
    else:
        gain = f" instead of {start.rate:.3g}" if start.rate else ", the defaults at none"
        print(f"\n{best.rate:.3g} requests per second{gain}, {share}")
    options = {**given, **best.options}
    print(json.dumps(options, default=str))
    if args.write:
        Path(args.write).write_text(json.dumps(options, indent=2, default=str) + "\n")


def print_grid(found: Sequence[Found]) -> None:
    """Every combination, from the highest rate."""
    if not found:
        raise RequestError(
            "tune serve: nothing was measured: no engine can have any of these options, or "
            "--seconds are too few"
        )
    rows = [
        [*map(str, one.options.values()), f"{one.rate:.2f}"]
        for one in sorted(found, key=lambda one: -one.rate)
    ]
    print(format_table([*found[0].options, "per second"], rows, left=0))


def say(text: str) -> None:
    """A decision of the search, while it runs."""
    print(text, file=sys.stderr, flush=True)
