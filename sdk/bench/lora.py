"""Decoding with LoRA adapters compared with the same model without them, and with peft.

An engine without adapters and one with them are open and measured in turn: requests without an
adapter beside loaded ones, all requests with one adapter, and each with its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.errors import RequestError
from sdk.bench.engines import OURS, Engines, Peer, PeerError
from sdk.bench.report import Result
from sdk.bench.settings import DECODE_PROMPT, Settings, make_load
from sdk.cli.lora_arguments import add_adapter

if TYPE_CHECKING:
    from sdk.llm import LLM

PEER = "peft"
_RANDOM = "random:"
_CASES = ("beside", "one", "different")


def parse_lora(text: str) -> str:
    """``random:RANK``, or a path. :raises RequestError: the rank is not a number."""
    rank = text.removeprefix(_RANDOM)
    if text.startswith(_RANDOM) and not (rank.isascii() and rank.isdigit() and int(rank)):
        raise RequestError(f"--lora: expected random:RANK or a path, found {text!r}")
    return text


def measure_lora(settings: Settings, engines: Engines) -> list[Result]:
    """One row for each case and number of requests."""
    with tempfile.TemporaryDirectory() as folder:
        most = max(settings.requests)
        paths = _adapters(settings, Path(folder), most)
        found = _measure_own(settings, paths)
        if (peer := settings.peer(PEER)) is not None:
            with Engines(settings.failures).sparing():
                found += _measure_peft(settings, peer, paths)
        return found


def _adapters(settings: Settings, folder: Path, count: int) -> list[Path]:
    """The adapters of the requests: ``count`` random ones, or always the given one."""
    if not settings.lora.startswith(_RANDOM):
        return [Path(settings.lora)] * count
    from sdk.loaders.writers.peft_writer import random_adapter_for

    rank = int(settings.lora.removeprefix(_RANDOM))
    return [
        random_adapter_for(settings.model, folder / str(number), rank, seed=number)
        for number in range(count)
    ]


def _measure_own(settings: Settings, paths: Sequence[Path]) -> list[Result]:
    from sdk import __version__
    from sdk.llm import LLM
    from sdk.memory.weights import adapter_options

    most = max(settings.requests)
    found: list[Result] = []
    cases = _CASES if len(set(paths)) > 1 else _CASES[:2]  # a given adapter is always the same
    options: dict[str, Any] = {
        "device": "cpu",
        "num_threads": settings.threads,
        "max_num_seqs": 2 * most,
        "max_model_len": DECODE_PROMPT + settings.output_len,
        "max_num_batched_tokens": max(256, most * DECODE_PROMPT),
        "kv_cache_dtype": settings.kv,
        "enable_prefix_caching": False,
    }
    adapted = {**adapter_options(paths), "lora_dtype": settings.lora_dtype}
    with LLM(settings.model, **options) as plain, LLM(settings.model, **options, **adapted) as llm:
        names = [add_adapter(llm, f"{n}", path).lora_name for n, path in enumerate(paths)]
        vocab = llm.model_config.vocab_size
        for count in settings.requests:
            load = make_load(vocab, count, DECODE_PROMPT, settings.output_len, seed=count)
            which = {"beside": None, "one": names[0], "different": names[:count]}
            results = {
                case: Result(
                    OURS,
                    f"{OURS} {__version__}",
                    str(llm.memory_plan.kv_dtype),
                    {"requests": count, "adapters": case},
                )
                for case in cases
            }
            for number in range(-1, settings.rounds):
                order = cases[:: 1 if number % 2 else -1]
                for case in order:  # the plain engine around each, so that noise cancels
                    before = _rate(plain, load.prompts, settings.output_len, None)
                    rate = _rate(llm, load.prompts, settings.output_len, which[case])
                    after = _rate(plain, load.prompts, settings.output_len, None)
                    if number >= 0:
                        base = (before + after) / 2
                        results[case].add(plain_tok_s=base, lora_tok_s=rate, share=rate / base)
            settings.progress(f"requests {count}: {settings.rounds} rounds")
            found += results.values()
    return found


def _rate(llm: LLM, prompts: Sequence[Sequence[int]], output_len: int, lora: Any) -> float:
    """Tokens per second while all requests decode."""
    from sdk.api.params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    counts = dict.fromkeys(llm.enqueue(asked, params, lora_request=lora), 0)
    begin = end = 0.0
    known = counted = 0
    while llm.has_unfinished_requests:
        finished = False
        for output in llm.step():
            counts[output.request_id] += len(output.outputs[0].token_ids)
            finished |= output.finished
        if not begin and all(counts.values()):
            begin, known = time.perf_counter(), sum(counts.values())
        if finished and not end:
            end, counted = time.perf_counter(), sum(counts.values())
    return (counted - known) / (end - begin) if end > begin else 0.0


# ---- peft ----------------------------------------------------------------------------------------


def _measure_peft(settings: Settings, peer: Peer, paths: Sequence[Path]) -> list[Result]:
    """The same by transformers and peft in float32, all requests in one batch."""
    found: list[Result] = []
    cases = _CASES if len(set(paths)) > 1 else _CASES[:2]
    asked = {
        "model": settings.unpacked(),
        "adapters": [str(path) for path in paths],
        "prompt_len": DECODE_PROMPT,
        "output_len": settings.output_len,
        "rounds": settings.rounds,
        "requests": list(settings.requests),
        "cases": list(cases),
    }
    settings.progress(f"{PEER}: all cases")
    done = subprocess.run(
        [peer.python, str(Path(__file__).with_name("peft_peer.py"))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(settings.threads)},
        check=False,
    )
    if done.returncode:
        last = next(iter(done.stderr.strip().splitlines()[::-1]), "no message")
        raise PeerError(PEER, f"the process ended with code {done.returncode}: {last}")
    answer = json.loads(done.stdout)
    for row in answer["rows"]:
        case = {"requests": row["requests"], "adapters": row["case"]}
        result = Result(PEER, f"{PEER} {answer['version']}", "f32", case)
        for plain, rate in row["rates"]:
            result.add(plain_tok_s=plain, lora_tok_s=rate, share=rate / plain)
        found.append(result)
    return found
