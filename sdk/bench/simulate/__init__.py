"""Simulate replicas: real schedulers and the real router on a virtual clock, measured step costs.

Compares routing policies side by side. Nothing is loaded, except with --measure, which writes the
step costs of a model.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from sdk.api.errors import RequestError
from sdk.api.input_files import reading
from sdk.bench.serve.arrivals import Arrivals
from sdk.bench.simulate.report import as_json, as_tables
from sdk.cli.engine_arguments import add_engine_arguments, engine_options
from sdk.cli.text_file import check_writable
from sdk.cluster.replicas.routing import ROUTING_POLICIES, RoutingPolicy
from sdk.cluster.simulation.autoscaling import Autoscaling
from sdk.cluster.simulation.cluster import Failure, Scenario, Simulation, Straggler
from sdk.cluster.simulation.costs import DEFAULT_COSTS, StepCosts
from sdk.cluster.simulation.results import Results
from sdk.cluster.simulation.traces import TraceEntry, TraceWorkload, read_trace
from sdk.cluster.simulation.workload import KINDS, SyntheticWorkload, Workload, parse_mix
from sdk.metrics.slo import SLO

_T = TypeVar("_T", int, float)
_MOST_REPLICAS, _MOST_REQUESTS = 100_000, 10**8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, default=2, help="(default: 2)")
    parser.add_argument(
        "--policy",
        default="state,requests",
        help=f"one or several of {', '.join(ROUTING_POLICIES)} (default: state,requests)",
    )
    parser.add_argument(
        "--costs",
        default=str(DEFAULT_COSTS),
        metavar="FILE",
        help="step costs and engine limits (default: of SmolLM2-135M on two cores)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    _add_requests(parser.add_argument_group("requests"))
    _add_events(parser.add_argument_group("events"))
    measure = parser.add_argument_group("measuring step costs")
    measure.add_argument("--measure", metavar="FILE", help="write the step costs of --model there")
    measure.add_argument("--model", help="a .gguf file, a folder with safetensors, or a hub id")
    measure.add_argument("--max-num-seqs", type=int, help="the most concurrent requests")
    add_engine_arguments(measure)


def _add_requests(requests: argparse._ArgumentGroup) -> None:
    requests.add_argument("--rate", type=float, help="sessions that begin per second")
    requests.add_argument("--requests", type=int, default=2000, help="(default: 2000)")
    requests.add_argument(
        "--mix",
        default="chats=0.8,documents=0.05,completions=0.15",
        help=f"shares of {', '.join(KINDS)} among the sessions (default: %(default)s)",
    )
    requests.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="of arrivals: 1 is a Poisson process (default), less has bursts, as in bench serve",
    )
    requests.add_argument("--seed", type=int, default=0)
    requests.add_argument(
        "--trace", metavar="FILE", help="requests from a file: JSON lines, Mooncake's, Azure's CSV"
    )
    requests.add_argument(
        "--speed", type=float, default=1.0, help="play the trace this many times as fast"
    )
    requests.add_argument(
        "--slo", default="ttft=1,tpot=0.1", help="what counts as good (default: %(default)s)"
    )


def _add_events(events: argparse._ArgumentGroup) -> None:
    events.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="REPLICA@TIME[+SECONDS]",
        help="a replica dies at a time and is back after this many seconds",
    )
    events.add_argument(
        "--straggler",
        action="append",
        default=[],
        metavar="REPLICAxFACTOR[@TIME]",
        help="a replica takes this many times as long for its steps",
    )
    events.add_argument(
        "--autoscale",
        metavar="SPEC",
        help="such as least=2,most=8,by=queue,target=4,every=10 (by queue length or ttft)",
    )
    events.add_argument(
        "--startup", type=float, default=30.0, help="seconds until an added replica is ready"
    )


def model_arguments(args: argparse.Namespace) -> list[str]:
    """The models of the command line."""
    return [] if args.model is None else [args.model]


def run(args: argparse.Namespace) -> int:
    if args.measure is not None:
        return _measure(args)
    check_writable("--json", args.json)
    with reading("--costs", args.costs, "a file with step costs"):
        costs = StepCosts.read(args.costs)
    policies = _policies(args.policy)
    scenario = _scenario(args, costs)
    make_workload, entries = _workload(args, costs)
    found: dict[str, Results] = {}
    walls: dict[str, float] = {}
    for policy in policies:
        begin = time.perf_counter()
        simulation = Simulation(replace(scenario, policy=policy), make_workload())
        found[policy] = simulation.run(_progress(policy))
        walls[policy] = time.perf_counter() - begin
    if entries:
        left_out = TraceWorkload(entries, costs.max_model_len).num_left_out
        if left_out:
            print(
                f"embedlm: {left_out} requests of {args.trace} are longer than the context "
                f"({costs.max_model_len} tokens) and were left out",
                file=sys.stderr,
            )
    print(as_tables(found))
    if args.json is not None:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(as_json(found, walls, vars(args)))
    return 0


def _measure(args: argparse.Namespace) -> int:
    from sdk.cluster.simulation.measure import measure_costs

    if args.model is None:
        raise RequestError("--measure: expected --model too: the model to measure")
    check_writable("--measure", args.measure)
    options = engine_options(args, "max_num_seqs")
    costs = measure_costs(args.model, lambda text: print(text, file=sys.stderr), **options)
    costs.write(args.measure)
    most = costs.max_num_batched_tokens
    rate = most / costs.seconds(0, 0, most, most * most / 2)
    one = 1000 * costs.of_rows(1)
    print(f"{args.measure}: {rate:.0f} prompt tokens/s, {one:.1f} ms for a token of one answer")
    return 0


def _policies(text: str) -> list[RoutingPolicy]:
    found: list[RoutingPolicy] = []
    for name in text.split(","):
        known = [policy for policy in ROUTING_POLICIES if policy == name.strip()]
        if not known:
            raise RequestError(
                f"--policy: expected some of {', '.join(ROUTING_POLICIES)}, found {name!r:.40}"
            )
        found += [one for one in known if one not in found]
    return found


def _scenario(args: argparse.Namespace, costs: StepCosts) -> Scenario:
    return Scenario(
        replicas=_within("--replicas", args.replicas, 1, _MOST_REPLICAS),
        costs=costs,
        failures=tuple(map(_failure, args.fail)),
        stragglers=tuple(map(_straggler, args.straggler)),
        autoscaling=None if args.autoscale is None else Autoscaling.parse(args.autoscale),
        startup=_within("--startup", args.startup, 0.0, 1e9),
        slo=SLO.parse(args.slo),
    )


def _workload(
    args: argparse.Namespace, costs: StepCosts
) -> tuple[Callable[[], Workload], list[TraceEntry]]:
    """What makes the workload, once for each policy, and the entries of the trace."""
    if args.trace is not None:
        speed = _within("--speed", args.speed, 1e-6, 1e6)
        with reading("--trace", args.trace, "a file with one request a line"):
            entries = read_trace(args.trace, speed)
        return lambda: TraceWorkload(entries, costs.max_model_len, args.seed), entries
    if args.rate is None:
        raise RequestError("expected --rate, the sessions that begin per second, or --trace")
    rate = _within("--rate", args.rate, 1e-6, 1e6)
    arrivals = Arrivals(rate, _within("--burstiness", args.burstiness, 1e-3, math.inf))
    count = _within("--requests", args.requests, 1, _MOST_REQUESTS)
    mix, times = parse_mix(args.mix), arrivals.times(count, args.seed)
    return lambda: SyntheticWorkload(mix, times, count, args.seed, costs.max_model_len), []


def _within(name: str, value: _T, least: _T, most: _T) -> _T:
    if not least <= value <= most:
        raise RequestError(f"{name}: expected {least:g} to {most:g}, found {value:g}")
    return value


def _failure(text: str) -> Failure:
    found = re.fullmatch(r"(\d{1,9})@([\d.]+)(?:\+([\d.]+))?", text)
    if found is None:
        raise RequestError(f"--fail: expected REPLICA@TIME[+SECONDS], found {text!r:.40}")
    seconds = math.inf if found[3] is None else _seconds("--fail", found[3])
    return Failure(int(found[1]), _seconds("--fail", found[2]), seconds)


def _straggler(text: str) -> Straggler:
    found = re.fullmatch(r"(\d{1,9})x([\d.]+)(?:@([\d.]+))?", text)
    if found is None:
        raise RequestError(f"--straggler: expected REPLICAxFACTOR[@TIME], found {text!r:.40}")
    factor = _seconds("--straggler", found[2])
    return Straggler(int(found[1]), factor, _seconds("--straggler", found[3] or "0"))


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{name}: expected a number, found {text!r:.40}") from None


def _progress(policy: str) -> Callable[[int], None] | None:
    """Tells the number of ended requests where a person reads it."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    return lambda ended: print(f"\r{policy}: {ended} requests", end="\r", file=sys.stderr)
