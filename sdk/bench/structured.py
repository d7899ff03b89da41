"""Structured answers compared with free ones: the same engine, prompts and number of requests.

Rates are measured while all requests run, because structured answers end where they are complete.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdk.api.errors import SdkError
from sdk.bench.engines import OURS, Engines
from sdk.bench.report import Result
from sdk.bench.settings import Settings

if TYPE_CHECKING:
    from sdk.api.params import SamplingParams
    from sdk.llm import LLM

_CONTEXT = 1024
#: The most tokens of an answer.
_MOST = 256
_TEXT = {"type": "string", "maxLength": 2000}
#: A form has much text that its schema forces; a report is mostly free text in strings.
_FORM = {
    "first_name": {"type": "string", "maxLength": 12},
    "last_name": {"type": "string", "maxLength": 12},
    "date_of_birth": {"type": "string", "format": "date"},
    "is_active_member": {"type": "boolean"},
    "number_of_purchases": {"type": "integer", "minimum": 0, "maximum": 99},
    "preferred_language": {"enum": ["english", "german", "french"]},
}
_REPORT = {"title": _TEXT, "summary": _TEXT, "score": {"type": "integer"}}


def _schema(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


STRUCTURES: dict[str, dict[str, Any]] = {
    "form": {"json": {"type": "array", "items": _schema(_FORM), "minItems": 2}},
    "report": {"json": _schema(_REPORT)},
    "any json": {"json_object": True},
    "regex": {"regex": r"([A-Z][a-z]{2,9} ){40,400}\."},
}


def measure_structured(settings: Settings, engines: Engines) -> list[Result]:
    """One row for each structure and number of requests.

    :raises RequestError: llguidance is missing, or the model has no tokenizer.
    """
    from sdk import __version__
    from sdk.llm import LLM

    most = LLM.plan(settings.model, kv_cache_dtype=settings.kv, max_num_seqs=1).max_model_len
    context = min(_CONTEXT, most)
    found = []
    with (
        _opened(LLM, settings, context, None) as plain,
        _opened(LLM, settings, context, "grammar") as drafting,
    ):
        for count in settings.requests:
            for name, structure in STRUCTURES.items():
                case: dict[str, int | str] = {"structure": name, "requests": count}
                result = Result(OURS, f"{OURS} {__version__}", settings.kv, case)
                free, bound = _params(settings, None), _params(settings, structure)
                for number in range(-1, settings.rounds):  # the first warms up
                    rates = {}
                    for which in ("free", "structured", "drafted")[:: 1 if number % 2 else -1]:
                        llm = drafting if which == "drafted" else plain
                        rates[which] = _rate(llm, free if which == "free" else bound, count)
                    if number >= 0:
                        result.add(
                            free_tok_s=rates["free"],
                            structured_tok_s=rates["structured"],
                            share=rates["structured"] / rates["free"],
                            gain=rates["drafted"] / rates["structured"],
                        )
                settings.progress(f"{name}, requests {count}: {settings.rounds} rounds")
                found.append(result)
        return [*found, *_measure_llama_cpp(settings, plain, context)]


def _measure_llama_cpp(settings: Settings, llm: LLM, context: int) -> list[Result]:
    """llama.cpp with its grammars, for one request at a time: all that its class can do."""
    peer, found = settings.peer("llama.cpp"), []
    if peer is None:
        return []
    prompt = llm.get_tokenizer().apply_chat_template(_conversation(0), add_generation_prompt=True)
    for name, structure in STRUCTURES.items():
        schema = {"type": "object"} if "json_object" in structure else structure.get("json")
        if schema is None:
            continue
        with Engines(settings.failures) as engines, engines.sparing():
            worker = engines.open(settings.opening(peer.engine, 1, context), peer.python)
            case: dict[str, int | str] = {"structure": name, "requests": 1}
            result = Result(worker.engine, worker.name, worker.kv, case)
            try:
                for number in range(-1, settings.rounds):
                    rates = {}
                    for bound in (False, True)[:: 1 if number % 2 else -1]:
                        rates[bound], _ = worker.run_one(
                            prompt, _MOST, temperature=0.7, schema=schema if bound else None
                        )
                    if number >= 0:
                        free, structured = rates[False], rates[True]
                        result.add(
                            free_tok_s=free, structured_tok_s=structured, share=structured / free
                        )
                settings.progress(f"{peer.engine}: {name}")
            except SdkError as error:  # it cannot compile every schema: a row without numbers
                settings.progress(f"{peer.engine}: {name}: {str(error)[:200]}")
            found.append(result)
    return found


def _conversation(number: int) -> list[dict[str, str]]:
    text = f"Write a long JSON document about the sea, version {number}."
    return [{"role": "user", "content": text}]


def _opened(llm: type[LLM], settings: Settings, context: int, speculative: str | None) -> LLM:
    return llm(
        settings.model,
        num_threads=settings.threads,
        max_num_seqs=max(settings.requests),
        kv_cache_dtype=settings.kv,
        max_model_len=context,
        speculative_config=speculative,
    )


def _params(settings: Settings, structure: dict[str, Any] | None) -> SamplingParams:
    from sdk.api.params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.7,
        top_p=0.9,
        seed=1,
        max_tokens=max(settings.output_len, _MOST),
        ignore_eos=structure is None,
        structured_outputs=structure,
        output_kind=RequestOutputKind.DELTA,
    )


def _rate(llm: LLM, params: SamplingParams, count: int) -> float:
    """Tokens per second from the first token of the last request until the first request ends."""
    prompts: Sequence[Any] = [_conversation(number) for number in range(count)]
    names = llm.enqueue(prompts, params)
    tokens = dict.fromkeys(names, 0)
    begin = end = 0.0
    known = counted = 0
    while llm.has_unfinished_requests:
        for output in llm.step():
            tokens[output.request_id] += len(output.outputs[0].token_ids)
            if output.finished and not end:
                end, counted = time.perf_counter(), sum(tokens.values())
        if not begin and all(tokens.values()):
            begin, known = time.perf_counter(), sum(tokens.values())
    return (counted - known) / (end - begin) if end > begin else 0.0
