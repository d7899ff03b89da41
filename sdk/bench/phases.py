"""Where the time of a step goes, and what each part of it would take at the machine's limits.

Every thread's time in every operator of the recorded step is measured (native/operator_times.hpp).
What a phase needs at least is the larger of two times: that of its bytes at the read bandwidth, and
that of its multiplications at the integer peak for codes of their bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sdk import __version__
from sdk.api.errors import RequestError
from sdk.bench.engines import OURS, Load
from sdk.bench.peers.embedlm import steps
from sdk.bench.peers.timing import Timing
from sdk.bench.report import Result
from sdk.bench.settings import DECODE_PROMPT, Settings, make_load
from sdk.engine.rank.recorded import Recorded
from sdk.kernels.cpu.library import Count, OpKind
from sdk.kernels.cpu.operator_times import OperatorTime, ProgramTimes, weight_bytes
from sdk.kernels.cpu.runtime import Program

if TYPE_CHECKING:
    from sdk.llm import LLM

PRODUCTS, HEAD, ATTENTION, QUANTIZE = "products", "head", "attention", "quantize"
RECURRENCE = "recurrence"
_NAMES = {
    OpKind.ATTENTION: ATTENTION,
    OpKind.DELTA: RECURRENCE,
    OpKind.SPACE: RECURRENCE,
    OpKind.CONV: "convolution",
    OpKind.ROUTE: "routing",
    OpKind.GROUP: "routing",
    OpKind.COMBINE: "routing",
    OpKind.NORM: "norms",
    OpKind.ACTIVATION: "activation",
    OpKind.ROPE: "rope, KV writes",
    OpKind.ANGLES: "rope, KV writes",
    OpKind.RECODE: "rope, KV writes",
    OpKind.SAMPLE: "sampling",
}
_MULTIPLY = (OpKind.LINEAR, OpKind.EXPERTS, OpKind.HEADS)


@dataclass(slots=True)
class Phase:
    """Seconds of all threads together; bytes that are read from memory; integer operations by the
    bits of the codes."""

    seconds: float = 0.0
    nbytes: float = 0.0
    operations: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Rows:
    """What all runs of a program processed: runs, tokens, output rows, tokens that attentions read
    the keys and values of, and recurrent states that were read and written."""

    runs: int
    tokens: int
    outputs: int
    attended: float
    states: int


def phases_of(
    times: ProgramTimes, rows: Rows, kv_bytes: float, state_bytes: int
) -> dict[str, Phase]:
    """The phases of some runs. ``kv_bytes``: of the keys and values of a token; ``state_bytes``: of
    the recurrent states of a request."""
    found: dict[str, Phase] = {}
    for operator in times.operators:
        if operator.kind in _MULTIPLY:
            found.setdefault(QUANTIZE, Phase()).seconds += operator.rows
            head = operator.over is Count.OUTPUTS
            phase = found.setdefault(HEAD if head else PRODUCTS, Phase())
            _add_product(phase, operator, rows, rows.outputs if head else rows.tokens)
        else:
            phase = found.setdefault(_NAMES.get(operator.kind, "other"), Phase())
            phase.seconds += operator.rows + operator.tiles
    if ATTENTION in found:
        found[ATTENTION].nbytes = rows.attended * kv_bytes
    if RECURRENCE in found:
        found[RECURRENCE].nbytes = 2.0 * rows.states * state_bytes
    return found


def _add_product(phase: Phase, operator: OperatorTime, rows: Rows, multiplied: int) -> None:
    phase.seconds += operator.tiles
    if operator.weight is not None:
        w = operator.weight
        used = _used(operator, multiplied / rows.runs)
        phase.nbytes += rows.runs * used * weight_bytes(w)
        if not w.dense:  # the entries of a table have 8 bits
            operations = 2 * multiplied * operator.per * w.n * w.k
            phase.operations[8 if w.table else w.bits] += operations


def _used(operator: OperatorTime, tokens: float) -> float:
    """How many of a product's weights a run with that many tokens reads: of experts those that are
    expected if every token chooses at random."""
    left: float = (1 - operator.per / operator.parts) ** tokens
    return operator.parts * (1 - left)


def measure_phases(settings: Settings) -> list[Result]:
    """Each prompt length, and each number of requests that decode; in this process.

    :raises RequestError: the steps of this model are not recorded.
    """
    from sdk.llm import LLM

    requests, context = max(settings.requests), max(settings.prompt_lens)
    with closing(
        LLM(
            settings.model,
            device="cpu",
            num_threads=settings.threads,
            max_num_seqs=2 * requests,
            max_model_len=max(context, DECODE_PROMPT) + settings.output_len + 8,
            enable_prefix_caching=False,
            kv_cache_dtype=settings.kv,
        )
    ) as llm:
        vocab_size = llm.model_config.vocab_size
        loads = {
            f"prompt of {n}": make_load(vocab_size, 1, n, 1, seed=n) for n in settings.prompt_lens
        }
        for n in settings.requests:
            load = make_load(vocab_size, n, DECODE_PROMPT, settings.output_len, seed=n)
            loads[f"{n} requests"] = load
        found: list[Result] = []
        for name, load in loads.items():
            for _ in steps(llm, load.prompts, 2, Timing(len(load.prompts))):
                pass  # warms up
            results: dict[str, Result] = {}
            for number in range(settings.rounds):
                for phase, values in _sample(settings, llm, load).items():
                    case = {"load": name, "phase": phase}
                    kv = str(llm.memory_plan.kv_dtype)
                    result = Result(OURS, f"{OURS} {__version__}", kv, case)
                    results.setdefault(phase, result).add(**values)
                settings.progress(f"{name}: round {number + 1} of {settings.rounds}")
            found += results.values()
    return found


def _timed(llm: LLM, load: Load) -> tuple[ProgramTimes, ProgramTimes, dict[str, float]]:
    """Operators until all requests have their first token, and then until the first one ends; and
    what ``Timing.times`` returns."""
    program = _program(llm)
    prompt = decoding = None
    timing = Timing(len(load.prompts))
    program.time_operators(True)
    for _ in steps(llm, load.prompts, load.output_len, timing):
        if timing.ended and decoding is None:
            decoding = program.times()
        if timing.decoding and prompt is None:
            prompt = program.times()
            program.time_operators(True)
    program.time_operators(False)
    assert prompt is not None and decoding is not None
    return prompt, decoding, timing.times()


def _sample(settings: Settings, llm: LLM, load: Load) -> Mapping[str, Mapping[str, float]]:
    """By phase, microseconds of a step, or of the whole prompt, and shares."""
    from sdk.kernels.cpu import simd_level
    from sdk.kernels.cpu.probe import int8_peak, read_bandwidth

    prompt, times, sample = _timed(llm, load)
    plan, count = llm.memory_plan, len(load.prompts)
    kv_bytes = plan.page_bytes / plan.page_size
    if load.output_len > 1:
        if not sample["decode_tokens"]:
            raise RequestError(
                f"phases: no time at which all {count} requests decoded: --output-len is "
                f"{load.output_len}, which is too small"
            )
        seconds, runs = sample["decode_s"], times.runs
        context = len(load.prompts[0]) + load.output_len / 2
        windows = [min(context, w or context) for w in llm.model_config.sliding_windows]
        attended = runs * count * sum(windows) / len(windows)
        rows = Rows(runs, runs * count, runs * count, attended, runs * count)
    else:  # a chunk of a prompt reads the keys of the chunks before it: few bytes, many operations
        times, seconds, runs = prompt, sample["prefill_s"], 1
        rows = Rows(times.runs, load.prompt_tokens, count, 0.0, times.runs)
    bandwidth = read_bandwidth(settings.threads, seconds=0.2, tries=1)
    found: dict[str, dict[str, float]] = {}
    phases = phases_of(times, rows, kv_bytes, plan.states.slot_bytes if plan.states else 0)
    busy = sum(phase.seconds for phase in phases.values())
    phases["waiting"] = Phase(settings.threads * times.seconds - busy)
    phases["Python"] = Phase(settings.threads * (seconds - times.seconds))
    phases["all"] = Phase(
        settings.threads * seconds,
        sum(phase.nbytes for phase in phases.values()),
        sum((phase.operations for phase in phases.values()), Counter()),
    )
    level = simd_level() or "portable"
    peaks = {
        bits: int8_peak(settings.threads, level, seconds=0.03, bits=bits)
        for bits in phases["all"].operations
    }
    for name, phase in phases.items():
        taken = phase.seconds / settings.threads
        found[name] = {"us": 1e6 * taken / runs, "share": 100 * taken / seconds}
        if phase.nbytes or phase.operations:
            memory = phase.nbytes / bandwidth
            arithmetic = sum(count / peaks[bits] for bits, count in phase.operations.items())
            found[name] |= {
                "memory_us": 1e6 * memory / runs,
                "integer_us": 1e6 * arithmetic / runs,
                "limit": 100 * max(memory, arithmetic) / taken,
            }
    return found


def _program(llm: LLM) -> Program:
    """The recorded step."""
    strategy = llm._runner().strategy
    if strategy.eager_reason is not None or not isinstance(strategy, Recorded):
        raise RequestError(
            f"phases: only recorded steps on a CPU are timed; this model runs otherwise: "
            f"{strategy.eager_reason or type(strategy).__name__}"
        )
    program = strategy.graph.recorded
    assert isinstance(program, Program)
    return program
