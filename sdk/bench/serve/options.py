"""Options that describe a load, shared by ``embedlm bench serve`` and ``embedlm tune serve``."""

from __future__ import annotations

import argparse
import json
import math
import re
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.input_files import reading
from sdk.bench.serve.arrivals import Arrivals
from sdk.bench.serve.lengths import parse_lengths
from sdk.bench.serve.slo import parse_slo
from sdk.bench.serve.texts import SOURCES
from sdk.bench.serve.trace import read_trace
from sdk.bench.serve.workload import Session, Workload


def parse_positive(text: str) -> float:
    """A positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a positive number, found {text!r}")
    return value


def parse_shape(text: str) -> float:
    """A positive number, or ``inf``."""
    return math.inf if text == "inf" else parse_positive(text)


def parse_share(text: str) -> float:
    """A share such as ``0.99`` or ``99%``."""
    value = parse_positive(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if value > 1:
        raise argparse.ArgumentTypeError(f"expected a share such as 0.99 or 99%, found {text!r}")
    return value


def parse_number(low: int, high: int = 10**6) -> Any:
    """A type for argparse: an integer in ``low..high``."""

    def parse(text: str) -> int:
        value = int(text) if re.fullmatch(r"\d{1,9}", text) else low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"expected an integer in {low}..{high}, found {text!r}"
            )
        return value

    return parse


def parse_periods(text: str) -> tuple[float, float]:
    """``"2,8"``: two positive numbers of seconds."""
    pieces = text.split(",")
    if len(pieces) != 2:
        raise argparse.ArgumentTypeError(f"expected ON,OFF in seconds, found {text!r}")
    return parse_positive(pieces[0]), parse_positive(pieces[1])


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {text!r}")
    return found


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked, how often, and when an answer is good."""
    _add_length_arguments(parser.add_argument_group("requests"))
    _add_session_arguments(parser.add_argument_group("sessions"))
    _add_arrival_arguments(parser.add_argument_group("arrivals"))
    parser.add_argument(
        "--slo",
        type=parse_slo,
        metavar="NAME=TIME[,...]",
        help="what makes a request good: upper bounds in seconds (or ms) for ttft, itl (95th "
        "percentile of a request's gaps), tpot or e2e, such as ttft=0.5,itl=50ms",
    )
    parser.add_argument("--seed", type=parse_number(0), default=0, help="of all random choices")


def _add_length_arguments(asked: argparse._ArgumentGroup) -> None:
    asked.add_argument(
        "--input-len",
        type=parse_lengths,
        default="128",
        metavar="LENGTHS",
        help="tokens of a prompt: N, LOW-HIGH, normal:MEAN:SD, lognormal:MEDIAN:SIGMA or exp:MEAN "
        "(default: 128)",
    )
    asked.add_argument(
        "--output-len",
        type=parse_lengths,
        default="64",
        metavar="LENGTHS",
        help="tokens of an answer, in the same forms (default: 64)",
    )
    asked.add_argument(
        "--source",
        choices=SOURCES,
        default="words",
        help="what prompts are made of: random words of one token each, or English prose, whose "
        "length is an estimate (default: words)",
    )


def _add_session_arguments(asked: argparse._ArgumentGroup) -> None:
    asked.add_argument(
        "--prefix-len",
        type=parse_number(0),
        default=0,
        metavar="N",
        help="tokens of a system prompt before the prompt (default: 0)",
    )
    asked.add_argument(
        "--prefixes",
        type=parse_number(1),
        default=1,
        metavar="N",
        help="how many different system prompts there are (default: 1)",
    )
    asked.add_argument(
        "--prefix-share",
        type=parse_share,
        default=1.0,
        metavar="SHARE",
        help="share of requests with a system prompt (default: 1)",
    )
    asked.add_argument(
        "--turns",
        type=parse_number(1, 1000),
        default=1,
        metavar="N",
        help="questions of a conversation; each contains all before it and their answers "
        "(default: 1)",
    )
    asked.add_argument(
        "--think",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="between an answer and the next question of a conversation (default: 0)",
    )
    asked.add_argument(
        "--chat", action="store_true", help="send conversations instead of plain text"
    )
    asked.add_argument("--trace", metavar="FILE", help="requests of a file, one JSON object a line")
    asked.add_argument(
        "--trace-speed",
        type=parse_positive,
        default=1.0,
        metavar="FACTOR",
        help="play a trace this many times as fast (default: 1)",
    )


def _add_arrival_arguments(rate: argparse._ArgumentGroup) -> None:
    rate.add_argument(
        "--burstiness",
        type=parse_shape,
        default=1.0,
        metavar="SHAPE",
        help="of gamma distributed times between arrivals: 1 is a Poisson process, less has "
        "bursts, inf is a constant rate (default: 1)",
    )
    rate.add_argument(
        "--on-off",
        type=parse_periods,
        metavar="ON,OFF",
        help="requests arrive for ON seconds, then none for OFF seconds; --qps is the mean",
    )


def workload_of(args: argparse.Namespace) -> Workload:
    """:raises RequestError: the trace cannot be read, or options do not fit together."""
    if not 0 <= args.think < 1e6:
        raise RequestError(f"--think: expected seconds, at least 0, found {args.think}")
    trace: tuple[Session, ...] = ()
    if args.trace is not None:
        if args.turns > 1 or args.prefix_len:
            raise RequestError(
                "--trace: a trace has its own prompts; leave out --turns and --prefix-len"
            )
        with reading("--trace", args.trace, "a file with one JSON object a line"):
            trace = read_trace(args.trace, args.trace_speed, args.output_len, chat=args.chat)
    return Workload(
        input_len=args.input_len,
        output_len=args.output_len,
        source=args.source,
        prefix_len=args.prefix_len,
        prefixes=args.prefixes,
        prefix_share=args.prefix_share,
        turns=args.turns,
        think_s=args.think,
        seed=args.seed,
        trace=trace,
    )


def arrivals_of(args: argparse.Namespace, rate: float) -> Arrivals:
    """The arrival process with ``rate`` sessions per second."""
    on_s, off_s = args.on_off or (0.0, 0.0)
    return Arrivals(rate, args.burstiness, on_s, off_s)
