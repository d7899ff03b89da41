"""Compares keeping keys and values with computing them again.

A prompt's prefix comes from the cache, from the swap space or from a snapshot file. The time to the
first token is compared with computing the whole prompt. The time to recode a page for a lower level
of the tiered KV cache is compared with computing its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from sdk.api.errors import RequestError
from sdk.bench.engines import OURS, Engines
from sdk.bench.report import Result
from sdk.bench.settings import Settings, make_load
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.quant.spec import parse_tiers

if TYPE_CHECKING:
    from sdk.llm import LLM

#: Tokens of the prompt, if the model's context has room for them.
PROMPT = 1000
TIERS = "fp16>int8>int4"
KV_TYPES = tuple(parse_tiers(TIERS).split(">"))
#: Tokens of a first step that is not timed.
_WARM = 16


def measure_memory(settings: Settings, engines: Engines) -> list[Result]:
    """:raises RequestError: an answer did not get its prefix from the expected source."""
    kinds = KV_TYPES if settings.kv == "auto" else (settings.kv,)
    found = [result for kv in kinds for result in _prefixes(settings, kv)]
    if settings.kv == "auto":
        found += _recoding(settings)
    return found


def _name() -> str:
    from sdk import __version__

    return f"{OURS} {__version__}"


def _prefixes(settings: Settings, kv: str) -> list[Result]:
    """One row for each source of a prefix."""
    from sdk.llm import LLM

    plan = LLM.plan(settings.model, kv_cache_dtype=kv, max_num_seqs=1)
    length = min(PROMPT, plan.max_model_len - 1)
    whole = (length - 1) // plan.page_size * plan.page_size
    with (
        TemporaryDirectory() as folder,
        LLM(
            settings.model,
            device="cpu",
            num_threads=settings.threads,
            kv_cache_dtype=kv,
            max_num_seqs=1,
            max_model_len=length + 1,
            swap_space=2 * (length // plan.page_size + 1) * plan.page_bytes,
        ) as llm,
    ):
        (prompt,) = make_load(llm.model_config.vocab_size, 1, length, 1, seed=length).prompts
        file = Path(folder) / "prefix.kv"
        _first_token(llm, prompt[:_WARM], 0)
        llm.snapshot(list(prompt)).save(file)

        def restored() -> None:
            llm.reset_prefix_cache()
            begin = time.perf_counter()
            llm.restore(file)
            restoring.append(time.perf_counter() - begin)

        restoring: list[float] = []
        ways: dict[str, Callable[[], None]] = {
            "cache": lambda: None,
            "swap": llm.trim,
            "snapshot": restored,
        }
        results = {way: Result(OURS, _name(), kv, {"from": way, "tokens": whole}) for way in ways}
        for number in range(settings.rounds):
            llm.reset_prefix_cache()
            computed = _first_token(llm, prompt, 0)
            for way, prepare in ways.items():
                prepare()
                again = _first_token(llm, prompt, whole)
                if way == "snapshot":
                    again += restoring[-1]
                results[way].add(
                    compute_ms=1000 * computed, again_ms=1000 * again, gain=computed / again
                )
            settings.progress(f"prefixes, {kv}: round {number + 1} of {settings.rounds}")
    return list(results.values())


def _first_token(llm: LLM, prompt: tuple[int, ...], known: int) -> float:
    """Seconds to the first token; ``known`` tokens of the prompt must come from the cache."""
    from sdk.api.params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    if output.num_cached_tokens != known:
        raise RequestError(
            f"--suite memory: expected a prefix of {known} tokens, found {output.num_cached_tokens}"
        )
    return seconds


def _recoding(settings: Settings) -> list[Result]:
    """One row for each move to a lower tier, for one page."""
    from sdk.api.options import engine_config
    from sdk.api.params import SamplingParams
    from sdk.engine.plan import Move
    from sdk.evaluating.logits import opened
    from sdk.kernels.kv.tiers import TIER_PAGE_SIZE, page_id

    config = engine_config(
        settings.model,
        num_threads=settings.threads,
        kv_policy=TIERS,
        max_num_seqs=1,
        max_model_len=2 * TIER_PAGE_SIZE,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    # The first page of an engine is in slab 1. It is recoded into slab 0, which no request owns: as
    # int8 into the first half, as int4 into the third quarter. This can be repeated.
    steps = {
        "fp16>int8": Move(page_id(0, 1), page_id(1, 0)),
        "int8>int4": Move(page_id(1, 0), page_id(2, 2)),
    }
    case = {"tokens": TIER_PAGE_SIZE}
    results = {name: Result(OURS, _name(), TIERS, {"from": name, **case}) for name in steps}
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    with opened(config) as loaded:
        runner, engine = loaded.runner, loaded.engine
        vocab_size = loaded.facts.model_config.vocab_size
        (prompt,) = make_load(vocab_size, 1, TIER_PAGE_SIZE, 1, seed=TIER_PAGE_SIZE).prompts
        for number in range(-1, settings.rounds):
            begin = time.perf_counter()
            engine.add(Job(SequenceSpec("page", params), tuple(prompt)))
            while engine.has_unfinished:
                engine.step()
            computed = time.perf_counter() - begin
            for name, move in steps.items():
                begin = time.perf_counter()
                runner.kv.copy([move], runner.ops)
                again = time.perf_counter() - begin
                if number >= 0:
                    results[name].add(
                        compute_ms=1000 * computed, again_ms=1000 * again, gain=computed / again
                    )
            settings.progress(f"recoding: round {number + 1} of {settings.rounds}")
    return list(results.values())
