"""Decoding with LoRA adapters compared with the same model without them, and with peft.

An engine without adapters and one with them are open and measured in turn: requests without an
adapter beside loaded ones, all requests with one adapter, and each with its own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.cli.bench.engines import OURS, Engines
from sdk.cli.bench.report import Result
from sdk.cli.bench.settings import DECODE_PROMPT, Settings, make_load
from sdk.errors import RequestError
from sdk.memory.adapters import adapter_options

if TYPE_CHECKING:
    from sdk.llm import LLM

PEER = "peft"
_RANDOM = "random:"
_CASES = ("beside", "one", "different")


def parse_lora(text: str) -> str:
    """``random:RANK``, or a path. :raises RequestError: the rank is no number."""
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
        if settings.peer(PEER) is not None:
            found += _measure_peft(settings, paths)
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

    most, found = max(settings.requests), []
    cases = _CASES if len(set(paths)) > 1 else _CASES[:2]  # a given adapter is always the same
    options: dict[str, Any] = {
        "num_threads": settings.threads,
        "max_num_seqs": 2 * most,
        "max_model_len": DECODE_PROMPT + settings.output_len,
        "max_num_batched_tokens": max(256, most * DECODE_PROMPT),
        "kv_cache_dtype": settings.kv,
        "enable_prefix_caching": False,
    }
    adapted = adapter_options(paths)
    with LLM(settings.model, **options) as plain, LLM(settings.model, **options, **adapted) as llm:
        names = [llm.add_lora(f"{n}", path, pin=True).lora_name for n, path in enumerate(paths)]
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
    from sdk.params import RequestOutputKind, SamplingParams

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


def _measure_peft(settings: Settings, paths: Sequence[Path]) -> list[Result]:
    """The same by transformers and peft in float32, all requests in one batch."""
    import peft
    import torch

    found = []
    with _peft_model(settings, paths) as model:
        for count in settings.requests:
            vocab = model.config.vocab_size
            load = make_load(vocab, count, DECODE_PROMPT, settings.output_len, seed=count)
            prompts = torch.tensor(load.prompts)
            for case in _CASES if len(set(paths)) > 1 else _CASES[:2]:
                result = Result(
                    PEER, f"{PEER} {peft.__version__}", "f32", {"requests": count, "adapters": case}
                )
                names = ["0"] * count if case == "one" else [str(n) for n in range(count)]
                for number in range(-1, settings.rounds):
                    base = _peft_rate(model, prompts, settings.output_len, None)
                    given = None if case == "beside" else names
                    rate = _peft_rate(model, prompts, settings.output_len, given)
                    if number >= 0:
                        result.add(plain_tok_s=base, lora_tok_s=rate, share=rate / base)
                found.append(result)
            settings.progress(f"{PEER}: requests {count}")
    return found


@contextmanager
def _peft_model(settings: Settings, paths: Sequence[Path]) -> Iterator[Any]:
    import torch
    import transformers
    from peft import PeftModel

    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        path = settings.unpacked()
        base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(paths[0]), adapter_name="0")
        for number, path_ in enumerate(paths[1:], 1):
            model.load_adapter(str(path_), adapter_name=str(number))
        yield model.eval()
    finally:
        torch.set_num_threads(threads)


def _peft_rate(model: Any, prompts: Any, output_len: int, names: list[str] | None) -> float:
    import torch

    mixed: dict[str, Any] = {}
    if names is not None and len(set(names)) > 1:
        mixed["adapter_names"] = names
    elif names is not None:
        model.set_adapter(names[0])
    with torch.no_grad(), model.disable_adapter() if names is None else nullcontext():
        out = model(prompts, use_cache=True, **mixed)
        begin = time.perf_counter()
        for _ in range(output_len - 1):
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(tokens, past_key_values=out.past_key_values, use_cache=True, **mixed)
        return float((output_len - 1) * len(prompts) / (time.perf_counter() - begin))
