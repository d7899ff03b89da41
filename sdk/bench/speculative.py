"""Decoding with drafts compared with plain decoding, on work that copies and on work that does not.

Two engines with the same model are open and measured in turn, and their answers must be equal.
Prefixes are not cached and answers are not kept, so that each round does the same work.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import time
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

from sdk.api.errors import RequestError
from sdk.bench.engines import OURS, Engines
from sdk.bench.report import Result
from sdk.bench.settings import Settings

if TYPE_CHECKING:
    from sdk.llm import LLM

#: The longest prompt, if the model's context has room for it; otherwise its end is used.
_PROMPT = 1024
#: ``(decoded tokens per second, share of accepted drafts, the tokens of each answer)``.
_Run = tuple[float, float, list[list[int]]]
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
_TOWNS = ("Oslo", "Lima", "Rome", "Bonn", "Kyiv", "Cork", "Riga")
_NOTES = (
    "the parcel arrived two days late and one corner of the box was damaged",
    "please send the invoice to the office on the second floor, not to my home",
    "the blue chair is fine, but the table has a scratch on its left side",
    "I would like to return the lamp because it does not fit the socket",
)
#: Functions that are written again with another name for their argument.
_CODE = ((textwrap.indent, "text"), (inspect.cleandoc, "doc"), (textwrap.dedent, "text"))


def _quote(number: int) -> str:
    """A document to repeat: English that every Python has, its help pages."""
    words = topics["assignment"].split()
    begin = 60 * number % (len(words) - 140)
    text = " ".join(words[begin : begin + 140])
    return f"First copy:\n{text}\n\nSecond copy:\n{text}\n\nThird copy:\n{text[:60]}"


def _edit(number: int) -> str:
    """Code to write again with another name: the first function is done."""
    before, after = [], []
    for index in range(2):
        function, name = _CODE[(number + index) % len(_CODE)]
        before.append(inspect.getsource(function))
        after.append(re.sub(rf"\b{name}\b", f"source{number}", before[-1]))
    begun = after[1].partition("\n")[0]
    return "\n".join(["# Before:", *before, "# After:", after[0], begun, ""])


def _json(number: int) -> str:
    """Letters to write as JSON: the first ones are done."""
    letters = []
    for index in range(number, number + 6):
        name, town = _NAMES[index % 8], _TOWNS[index % 7]
        letters.append({"name": name, "town": town, "text": _NOTES[index % 4]})
    told = "\n".join(f"{x['name']} from {x['town']} writes: {x['text']}." for x in letters)
    done = "\n".join(json.dumps(letter) for letter in letters[:3])
    return f"Letters:\n{told}\n\nThe same letters, one JSON object for each:\n{done}\n"


def _prose(number: int) -> str:
    """A story: sampled, so that it does not repeat itself."""
    return f"{_NAMES[number % 8]} from {_TOWNS[number % 7]} woke up early that morning and"


WORK = {"quote": _quote, "edit": _edit, "json": _json, "prose": _prose}


def measure_speculative(settings: Settings, engines: Engines) -> list[Result]:
    """One row for each kind of work and number of requests.

    :raises RequestError: the model has no tokenizer, or answers differ.
    """
    from sdk import __version__
    from sdk.llm import LLM

    requests = max(settings.requests)
    most = LLM.plan(settings.model, kv_cache_dtype=settings.kv, max_num_seqs=1).max_model_len
    context = min(_PROMPT + settings.output_len, most)
    found = []
    with (
        _opened(LLM, settings, requests, context, None) as plain,
        _opened(LLM, settings, requests, context, "ngram") as drafting,
    ):
        for count in settings.requests:
            for name in WORK:
                case: dict[str, int | str] = {"work": name, "requests": count}
                result = Result(OURS, f"{OURS} {__version__}", settings.kv, case)
                for number in range(-1, settings.rounds):
                    pair = (plain, drafting) if number % 2 else (drafting, plain)
                    runs = {llm: _run(llm, name, count, settings.output_len) for llm in pair}
                    if number >= 0:
                        result.add(**_compared(name, runs[plain], runs[drafting]))
                settings.progress(f"{name}, requests {count}: {settings.rounds} rounds")
                found.append(result)
        return [*found, *_measure_llama_cpp(settings, plain, context)]


def _measure_llama_cpp(settings: Settings, llm: LLM, context: int) -> list[Result]:
    """llama.cpp with its own drafts from the prompt, for one request: all that it can draft for."""
    peer, found = settings.peer("llama.cpp"), []
    if peer is None:
        return []
    with Engines(settings.failures) as engines, engines.sparing():
        worker = engines.open(settings.opening(peer.engine, 1, context), peer.python)
        for name in WORK:
            result = Result(worker.engine, worker.name, worker.kv, {"work": name, "requests": 1})
            [prompt] = _prompts(llm, name, 1, settings.output_len)
            temperature = 0.9 if name == "prose" else 0.0
            for number in range(-1, settings.rounds):
                rates = {}
                for drafts in (False, True)[:: 1 if number % 2 else -1]:
                    rates[drafts], _ = worker.run_one(
                        prompt, settings.output_len, temperature=temperature, drafts=drafts
                    )
                if number >= 0:
                    plain, drafted = rates[False], rates[True]
                    result.add(plain_tok_s=plain, draft_tok_s=drafted, gain=drafted / plain)
            settings.progress(f"{peer.engine}: {name}")
            found.append(result)
    return found


def _prompts(llm: LLM, name: str, count: int, output_len: int) -> list[list[int]]:
    """The tokens of the prompts, as many as there is room for."""
    room = llm.memory_plan.max_model_len - output_len
    encode = llm.get_tokenizer().encode
    return [encode(WORK[name](number))[-room:] for number in range(count)]


def _opened(
    llm: type[LLM], settings: Settings, requests: int, context: int, speculative: str | None
) -> LLM:
    return llm(
        settings.model,
        num_threads=settings.threads,
        max_num_seqs=requests,
        kv_cache_dtype=settings.kv,
        max_model_len=context,
        # All prompts run in one step: otherwise the first answer may end before the last begins.
        max_num_batched_tokens=requests * context,
        enable_prefix_caching=False,
        speculative_config=speculative,
    )


def _compared(name: str, plain: _Run, drafting: _Run) -> dict[str, float]:
    if plain[2] != drafting[2]:
        raise RequestError(f"--suite speculative: answers to {name!r} differ with drafts")
    return {
        "plain_tok_s": plain[0],
        "draft_tok_s": drafting[0],
        "gain": drafting[0] / plain[0],
        "accepted": 100 * drafting[1],
    }


def _run(llm: LLM, name: str, count: int, output_len: int) -> _Run:
    """Timed while all requests run: from the last one's first token until one has its last."""
    from sdk.api.params import RequestOutputKind, SamplingParams

    params = [
        SamplingParams(
            temperature=0.9 if name == "prose" else 0,
            seed=number,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for number in range(count)
    ]
    prompts = [{"prompt_token_ids": x} for x in _prompts(llm, name, count, output_len)]
    before = llm.get_metrics()
    answers: dict[str, list[int]] = {one: [] for one in llm.enqueue(prompts, params)}
    begin = end = 0.0
    known = counted = 0
    while llm.has_unfinished_requests:
        finished = False
        for output in llm.step():
            answers[output.request_id] += output.outputs[0].token_ids
            finished |= output.finished
        if not begin and all(answers.values()):
            begin, known = time.perf_counter(), sum(map(len, answers.values()))
        if finished and not end:
            end, counted = time.perf_counter(), sum(map(len, answers.values()))
    after = llm.get_metrics()
    drafted = after["num_draft_tokens"] - before["num_draft_tokens"]
    accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
    rate = (counted - known) / (end - begin) if end > begin else 0.0
    return rate, accepted / drafted if drafted else 0.0, list(answers.values())
