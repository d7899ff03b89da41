"""The suites of the bench: what each measures, its columns and how it runs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sdk.bench.accuracy import measure_accuracy
from sdk.bench.embedding import LONGEST, SHORTEST, SINGLE, measure_embedding
from sdk.bench.engines import Engines, Load, Peer, Worker
from sdk.bench.kv import measure_kv
from sdk.bench.lora import measure_lora
from sdk.bench.memory import PROMPT, measure_memory
from sdk.bench.parallel import PROMPT as PARALLEL_PROMPT, measure_parallel
from sdk.bench.report import Metric, Result, Section
from sdk.bench.roofline import measure_gemm, measure_roofline
from sdk.bench.settings import DECODE_PROMPT, Settings, in_rounds, make_load, same_load
from sdk.bench.speculative import measure_speculative
from sdk.bench.structured import measure_structured
from sdk.bench.tenants import CHAT_PROMPT, SLOTS, WEIGHT, measure_tenants
from sdk.kernels.system import SYSTEM

#: Tokens of a prompt of the prefix suite, and how many of them the next one shares.
PREFIX_PROMPT, PREFIX_SHARED = 1100, 1000
#: The start-up suite answers a short prompt: its tokens, those of the answer, and the context.
STARTUP_PROMPT, STARTUP_ANSWER, STARTUP_CONTEXT = 16, 16, 512

PREFILL = Metric("prefill_tok_s", "prefill tok/s")
DECODE = Metric("decode_tok_s", "decode tok/s")


def decode_rate(engine: Worker, load: Load) -> dict[str, float]:
    found = engine.measure(load)
    if not found.decode_tokens:
        raise engine.error("no time at which all requests decoded: --output-len is too small")
    return {"decode_tok_s": found.decode_rate}


def measure_prefill(settings: Settings, engines: Engines) -> list[Result]:
    def sample(engine: Worker, load: Load) -> dict[str, float]:
        return {"prefill_tok_s": load.prompt_tokens / engine.measure(load).prefill_s}

    found = []
    for length in settings.prompt_lens:
        load = make_load(engines.vocab_size, 1, length, 1, seed=length)
        found += same_load(settings, engines, {"prompt": length}, load, sample)
    return found


def measure_decode(settings: Settings, engines: Engines) -> list[Result]:
    found = []
    for requests in settings.requests:
        load = make_load(
            engines.vocab_size, requests, DECODE_PROMPT, settings.output_len, seed=requests
        )
        found += same_load(settings, engines, {"requests": requests}, load, decode_rate)
    return found


def measure_phases(settings: Settings, engines: Engines) -> list[Result]:
    # Imports the engine's own modules, which parsing a command line must not.
    from sdk.bench import phases

    return phases.measure_phases(settings)


def measure_context(settings: Settings, engines: Engines) -> list[Result]:
    found = []
    for context in settings.contexts:
        load = make_load(engines.vocab_size, 1, context, settings.output_len, seed=context)
        found += same_load(settings, engines, {"context": context}, load, decode_rate)
    return found


def measure_busy(settings: Settings, engines: Engines) -> list[Result]:
    def sample(engine: Worker, load: Load) -> dict[str, float]:
        quiet = engine.measure(load).decode_rate
        with busy_core():
            busy = engine.measure(load).decode_rate
        return {"quiet_tok_s": quiet, "busy_tok_s": busy, "share": 100 * busy / quiet}

    load = make_load(engines.vocab_size, 1, DECODE_PROMPT, settings.output_len, seed=1)
    return same_load(settings, engines, {}, load, sample)


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that is always busy, on the last of this process's CPUs."""
    busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        SYSTEM.pin(busy.pid, frozenset({max(SYSTEM.cpus())}))
        yield
    finally:
        busy.kill()
        busy.wait()


def measure_prefix(settings: Settings, engines: Engines) -> list[Result]:
    """Uses new prompts in every round: the cache would already hold those of an earlier round."""
    peers = settings.engines(without=["transformers", "mistral.rs"])
    with settings.opened(peers, 1, PREFIX_PROMPT + 20, prefix=True) as caching:
        vocab_size = caching.vocab_size

        def sample(engine: Worker, number: int) -> dict[str, float]:
            first, other = make_load(vocab_size, 2, PREFIX_PROMPT, 1, seed=number).prompts
            again = first[:PREFIX_SHARED] + other[PREFIX_SHARED:]
            cold = engine.measure(Load((first,), 1)).prefill_s
            hit = engine.measure(Load((again,), 1)).prefill_s
            return {"cold_ms": 1000 * cold, "hit_ms": 1000 * hit, "gain": cold / hit}

        for engine in [*caching.opened]:
            with caching.sparing("prefix"):
                sample(engine, settings.rounds)
        return in_rounds(settings, caching, {}, sample)


def measure_startup(settings: Settings, engines: Engines) -> list[Result]:
    """A fresh process each time; the first of each engine only warms the page cache."""
    results: dict[str, Result] = {}
    peers = settings.engines()
    for number in range(-1, settings.rounds):
        for peer in peers[:: 1 if number % 2 == 0 else -1]:
            with Engines(settings.failures) as one:
                with one.sparing("start-up"):
                    worker, times = _start_up(settings, peer, one)
                if not one.opened:
                    peers.remove(peer)
                elif number >= 0:
                    result = Result(peer.engine, worker.name, worker.kv, {})
                    results.setdefault(peer.engine, result).add(**times)
        settings.progress(f"start-up: round {number + 1} of {settings.rounds}")
    return [results[peer.engine] for peer in peers]


def _start_up(settings: Settings, peer: Peer, one: Engines) -> tuple[Worker, dict[str, float]]:
    start = time.perf_counter()
    worker = one.open(settings.opening(peer.engine, 1, STARTUP_CONTEXT), peer.python)
    opened = time.perf_counter() - start
    load = make_load(worker.vocab_size, 1, STARTUP_PROMPT, STARTUP_ANSWER, seed=1)
    times = worker.measure(load)
    return worker, {
        "open_s": worker.open_s + times.prefill_s,
        "process_s": opened + times.prefill_s,
        "answer_s": opened + times.prefill_s + times.decode_s,
        "peak_mib": worker.peak_bytes() / 2**20,
    }


@dataclass(frozen=True, slots=True)
class Suite:
    """``size``: the number of concurrent requests, and the tokens of each, that engines open for.

    Suites without a size open their own engines; others with the same ``group`` share theirs.
    """

    title: str
    note: str
    metrics: Sequence[Metric]
    measure: Callable[[Settings, Engines], list[Result]]
    size: Callable[[Settings], tuple[int, int]] | None = None
    group: str = "own"


SUITES = {
    "prefill": Suite(
        "Prefill",
        "one prompt of random tokens until its first token",
        [PREFILL],
        measure_prefill,
        lambda settings: (1, max(settings.prompt_lens) + 8),
        "speed",
    ),
    "decode": Suite(
        "Decode",
        f"all requests together, each after {DECODE_PROMPT} tokens, end-of-text ignored",
        [DECODE],
        measure_decode,
        lambda settings: (max(settings.requests), DECODE_PROMPT + settings.output_len),
        "speed",
    ),
    "busy": Suite(
        "Busy host",
        "one request, alone and next to a process that keeps one of the CPUs busy",
        [
            Metric("quiet_tok_s", "quiet tok/s"),
            Metric("busy_tok_s", "busy tok/s"),
            Metric("share", "% kept", ratio=False),
        ],
        measure_busy,
        lambda settings: (1, DECODE_PROMPT + settings.output_len),
        "speed",
    ),
    "roofline": Suite(
        "Roofline, decode",
        "one request, compared with the time it takes to read the weights once from memory",
        [
            DECODE,
            Metric("limit_tok_s", "limit tok/s", ratio=False),
            Metric("share", "% of limit", ratio=False),
        ],
        measure_roofline,
        lambda settings: (1, DECODE_PROMPT + settings.output_len),
        "speed",
    ),
    "phases": Suite(
        "Phases of a step",
        "where the time goes: microseconds per step, or for the whole prompt, as the mean of all "
        "threads; what the phase's bytes take at the read bandwidth, and its multiplications at "
        "the integer peak of their codes; the larger of the two as a share of the time",
        [
            Metric("us", "us", 0, ratio=False),
            Metric("share", "% of step", ratio=False),
            Metric("memory_us", "memory us", 0, ratio=False),
            Metric("integer_us", "integer us", 0, ratio=False),
            Metric("limit", "% of limit", ratio=False),
        ],
        measure_phases,
    ),
    "context": Suite(
        "Context",
        "one request decodes after a prompt of that many tokens",
        [DECODE],
        measure_context,
        lambda settings: (1, max(settings.contexts) + settings.output_len),
        "context",
    ),
    "kv": Suite(
        "Types of keys and values",
        "one request decodes after the longest --context with each type; the median of a round's "
        "speed relative to float16, and the size of a page",
        [
            DECODE,
            Metric("speed", "speed / float16", 2, ratio=False),
            Metric("page_bytes", "bytes/page", 0, ratio=False),
            Metric("pages", "pages/GiB", 0, ratio=False),
        ],
        measure_kv,
    ),
    "gemm": Suite(
        "Roofline, matrix product",
        "[512, 2048] by a 4-bit [8192, 2048] in groups of 32, compared with the integer peak of "
        "codes of 4 bits",
        [
            Metric("tops", "TOPS", 3, ratio=False),
            Metric("peak_tops", "peak TOPS", 3, ratio=False),
            Metric("share", "% of peak", ratio=False),
        ],
        measure_gemm,
    ),
    "prefix": Suite(
        "Prefix hit",
        f"time to first token of {PREFIX_PROMPT} tokens, and again when {PREFIX_SHARED} are cached",
        [
            Metric("cold_ms", "cold ms"),
            Metric("hit_ms", "hit ms"),
            Metric("gain", "cold / hit", ratio=False),
        ],
        measure_prefix,
    ),
    "memory": Suite(
        "Keys and values kept",
        f"time to first token of {PROMPT} tokens, computed and with the prefix from the cache, the "
        "swap space or a snapshot file; a page under a kv_policy computed, and recoded",
        [
            Metric("compute_ms", "compute ms"),
            Metric("again_ms", "again ms"),
            Metric("gain", "compute / again", ratio=False),
        ],
        measure_memory,
    ),
    "parallel": Suite(
        "Ranks",
        "one rank with all threads, and several ranks, stages or replicas that divide them: a "
        f"prompt of {PARALLEL_PROMPT} tokens, and requests that decode after {DECODE_PROMPT}; "
        "bubble: the share of the time in which a stage does not compute",
        [PREFILL, DECODE, Metric("bubble", "% bubble", ratio=False)],
        measure_parallel,
    ),
    "speculative": Suite(
        "Speculative decoding",
        "drafts found in the prompt (ngram) compared with plain decoding, on the same engine "
        "settings in turn; work that copies, and sampled prose that does not; answers are equal",
        [
            Metric("plain_tok_s", "plain tok/s", ratio=False),
            Metric("draft_tok_s", "ngram tok/s", ratio=False),
            Metric("gain", "ngram / plain", 2, ratio=False),
            Metric("accepted", "% accepted", ratio=False),
        ],
        measure_speculative,
    ),
    "structured": Suite(
        "Structured output",
        "answers that follow a schema or a pattern compared with free ones, on the same engine in "
        "turn, and with drafts of forced tokens; while all requests run",
        [
            Metric("free_tok_s", "free tok/s", ratio=False),
            Metric("structured_tok_s", "structured tok/s", ratio=False),
            Metric("share", "structured / free", 3, ratio=False),
            Metric("gain", "drafted / structured", 2, ratio=False),
        ],
        measure_structured,
    ),
    "tenants": Suite(
        "Tenants",
        f"time to first token of {CHAT_PROMPT} tokens, of chats one after another: alone, and with "
        f"{SLOTS} slots beside a batch that always waits (weights {WEIGHT}:1); the share of tokens "
        "of two tenants that always wait",
        [
            Metric("ttft_p50_ms", "first token p50 ms", ratio=False),
            Metric("ttft_p99_ms", "p99 ms", ratio=False),
            Metric("chat_share", "% of tokens", ratio=False),
        ],
        measure_tenants,
    ),
    "lora": Suite(
        "LoRA adapters",
        "decoding of requests without an adapter beside loaded ones, with one adapter, and with "
        "one each, compared with the same engine without adapters, in turn; while all requests run",
        [
            Metric("plain_tok_s", "plain tok/s"),
            Metric("lora_tok_s", "LoRA tok/s"),
            Metric("share", "LoRA / plain", 3, ratio=False),
        ],
        measure_lora,
    ),
    "embed": Suite(
        "Embeddings",
        f"texts of {SHORTEST} to {LONGEST} words, all in one call, and {SINGLE} texts one at a "
        "time, with tokenizing; the smallest cosine with sentence-transformers' vectors",
        [
            Metric("texts_s", "texts/s"),
            Metric("cosine", "cosine", 6, ratio=False),
        ],
        measure_embedding,
    ),
    "startup": Suite(
        "Start-up",
        f"new process, file in the page cache, {STARTUP_PROMPT} tokens of prompt: from the "
        "constructor to the first token, the whole process with Python's imports to the first "
        f"token and to {STARTUP_ANSWER} tokens, and its largest resident memory",
        [
            Metric("open_s", "open to first token s", 3),
            Metric("process_s", "process to first token s", 3),
            Metric("answer_s", f"to {STARTUP_ANSWER} tokens s", 3),
            Metric("peak_mib", "peak MiB", 0),
        ],
        measure_startup,
    ),
    "accuracy": Suite(
        "Accuracy",
        "logits of 256 tokens of English, compared with exact arithmetic on the same weights: "
        "relative error of the centered logits, mean KL divergence",
        [Metric("error", "error %", 2), Metric("kl", "KL", 5)],
        measure_accuracy,
    ),
}


def measure(settings: Settings, names: Sequence[str]) -> list[tuple[str, Section]]:
    """Run the suites ``names``; their results in the same order."""
    found: dict[str, list[Result]] = {}
    for group in dict.fromkeys(SUITES[name].group for name in names):
        suites = {name: SUITES[name] for name in names if SUITES[name].group == group}
        sizes = [suite.size(settings) for suite in suites.values() if suite.size is not None]
        requests, context = map(max, zip(*sizes, strict=True)) if sizes else (0, 0)
        with settings.opened(settings.engines() if sizes else [], requests, context) as engines:
            for name, suite in suites.items():
                settings.progress(suite.title)
                found[name] = suite.measure(settings, engines)
    return [
        (name, Section(suite.title, suite.note, suite.metrics, found[name]))
        for name, suite in SUITES.items()
        if name in found
    ]
