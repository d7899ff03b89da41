"""Whole models: one request relative to the bandwidth, many relative to transformers, idle time."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sdk.api.config import EngineConfig
from sdk.api.errors import SdkError
from sdk.api.params import SamplingParams
from sdk.bench.gpu.card import Card
from sdk.bench.gpu.models import RandomCheckpoint, llama_config, qwen3_config
from sdk.bench.gpu.rows import Finding, ratio, share
from sdk.engine.engine import Engine
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.kernels.sized_graphs import token_buckets
from sdk.loading.load import Loaded, load

#: One request: tokens of its prompt, decoded before, and decoded while its speed is measured.
_PROMPT, _FIRST, _TIMED = 256, 16, 64
#: The load of many requests: their number, and the range of their lengths, in and out.
_REQUESTS, _SHORTEST, _LONGEST = 256, 100, 1024
#: Kernels of a step that are told, the longest first.
_KERNELS = 12
_PEER = Path(__file__).with_name("peer.py")
#: KV cache of an engine that is only rehearsed, next to ten others on the card.
_REHEARSED_KV = "4GiB"


@contextmanager
def opened(card: Card, config: dict[str, Any], kind: str, **options: Any) -> Iterator[Loaded]:
    """An engine on random weights, closed at the end."""
    settings: dict[str, Any] = {
        "device": "auto" if card.tiny else "cuda",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": 2 * _LONGEST,
        **options,
    }
    if card.rehearsing:
        settings["kv_cache_memory_bytes"] = _REHEARSED_KV
    checkpoint = RandomCheckpoint(card, config, kind)
    loaded = load(EngineConfig(model="random-weights", **settings), checkpoint)
    try:
        yield loaded
    finally:
        loaded.engine.close()


def add(engine: Engine, name: str, vocabulary: int, prompt: int, output: int) -> None:
    """A request of random tokens, greedy, that ends after ``output`` of them."""
    draw = random.Random(name)
    ids = [draw.randrange(vocabulary) for _ in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    engine.add(Job(SequenceSpec(name, params), tuple(ids)))


def finish(engine: Engine) -> int:
    """Run until nothing is left; returns the tokens generated. :raises SdkError: one failed."""
    tokens = 0
    while engine.has_unfinished:
        for output in engine.step():
            if output.finished:
                answer: Any = output.outputs[0]  # type: ignore[union-attr]
                if answer.finish_reason != "length":
                    raise SdkError(f"a request ended with {answer.finish_reason}")
                tokens += len(answer.token_ids)
    return tokens


def warm(card: Card, loaded: Loaded, requests: int) -> None:
    """Run a step of every size once, so that no graph is captured during a timing.

    First come prompts of each bucket of tokens, then ``requests`` concurrent requests that end one
    after the other.
    """
    engine, vocabulary = loaded.engine, loaded.facts.model_config.vocab_size
    most = loaded.runner.strategy.most_tokens_in_pieces
    for tokens in token_buckets(most) if most else ():
        add(engine, f"prompt of {tokens}", vocabulary, tokens, 2)
        finish(engine)
    for i in range(requests):
        add(engine, f"first {i}", vocabulary, card.size(64, 2), 2 + i)
    finish(engine)


def _decoding(card: Card, loaded: Loaded) -> int:
    """Start one request and decode its first tokens; returns the length of its context."""
    prompt, first = card.size(_PROMPT, 5), card.size(_FIRST, 2)
    add(loaded.engine, "decoding", loaded.facts.model_config.vocab_size, prompt, _LONGEST)
    while loaded.engine.step() == []:
        pass
    for _ in range(first):
        loaded.engine.step()
    return prompt + first + 1


def _seconds_of_step(card: Card, loaded: Loaded) -> tuple[float, float]:
    """Seconds of a decode step of one request, and the average length of its context."""
    context = _decoding(card, loaded)
    steps = card.size(_TIMED, 2)
    begin = time.perf_counter()
    for _ in range(steps):
        loaded.engine.step()
    return (time.perf_counter() - begin) / steps, context + steps / 2


def _one_request(
    card: Card, what: str, config: dict[str, Any], kind: str, target: tuple[float, float]
) -> Iterator[Finding]:
    """Tokens per second times the bytes of weights and pages that a token reads."""
    with opened(card, config, kind, max_num_seqs=1) as loaded:
        seconds, context = _seconds_of_step(card, loaded)
        weights = sum(linear.weight.nbytes for _, linear in loaded.runner.model.linears())
        spec = loaded.runner.kv.spec
        pages = context * spec.page_bytes / spec.page_size
        numbers = {"tokens_per_s": 1 / seconds, "bytes_per_token": weights + pages}
        speed = (weights + pages) / seconds / card.copy
        yield share(f"one request, {what}", "copy bandwidth", speed, target, **numbers)


def measure_small(card: Card) -> Iterator[Finding]:
    what = "Qwen3-0.6B shapes bf16"
    yield from _one_request(card, what, qwen3_config(card), "bfloat16", (25, 45))


def measure_8b_w4(card: Card) -> Iterator[Finding]:
    yield from _one_request(card, "8B shapes W4", llama_config(card), "int4g128", (37, 55))


def measure_8b_bf16(card: Card) -> Iterator[Finding]:
    yield from _one_request(card, "8B shapes bf16", llama_config(card), "bfloat16", (65, 80))


def measure_dependent_launch(card: Card) -> Iterator[Finding]:
    """One request with programmatic dependent launch, relative to one without.

    A graph keeps what it was recorded with, so these are two engines.
    """
    from sdk.kernels.gpu.launch import dependent_launch

    found = {}
    for wanted in (False, True):
        with (
            dependent_launch(wanted),
            opened(card, qwen3_config(card), "bfloat16", max_num_seqs=1) as loaded,
        ):
            found[wanted], _ = _seconds_of_step(card, loaded)
    numbers = {"us": found[True] * 1e6, "without_us": found[False] * 1e6}
    what = "one request, Qwen3-0.6B shapes bf16"
    yield ratio(what, "no dependent launch", found[False] / found[True], None, **numbers)


def measure_step(card: Card) -> Iterator[Finding]:
    """Where the time of a decode step of the 8B model goes: a profile of some steps, by kernel.

    A kernel's share is of the time between the steps' beginnings, so that what no share covers are
    gaps; kernels that overlap count twice.
    """
    steps = card.size(8, 1)
    events = _profiled(card, llama_config(card), "int4g128", steps)
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in events]
    if not spans:
        raise SdkError("the profiler recorded nothing on the device")
    whole = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    shares: dict[str, list[float]] = {}
    for name, start, end in spans:
        shares.setdefault(name[:60], []).append(end - start)
    what, largest = "decode step, 8B shapes W4", sorted(shares, key=lambda name: -sum(shares[name]))
    for name in largest[:_KERNELS]:
        us, count = sum(shares[name]) / steps, len(shares[name]) / steps
        numbers = {f"us of {name}": us, f"launches of {name}": count}
        yield share(what, name, us * steps / max(whole, 1e-9), None, **numbers)
    gaps = idle_share([(start, end) for _, start, end in spans])
    launches, us = len(spans) / steps, whole / steps
    numbers = {"launches of a step": launches, "us of a step": us}
    yield Finding(what, "gaps", 100 * gaps, "%", numbers=numbers)


def _profiled(card: Card, config: dict[str, Any], kind: str, steps: int) -> list[Any]:
    """What ran on the device during some decode steps of one request."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CPU if card.tiny else ProfilerActivity.CUDA
    with opened(card, config, kind, max_num_seqs=1) as loaded:
        _decoding(card, loaded)
        with profile(activities=[activity]) as seen:
            for _ in range(steps):
                loaded.engine.step()
            card.synchronize()
    return [e for e in seen.events() if e.device_type.name == activity.name]


def measure_idle(card: Card) -> Iterator[Finding]:
    """The share of time that passes between the decode steps of one request.

    Kernels of one launch belong to one step, so gaps inside a replayed graph do not count.
    """
    events = _profiled(card, qwen3_config(card), "bfloat16", card.size(24, 1))
    spans = spans_of_launches(
        (event.id, event.time_range.start, event.time_range.end) for event in events
    )
    what = "GPU idle between decode steps, Qwen3-0.6B shapes"
    yield Finding(what, "profiler", 100 * idle_share(spans), "%", 10, 3, least=True)


def spans_of_launches(events: Iterable[tuple[int, float, float]]) -> list[tuple[float, float]]:
    """The time from the beginning of each launch's first kernel to the end of its last.

    The profiler gives all kernels of a replayed graph the number of its launch.
    """
    spans: dict[int, tuple[float, float]] = {}
    for launch, start, end in events:
        first, last = spans.get(launch, (start, end))
        spans[launch] = min(first, start), max(last, end)
    return list(spans.values())


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the first beginning to the last end that no span covers.

    :raises SdkError: there are no spans.
    """
    if not spans:
        raise SdkError("the profiler recorded nothing on the device")
    begin = reached = min(start for start, _ in spans)
    busy = 0.0
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - busy / (reached - begin) if reached > begin else 0.0


def request_lengths(card: Card) -> list[tuple[int, int]]:
    """The tokens in and out of every request, the same in each run."""
    draw = random.Random(1)
    low, high = card.size(_SHORTEST, 3), card.size(_LONGEST, 5)
    count = card.size(_REQUESTS, 2)
    return [(draw.randint(low, high), draw.randint(low, high)) for _ in range(count)]


def measure_requests(card: Card) -> Iterator[Finding]:
    """All requests concurrently, after a step of every size has run; a rehearsal ends before."""
    lengths = request_lengths(card)
    config = qwen3_config(card)
    options = {"max_num_seqs": len(lengths), "max_num_batched_tokens": card.size(8192, 16)}
    with opened(card, config, "bfloat16", **options) as loaded:
        engine, vocabulary = loaded.engine, loaded.facts.model_config.vocab_size
        warm(card, loaded, len(lengths))
        if card.rehearsing:
            return
        for i, (prompt, output) in enumerate(lengths):
            add(engine, str(i), vocabulary, prompt, output)
        begin = time.perf_counter()
        tokens = finish(engine)
        seconds = time.perf_counter() - begin
    what = f"{len(lengths)} requests, Qwen3-0.6B shapes"
    yield Finding(what, "", tokens / seconds, "tok/s", numbers={"requests_tok_s": tokens / seconds})


def _peer(card: Card, question: dict[str, Any], seconds: float) -> dict[str, float]:
    """transformers in a separate process, which is killed if it hangs."""
    question |= {"device": str(card.device), "config": qwen3_config(card)}
    done = subprocess.run(
        [sys.executable, str(_PEER)],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SdkError(f"transformers failed: {why[:200]}")
    found: dict[str, float] = json.loads(last)
    return found


def measure_generate(card: Card) -> Iterator[Finding]:
    """``generate`` with one request, and our engine with the same lengths right after it."""
    prompt, output = card.size(_PROMPT, 5), card.size(_TIMED, 3)
    found = _peer(card, {"what": "generate", "lengths": [[prompt, output]]}, 60)
    with opened(card, qwen3_config(card), "bfloat16", max_num_seqs=1) as loaded:
        seconds = 0.0
        for name in ("first", "timed"):
            add(loaded.engine, name, loaded.facts.model_config.vocab_size, prompt, output)
            begin = time.perf_counter()
            finish(loaded.engine)
            seconds = time.perf_counter() - begin
    numbers = {"tokens_per_s": output / seconds, "peer_tokens_per_s": found["tokens_per_s"]}
    speed = output / seconds / found["tokens_per_s"]
    what = "one request, Qwen3-0.6B shapes bf16"
    yield ratio(what, "transformers generate", speed, None, **numbers)


def measure_generate_batch(card: Card) -> Iterator[Finding]:
    """The load of ``measure_requests`` through transformers' own continuous batching."""
    own = card.found("requests_tok_s")
    lengths = request_lengths(card)
    theirs = _peer(card, {"what": "generate_batch", "lengths": lengths}, 140)["tokens_per_s"]
    what = f"{len(lengths)} requests, Qwen3-0.6B shapes"
    numbers = {"tokens_per_s": own, "peer_tokens_per_s": theirs}
    speed, target = own / theirs, (1.5, 4.0)
    yield ratio(what, "transformers generate_batch", speed, target, **numbers)
