"""Load an engine or a server with requests, and measure latency, throughput and goodput.

Requests arrive in an open loop (at random times, whether or not earlier ones are answered, or at
those of a trace) or in a closed loop (a number of callers). The same generator loads an engine in
this process and any server with OpenAI's API; this process is then only the client.
"""

from __future__ import annotations

import argparse

from sdk.api.errors import RequestError
from sdk.bench import parse_count, parse_numbers
from sdk.bench.engines import check_peer, parse_peers
from sdk.bench.models import files_of
from sdk.bench.plots import check_matplotlib
from sdk.bench.serve.opening import opened_subjects
from sdk.bench.serve.options import (
    add_workload_arguments,
    arrivals_of,
    parse_object,
    parse_positive,
    parse_share,
    workload_of,
)
from sdk.bench.serve.progress import ProgressLine
from sdk.bench.serve.results import Results
from sdk.bench.serve.runs import Case, Runs, Size
from sdk.bench.serve.servers import SERVERS
from sdk.cli.engine_arguments import add_engine_arguments


def parse_rates(text: str) -> tuple[float, ...]:
    """``"1,2.5"``: positive numbers, each once."""
    return tuple(dict.fromkeys(parse_positive(piece) for piece in text.split(",")))


def parse_concurrency(text: str) -> tuple[int, ...]:
    return parse_numbers(text, 1, 4096)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="a file or folder to load (default: the demo model); with --url the name that "
        "requests have (default: the server's first model)",
    )
    _add_subject_arguments(parser.add_argument_group("what is measured"))
    _add_load_arguments(parser.add_argument_group("load"))
    add_workload_arguments(parser)
    engine = parser.add_argument_group("options of the engine in this process")
    add_engine_arguments(engine)
    engine.add_argument("--max-num-seqs", type=parse_count, help="the most requests at a time")
    engine.add_argument("--threads", type=parse_count, help="default: the CPUs of this process")
    engine.add_argument(
        "--options", metavar="FILE", help="more options of LLM, as a JSON object in a file"
    )
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="write all numbers; - for stdout, no table")
    out.add_argument("--markdown", metavar="FILE", help="write the table and the command")
    out.add_argument("--records", metavar="FILE", help="write the times of every request")
    out.add_argument("--plots", metavar="FOLDER", help="draw latencies and rates (matplotlib)")


def _add_subject_arguments(where: argparse._ArgumentGroup) -> None:
    where.add_argument("--url", help="a server with OpenAI's API, such as http://127.0.0.1:8000")
    where.add_argument(
        "--http",
        action="store_true",
        help="start `embedlm serve` with the model and measure it through HTTP",
    )
    where.add_argument(
        "--against",
        type=lambda text: parse_peers(text, SERVERS),
        default=(),
        metavar="NAME[=PYTHON][,...]",
        help=f"start these servers too, and measure them in turn with ours: {', '.join(SERVERS)}, "
        "each with the interpreter that has it",
    )
    where.add_argument(
        "--header", action="append", default=[], metavar="LINE", help="'Name: value' for --url"
    )
    where.add_argument(
        "--body",
        type=parse_object,
        default={},
        metavar="JSON",
        help="more parameters of every request, with --url",
    )
    where.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="answers may end early; otherwise end-of-text is ignored by servers that can",
    )


def _add_load_arguments(how: argparse._ArgumentGroup) -> None:
    how.add_argument(
        "--qps",
        type=parse_rates,
        metavar="RATE[,...]",
        help="open loop: sessions per second (with --turns conversations, otherwise requests)",
    )
    how.add_argument(
        "--concurrency",
        type=parse_concurrency,
        metavar="N[,...]",
        help="closed loop with this many callers; with --qps or --trace the most requests at a "
        "time (default: 8 callers)",
    )
    how.add_argument(
        "--sweep",
        action="store_true",
        help="find the highest --qps at which --goodput of the requests keep the --slo",
    )
    how.add_argument(
        "--goodput",
        type=parse_share,
        default=0.99,
        metavar="SHARE",
        help="share of good requests that a sweep needs (default: 0.99)",
    )
    how.add_argument(
        "--num-requests",
        type=parse_count,
        metavar="N",
        help="sessions of a run (default: 100, or the whole trace)",
    )
    how.add_argument(
        "--seconds",
        type=parse_positive,
        help="or the time in which sessions begin (default of a sweep: 20)",
    )
    how.add_argument(
        "--warm-up",
        type=lambda text: 0 if text == "0" else parse_count(text),
        default=4,
        metavar="N",
        help="requests that are not measured, before the first run (default: 4)",
    )
    how.add_argument("--rounds", type=parse_count, default=1, help="of all loads (default: 1)")
    how.add_argument(
        "--timeout",
        type=parse_positive,
        default=600.0,
        metavar="SECONDS",
        help="a request that takes longer has failed (default: 600)",
    )


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return files_of(args.model) if args.url is None else []


def run(args: argparse.Namespace) -> int:
    cases = cases_of(args)
    workload = workload_of(args)
    if args.plots:
        check_matplotlib()
    for peer in args.against:
        check_peer(peer)
    line = ProgressLine()
    runs = Runs(
        workload,
        size_of(args),
        args.slo,
        chat=args.chat,
        timeout_s=args.timeout,
        progress=line,
    )
    results = Results(args, line)
    try:
        with opened_subjects(args, line) as subjects:
            for subject in subjects:
                runs.warm_up(subject)
            if args.sweep:
                results.sweep(subjects, runs)
            else:
                results.measure(subjects, cases, runs)
    except KeyboardInterrupt:
        if not results.runs:
            raise
        results.interrupted = True
    finally:
        line.clear()
    results.write()
    return 130 if results.interrupted else 0


def cases_of(args: argparse.Namespace) -> list[Case]:
    """The loads that the options name.

    :raises RequestError: they do not fit together.
    """
    if args.trace is not None and (args.qps or args.sweep):
        raise RequestError("--trace has its own times: use --trace-speed instead of --qps, --sweep")
    if args.sweep:
        if args.slo is None:
            raise RequestError("--sweep needs an --slo, such as --slo ttft=0.5,itl=0.05")
        if args.qps or args.rounds > 1:
            raise RequestError("--sweep chooses the rates: leave out --qps and --rounds")
    if args.seconds is not None and args.num_requests is not None:
        raise RequestError("--seconds and --num-requests: give one of them")
    if args.seconds is not None and args.trace is not None:
        raise RequestError("--seconds: a trace has its own times; use --num-requests")
    limits = args.concurrency or (None,)
    if args.trace is not None:
        return [Case(concurrency=limit, trace=True) for limit in limits]
    if args.qps:
        return [Case(arrivals_of(args, rate), limit) for rate in args.qps for limit in limits]
    if not args.sweep and (args.on_off or args.burstiness != 1):
        raise RequestError("--on-off and --burstiness describe arrivals: they need --qps")
    return [Case(concurrency=limit) for limit in args.concurrency or (8,)]


def size_of(args: argparse.Namespace) -> Size:
    if args.seconds is not None or (args.sweep and args.num_requests is None):
        return Size(None, args.seconds or 20.0, args.warm_up)
    whole_trace = args.trace is not None and args.num_requests is None
    return Size(None if whole_trace else args.num_requests or 100, None, args.warm_up)
