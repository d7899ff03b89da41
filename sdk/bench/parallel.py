"""One rank with all threads compared with several ranks, stages or replicas that share them."""

from __future__ import annotations

from dataclasses import replace

from sdk.bench.engines import OURS, Engines, Load, Worker
from sdk.bench.report import Result
from sdk.bench.settings import DECODE_PROMPT, Settings, make_load, same_load

#: Tokens of the prompt whose time is measured, alone and without the cache.
PROMPT = 512


def measure_parallel(settings: Settings, engines: Engines) -> list[Result]:
    """Rows for each number of requests and of ranks: 1, 2, 4, ... up to the number of threads. The
    ranks compute each layer together (tensor parallelism), are the stages of a pipeline, or are
    replicas, each with an engine of its own."""
    requests = max(settings.requests)
    context = max(DECODE_PROMPT, PROMPT) + settings.output_len
    found: list[Result] = []
    counts = [2**i for i in range(settings.threads.bit_length())]
    ways = [{"ranks": count} for count in counts]
    ways += [{kind: count} for kind in ("stages", "replicas") for count in counts[1:]]
    with Engines() as opened:
        for way in ways:
            settings.progress("opening " + ", ".join(f"{n} {name}" for name, n in way.items()))
            opened.open(replace(settings.opening(OURS, requests, context), **way))
        prompt = make_load(opened.vocab_size, 1, PROMPT, 1, seed=PROMPT)

        def sample(engine: Worker, load: Load) -> dict[str, float]:
            seconds = engine.measure(prompt).prefill_s
            decoded = engine.measure(load)
            found = {"prefill_tok_s": PROMPT / seconds, "decode_tok_s": decoded.decode_rate}
            return found if decoded.bubble is None else found | {"bubble": 100 * decoded.bubble}

        for count in settings.requests:
            load = make_load(
                opened.vocab_size, count, DECODE_PROMPT, settings.output_len, seed=count
            )
            found += same_load(settings, opened, {"requests": count}, load, sample)
    return found
