"""Decoding with drafts compared with plain decoding, on work that copies and on work that does not.

Two engines with the same model are open and measured in turn, and their answers must be equal.
Prefixes are not cached and answers are not kept, so that each round does the same work.
"""

from __future__ import annotations

import inspect
import textwrap
import time
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

from sdk.cli.bench.engines import OURS, Engines
from sdk.cli.bench.report import Result
from sdk.cli.bench.settings import Settings
from sdk.errors import RequestError

if TYPE_CHECKING:
    from sdk.llm import LLM

#: ``(decoded tokens per second, share of accepted drafts, the tokens of each answer)``.
_Run = tuple[float, float, list[list[int]]]
_NAMES = "Ada Ben Cleo Dan Eve Finn Gus Hana Ida Jon Kim Lea Max Nia Oto Pia".split()
_TOWNS = "Oslo Lima Rome Bonn Kyiv Cork Riga Bern".split()


def _quote(number: int) -> str:
    """A document to repeat: English that every Python has, its help pages."""
    words = topics["assignment"].split()[60 * number :][:140]
    text = " ".join(words)
    return f"Document:\n{text}\n\nThe document, word for word:\n{text[:60]}"


def _edit(number: int) -> str:
    """Code to write again with another name."""
    functions = (textwrap.dedent, textwrap.indent, inspect.cleandoc, inspect.indentsize)
    code = inspect.getsource(functions[number % len(functions)])
    first = code[: code.index("\n") + 1]
    return f"# Before:\n{code}\n# After, in version {number + 2}:\n{first}"


def _json(number: int) -> str:
    """Records to write as JSON, after an example."""
    people = [
        (_NAMES[(3 * number + i) % 16], _TOWNS[(number + i) % 8], 20 + number + i) for i in range(8)
    ]
    told = " ".join(f"{name} from {town} is {age} years old." for name, town, age in people)
    done = ",\n ".join(
        f'{{"name": "{name}", "town": "{town}", "age": {age}}}' for name, town, age in people[:2]
    )
    return f"Text: {told}\nJSON: [{done},\n"


def _prose(number: int) -> str:
    """A story: sampled, so that it does not repeat itself."""
    return f"{_NAMES[number]} from {_TOWNS[number % 8]} woke up early that morning and"


WORK = {"quote": _quote, "edit": _edit, "json": _json, "prose": _prose}


def measure_speculative(settings: Settings, engines: Engines) -> list[Result]:
    """One row for each kind of work and number of requests.

    :raises RequestError: the model has no tokenizer, or answers differ.
    """
    from sdk import __version__
    from sdk.llm import LLM

    requests = max(settings.requests)
    found = []
    with (
        _opened(LLM, settings, requests, None) as plain,
        _opened(LLM, settings, requests, "ngram") as drafting,
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
    return found


def _opened(llm: type[LLM], settings: Settings, requests: int, speculative: str | None) -> LLM:
    return llm(
        settings.model,
        num_threads=settings.threads,
        max_num_seqs=requests,
        kv_cache_dtype=settings.kv,
        max_model_len=1024 + settings.output_len,
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
    """Timed from the first token of the last request to the end."""
    from sdk.params import RequestOutputKind, SamplingParams

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
    before = llm.get_metrics()
    answers: dict[str, list[int]] = {
        request_id: []
        for request_id in llm.enqueue([WORK[name](number) for number in range(count)], params)
    }
    begin, known = 0.0, 0
    while llm.has_unfinished_requests:
        for output in llm.step():
            answers[output.request_id] += output.outputs[0].token_ids
        if not begin and all(answers.values()):
            begin, known = time.perf_counter(), sum(map(len, answers.values()))
    seconds, after = time.perf_counter() - begin, llm.get_metrics()
    drafted = after["num_draft_tokens"] - before["num_draft_tokens"]
    accepted = after["num_accepted_tokens"] - before["num_accepted_tokens"]
    rate = (count * output_len - known) / seconds
    return rate, accepted / drafted if drafted else 0.0, list(answers.values())
