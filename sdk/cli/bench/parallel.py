"""One rank with all threads compared with several ranks that share them (tensor parallelism)."""

from __future__ import annotations

from dataclasses import replace

from sdk.cli.bench.engines import OURS, Engines, Load, Worker
from sdk.cli.bench.report import Result
from sdk.cli.bench.settings import DECODE_PROMPT, Settings, make_load, same_load

#: Tokens of the prompt whose time is measured, alone and without the cache.
PROMPT = 512


def measure_parallel(settings: Settings, engines: Engines) -> list[Result]:
    """Rows for each number of requests and of ranks: 1, 2, 4, ... up to the number of threads."""
    requests = max(settings.requests)
    context = max(DECODE_PROMPT, PROMPT) + settings.output_len
    ranks, found = 1, []
    with Engines() as opened:
        while ranks <= settings.threads:
            settings.progress(f"opening {ranks} ranks")
            opened.open(replace(settings.opening(OURS, requests, context), ranks=ranks))
            ranks *= 2
        prompt = make_load(opened.vocab_size, 1, PROMPT, 1, seed=PROMPT)

        def sample(engine: Worker, load: Load) -> dict[str, float]:
            seconds = engine.measure(prompt).prefill_s
            rate = engine.measure(load).decode_rate
            return {"prefill_tok_s": PROMPT / seconds, "decode_tok_s": rate}

        for count in settings.requests:
            load = make_load(
                opened.vocab_size, count, DECODE_PROMPT, settings.output_len, seed=count
            )
            found += same_load(settings, opened, {"requests": count}, load, sample)
    return found
