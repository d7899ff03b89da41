"""An interactive tenant beside a batch that always has requests waiting, and two such batches.

The same chats, one after another at random times, run alone and beside the batch, with
``scheduling_policy="fair"``. (In the order of arrival each would wait for the whole batch.) Time to
first token is counted from the call.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from sdk.bench.engines import OURS, Engines
from sdk.bench.report import Result
from sdk.bench.settings import Settings

if TYPE_CHECKING:
    from sdk.llm import LLM

SLOTS = 16
CHAT_PROMPT, CHAT_ANSWER = 384, 16
BATCH_PROMPT, BATCH_ANSWER = 256, 64
WEIGHT = 4
#: Chats in each round, and the mean pause between two of them.
_CHATS, _PAUSE_S = 20, 0.2
#: Requests of a batch that are queued at once: more than it can finish meanwhile.
_QUEUED = 400
#: Requests of each of two batches that share the engine. Tokens are counted from when one batch has
#: finished a tenth of them until it has finished seven tenths, so that both always wait.
_SHARED = 100


def measure_tenants(settings: Settings, engines: Engines) -> list[Result]:
    """A row for each way to run the chats, and one for the two batches."""
    from sdk import __version__
    from sdk.llm import LLM

    options: dict[str, Any] = {
        "device": "cpu",
        "num_threads": settings.threads,
        "max_num_seqs": SLOTS,
        "max_model_len": max(CHAT_PROMPT + CHAT_ANSWER, BATCH_PROMPT + BATCH_ANSWER),
        "kv_cache_dtype": settings.kv,
    }
    name = f"{OURS} {__version__}"
    ways = {
        way: Result(OURS, name, settings.kv, {"chats": way}) for way in ("alone", "beside a batch")
    }
    shares = Result(OURS, name, settings.kv, {"chats": f"two batches, {WEIGHT}:1"})
    options |= {"scheduling_policy": "fair", "tenant_weights": {"chat": WEIGHT}}
    with LLM(settings.model, **options) as llm:
        run_chats(llm, 3, seed=-1)
        for number in range(settings.rounds):
            for way in list(ways)[:: 1 if number % 2 == 0 else -1]:
                with batch_of(llm, number) if way != "alone" else nullcontext():
                    ways[way].add(**_summary(run_chats(llm, _CHATS, seed=number)))
            settings.progress(f"tenants: round {number + 1} of {settings.rounds}")
            shares.add(chat_share=share_of_tokens(llm))
    return [*ways.values(), shares]


def _summary(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    last = min(int(0.99 * len(ordered)), len(ordered) - 1)
    return {"ttft_p50_ms": 1000 * ordered[len(ordered) // 2], "ttft_p99_ms": 1000 * ordered[last]}


def run_chats(llm: LLM, count: int, seed: int) -> list[float]:
    """Seconds to the first token of each chat. The same prompts and pauses for a seed."""
    from sdk.api.params import SamplingParams

    rng, found = random.Random(seed), []
    params = SamplingParams(
        temperature=0, max_tokens=CHAT_ANSWER, ignore_eos=True, detokenize=False, tenant="chat"
    )
    for _ in range(count):
        time.sleep(rng.expovariate(1 / _PAUSE_S))
        prompt = _prompt(rng, llm, CHAT_PROMPT)
        begin = time.perf_counter()
        pieces = llm.stream(prompt, params)
        next(pieces)
        found.append(time.perf_counter() - begin)
        for _ in pieces:
            pass
    return found


def _prompt(rng: random.Random, llm: LLM, count: int) -> dict[str, list[int]]:
    vocab = llm.model_config.vocab_size
    return {"prompt_token_ids": [rng.randrange(100, vocab) for _ in range(count)]}


def _enqueue(llm: LLM, tenant: str, count: int, seed: int) -> list[str]:
    from sdk.api.params import SamplingParams

    rng = random.Random(f"{tenant} {seed}")
    params = SamplingParams(
        temperature=0, max_tokens=BATCH_ANSWER, ignore_eos=True, detokenize=False, tenant=tenant
    )
    lengths = [rng.randrange(BATCH_PROMPT // 4, BATCH_PROMPT) for _ in range(count)]
    return llm.enqueue([_prompt(rng, llm, length) for length in lengths], params)


@contextmanager
def batch_of(llm: LLM, seed: int) -> Iterator[None]:
    """A batch that runs meanwhile and is aborted in the end."""
    names = _enqueue(llm, "batch", _QUEUED, seed)
    thread = threading.Thread(target=llm.wait_for_completion)
    thread.start()
    try:
        time.sleep(1.0)  # until its slots are taken
        yield
    finally:
        llm.abort(names)
        thread.join()


def share_of_tokens(llm: LLM) -> float:
    """The percentage that goes to the tenant of the larger weight, of two that always wait."""
    names = {tenant: _enqueue(llm, tenant, _SHARED, 0) for tenant in ("chat", "batch")}
    owners = {name: tenant for tenant, mine in names.items() for name in mine}
    lengths: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    while (most := max(ended.values(), default=0)) < 0.7 * _SHARED:
        for output in llm.step():
            name, done = output.request_id, len(output.outputs[0].token_ids)
            new = done - lengths[name] + (0 if lengths[name] else len(output.prompt_token_ids))
            lengths[name] = done
            counts[owners[name]] += new if most >= 0.1 * _SHARED else 0
            ended[owners[name]] += output.finished
    llm.abort(list(owners))
    llm.wait_for_completion()
    return 100 * counts["chat"] / sum(counts.values())
