"""Banned strings: the answer goes back to where one began, and is else the same as ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, BeamSearchParams, RequestError, SamplingParams
from sdk.api.params import RequestOutputKind
from sdk.engine import rewinds

PROMPTS = [[5, 9, 300, 301, 280, 317] * 3, [344, 308, 309], [7] * 9]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = GREEDY.clone(temperature=0.9, top_p=0.9, seed=3)
COLD = DRAWN.clone(temperature=0.2, seed=11)
#: Letters, strings of several tokens, one that begins another, a character of several bytes.
BANNED = ["e", "th", "ro", "rou", " f", "\u00e9", "0", "S", "a", "o"]
FORM = {"regex": "[a-z ]{1,30}"}
KINDS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "cold": COLD,
    "logprobs": COLD.clone(logprobs=3),
    "prompt logprobs": GREEDY.clone(prompt_logprobs=1, logprobs=0),
    "penalties": COLD.clone(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    "no n-gram twice": GREEDY.clone(no_repeat_ngram_size=2),
    "xtc": DRAWN.clone(xtc_probability=0.5, xtc_threshold=0.02),
    "mirostat": COLD.clone(mirostat_mode=2, logprobs=1),
    "guided": GREEDY.clone(guidance_scale=1.5),
    "ends": DRAWN.clone(ignore_eos=False, stop_token_ids=list(range(260, 448, 9)), min_tokens=12),
    "biased": COLD.clone(logit_bias={309: 3.0, 370: 4.0}),
    "some allowed": DRAWN.clone(allowed_token_ids=range(260, 400)),
    "structured": COLD.clone(structured_outputs=FORM, ignore_eos=False),
}
#: Several answers: each is followed like one of its own.
SEVERAL = {"several answers": COLD.clone(n=3), "the best": COLD.clone(n=2, best_of=3)}
ENGINES: dict[str, dict[str, Any]] = {
    "operator by operator": {"enforce_eager": True},
    "k8v4": {"kv_cache_dtype": "k8v4"},
    "int8": {"kv_cache_dtype": "int8"},
    "short steps": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
    "no prefix cache": {"enable_prefix_caching": False},
    "tiers": {"kv_policy": "fp16>int8"},
    "drafts": {
        "speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}
    },
}


def opened(path: Path, **options: Any) -> LLM:
    return LLM(path, **{"max_model_len": 128, "max_num_seqs": 6, **options})


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    with opened(tiny_path) as llm:
        yield llm


def first_banned(pieces: Sequence[bytes], banned: Sequence[str]) -> int | None:
    """The token in which the banned string begins that is complete first; the longest of several.

    Looks for bytes: in UTF-8 the bytes of a character occur nowhere else.
    """
    text, ends = b"".join(pieces), []
    for string in banned:
        at = text.find(string.encode())
        if at >= 0:
            ends.append((at + len(string.encode()), at))
    if not ends:
        return None
    _, begin = min(ends)
    return next(i for i in range(len(pieces)) if sum(map(len, pieces[: i + 1])) > begin)


def by_hand(llm: LLM, prompt: list[int], params: SamplingParams, banned: list[str]) -> Any:
    """The answer without the feature: run it to the end, forbid what must not come, run it again.

    What is forbidden is so after the same tokens only: a callback can say that.
    """
    tokenizer = llm._reader.tokenizer
    assert tokenizer is not None
    hidden = tokenizer.special_ids
    forbidden: dict[tuple[int, ...], set[int]] = {}

    def forbid(generated: Sequence[int], logits: Any) -> Any:
        logits[list(forbidden.get(tuple(generated), ()))] = float("-inf")
        return logits

    plain = params.clone(logits_processors=[forbid])
    for _ in range(400):
        [output] = llm.generate({"prompt_token_ids": prompt}, plain)
        tokens = list(output.outputs[0].token_ids)
        ended = output.outputs[0].finish_reason == "stop"
        shown = tokens[:-1] if ended and tokens[-1] in (2, *params.stop_token_ids) else tokens
        pieces = [b"" if one in hidden else tokenizer.id_to_bytes(one) for one in shown]
        index = first_banned(pieces, banned)
        if index is None:
            return output, len(forbidden)
        forbidden.setdefault(tuple(tokens[:index]), set()).add(tokens[index])
    raise AssertionError("more than 400 rewinds")


def facts(output: Any) -> Any:
    rows = [dict(row) if row else None for row in output.prompt_logprobs or ()]
    return output.outputs, rows


def run(llm: LLM, params: Any, prompts: Any = PROMPTS) -> list[Any]:
    found = [facts(output) for output in llm.generate(prompts, params)]
    llm._driver._engine.scheduler.check()
    return found


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_that_without_the_forbidden_tokens(llm: LLM, kind: str) -> None:
    params, changed = KINDS[kind], 0
    for prompt in PROMPTS:
        expected, positions = by_hand(llm, prompt, params, BANNED)
        changed += positions
        [output] = llm.generate({"prompt_token_ids": prompt}, params.clone(banned_strings=BANNED))
        assert facts(output) == facts(expected)
        assert not any(string in output.outputs[0].text for string in BANNED)
    assert changed > 4, "nothing was banned"


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, list[Any]]:
    """The answers of each kind, one request at a time."""
    kinds = {
        name: params.clone(banned_strings=BANNED) for name, params in (KINDS | SEVERAL).items()
    }
    return {
        name: [facts(llm.generate(prompt, params)[0]) for prompt in PROMPTS]
        for name, params in kinds.items()
    }


def everything() -> tuple[list[Any], list[SamplingParams]]:
    kinds = [params.clone(banned_strings=BANNED) for params in (KINDS | SEVERAL).values()]
    return PROMPTS * len(kinds), [params for params in kinds for _ in PROMPTS]


def test_a_batch_of_all_kinds_has_the_same_answers(llm: LLM, alone: dict[str, list[Any]]) -> None:
    assert run(llm, everything()[1], everything()[0]) == [*chain(*alone.values())]


SLOW = ("operator by operator", "k8v4", "short steps")


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ENGINES],
)
def test_every_engine_answers_as_without_rewinds(tiny_path: Path, engine: str) -> None:
    """One at a time and together; drafts change nothing."""
    prompts, params = everything()
    options = ENGINES[engine]
    with opened(tiny_path, **options | {"speculative_config": None}) as llm:
        plain = [facts(llm.generate(*one)[0]) for one in zip(prompts, params, strict=True)]
    with opened(tiny_path, **options) as llm:
        assert run(llm, params, prompts) == plain
        assert run(llm, params, prompts) == plain  # prefix hits
        metrics = llm.get_metrics()
        assert metrics["num_rewinds"] > 50
        told = sum(len(one.token_ids) for answers, _ in plain for one in answers)
        if engine != "tiers":  # best_of generates answers that are not returned
            assert metrics["num_generation_tokens"] >= 2 * told
        assert (metrics["num_accepted_tokens"] > 0) == (engine == "drafts")


def test_a_preempted_answer_is_that_of_an_undisturbed_one(
    tiny_path: Path, alone: dict[str, list[Any]]
) -> None:
    page = LLM.plan(tiny_path, max_model_len=128, max_num_seqs=6).page_bytes
    with opened(tiny_path, kv_cache_memory_bytes=8 * page) as llm:
        assert run(llm, everything()[1], everything()[0]) == [*chain(*alone.values())]
        assert llm.get_metrics()["num_preemptions"] > 0


@pytest.mark.slow
def test_two_ranks_rewind_together(tiny_path: Path) -> None:
    prompts, params = everything()
    options = {"compute": "exact", "num_threads": 2}
    with opened(tiny_path, **options, tensor_parallel_size=2) as llm:
        alone = [facts(llm.generate(*one)[0]) for one in zip(prompts[:8], params[:8], strict=True)]
        assert run(llm, params[:8], prompts[:8]) == alone
        assert llm.get_metrics()["num_rewinds"] > 10


def test_streams_give_out_nothing_that_is_taken_back(llm: LLM) -> None:
    for params in (GREEDY, COLD.clone(logprobs=2), COLD.clone(stop=["ar", "er"])):
        params = params.clone(banned_strings=BANNED)
        for prompt in PROMPTS:
            [whole] = llm.generate({"prompt_token_ids": prompt}, params)
            answer = whole.outputs[0]
            pieces = [
                piece.outputs[0] for piece in llm.stream({"prompt_token_ids": prompt}, params)
            ]
            assert "".join(piece.text for piece in pieces) == answer.text
            assert [one for piece in pieces for one in piece.token_ids] == list(answer.token_ids)
            rows = [row for piece in pieces for row in piece.logprobs or ()]
            assert rows == list(answer.logprobs or ())
            assert len(pieces) > 3


def test_text_so_far_only_grows(llm: LLM) -> None:
    params = COLD.clone(banned_strings=BANNED, output_kind=RequestOutputKind.CUMULATIVE)
    llm.enqueue({"prompt_token_ids": PROMPTS[0]}, params)
    before, lengths = "", set()
    while llm.has_unfinished_requests:
        for output in llm.step():
            [one] = output.outputs
            assert one.text.startswith(before) and not any(x in one.text for x in BANNED)
            before = one.text
            lengths.add(len(one.token_ids))
    assert max(lengths) == 24


def test_a_long_string_takes_back_several_pages(llm: LLM) -> None:
    """Other requests find the pages of what was taken back, and they hold what they should."""
    prompt = {"prompt_token_ids": PROMPTS[1]}
    long = GREEDY.clone(max_tokens=90, allowed_token_ids=range(260, 448))
    [plain] = llm.generate(prompt, long)
    text = plain.outputs[0].text
    banned = text[5:205]
    [output] = llm.generate(prompt, long.clone(banned_strings=[banned]))
    assert banned not in output.outputs[0].text
    assert output.outputs[0].token_ids != plain.outputs[0].token_ids
    expected, _ = by_hand(llm, PROMPTS[1], long, [banned])
    assert output.outputs == expected.outputs
    both = [long, long.clone(banned_strings=[banned])] * 2
    again = llm.generate([prompt] * 4, both)
    assert [one.outputs for one in again] == [plain.outputs, output.outputs] * 2


def test_a_stop_string_that_is_complete_first_ends_the_answer(llm: LLM) -> None:
    [plain] = llm.generate({"prompt_token_ids": PROMPTS[0]}, DRAWN)
    text = plain.outputs[0].text
    word = next(text[i : i + 4] for i in range(8, len(text)) if text[i : i + 4].isprintable())
    params = DRAWN.clone(stop=[word[:3]], banned_strings=[word])
    [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, params)
    assert output.outputs[0].stop_reason == word[:3]
    assert output.outputs[0].text == text[: text.index(word[:3])]
    other = DRAWN.clone(stop=[word], banned_strings=[word[:3]])
    [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, other)
    assert word[:3] not in output.outputs[0].text


def test_an_answer_that_cannot_avoid_a_string_ends_with_an_error(llm: LLM) -> None:
    prompt = {"prompt_token_ids": PROMPTS[0]}
    [plain] = llm.generate(prompt, GREEDY)
    allowed = plain.outputs[0].token_ids[:1]
    text = llm.generate(prompt, GREEDY.clone(max_tokens=1))[0].outputs[0].text
    only = GREEDY.clone(allowed_token_ids=allowed, banned_strings=[text])
    [output] = llm.generate(prompt, only)
    assert output.outputs[0].finish_reason == "error"
    assert output.outputs[0].stop_reason == "the request's parameters forbid every token"

    def force(_: Sequence[int], logits: Any) -> Any:
        logits[:] = float("-inf")
        logits[allowed] = 0.0
        return logits

    forced = GREEDY.clone(logits_processors=[force], banned_strings=[text])
    [output] = llm.generate(prompt, forced)
    assert output.outputs[0].finish_reason == "error" and output.outputs[0].text == ""
    assert output.outputs[0].stop_reason.startswith(f"banned_strings: {text!r} cannot be avoided")
    assert llm.generate(prompt, GREEDY)[0].outputs == plain.outputs


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MAX_FORBIDDEN", "2 other tokens at one position"),
        ("MORE_DISCARDED", "tokens were discarded"),
    ],
)
def test_the_work_is_bounded(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setattr(rewinds, "DISCARDED_PER_TOKEN", 0)
    monkeypatch.setattr(rewinds, name, 2)
    params = GREEDY.clone(banned_strings=list("abcdefghijklmnopqrstuvwxyz"))
    [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, params)
    assert output.outputs[0].finish_reason == "error" and words in output.outputs[0].stop_reason
    assert not set(output.outputs[0].text) & set("abcdefghijklmnopqrstuvwxyz")


def test_an_aborted_answer_returns_what_was_held_back(llm: LLM) -> None:
    [plain] = llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY)
    banned = plain.outputs[0].text[:60] + "never"
    [name] = llm.enqueue({"prompt_token_ids": PROMPTS[0]}, GREEDY.clone(banned_strings=[banned]))
    for _ in range(6):
        assert not [one for one in llm.step() if one.outputs and one.outputs[0].token_ids]
    llm.abort(name)
    [output] = [one for one in llm.step() if one.finished]
    count = len(output.outputs[0].token_ids)
    assert count >= 5 and output.outputs[0].token_ids == plain.outputs[0].token_ids[:count]
    assert plain.outputs[0].text.startswith(output.outputs[0].text)
    assert output.outputs[0].text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("word", "banned_strings must be a list of strings"),
        ([""], "banned_strings must be a list of non-empty strings"),
        ([3], "banned_strings must be a list of non-empty strings"),
        (["x"] * 1025, "banned_strings must hold at most 1024 strings"),
        (["x" * 257], "banned_strings: a string has at most 256 characters, got 257"),
        (["x" * 256] * 257, "banned_strings: expected at most 65536 characters in all, got 65792"),
    ],
)
def test_bad_values_are_named(given: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(banned_strings=given)


def test_text_is_needed(tiny_path: Path) -> None:
    with pytest.raises(RequestError, match="banned_strings is given"):
        SamplingParams(banned_strings=["x"], detokenize=False)
    banned = GREEDY.clone(banned_strings=["x"])
    needs = pytest.raises(RequestError, match="banned_strings need a tokenizer")
    with opened(tiny_path, skip_tokenizer_init=True) as llm, needs:
        llm.generate({"prompt_token_ids": [5]}, banned)
    with pytest.raises(TypeError, match="banned_strings"):
        BeamSearchParams(beam_width=2, max_tokens=3, banned_strings=["x"])  # type: ignore[call-arg]
