"""Prompts of a load test: their length, what they share, and traces."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from sdk.api.errors import RequestError
from sdk.bench.serve.arrivals import Arrivals
from sdk.bench.serve.lengths import parse_lengths
from sdk.bench.serve.texts import WORDS, make_text
from sdk.bench.serve.trace import read_trace
from sdk.bench.serve.workload import Turn, Workload, prompt_of
from sdk.loaders.open import open_checkpoint

LENGTHS = parse_lengths("20")


def workload(**changes: object) -> Workload:
    return Workload(**{"input_len": LENGTHS, "output_len": LENGTHS, **changes})  # type: ignore[arg-type]


def texts(found: Workload, run: int, count: int = 20) -> list[str]:
    return [str(one.turns[0].text) for one in islice(found.draw(run), count)]


@pytest.mark.parametrize("number", [0, 1])
def test_words_are_one_token_each(number: int, smollm2: Path, gemma3: Path) -> None:
    checkpoint = open_checkpoint(str((smollm2, gemma3)[number]))
    try:
        tokenizer = checkpoint.tokenizer
        assert tokenizer is not None
        ids = {word: tokenizer.encode(f" {word}", add_special_tokens=False) for word in WORDS}
    finally:
        checkpoint.close()
    assert [word for word, found in ids.items() if len(found) > 1] == []
    assert len(set(WORDS)) == len(WORDS) > 150


def test_the_same_seed_asks_the_same_and_every_run_has_its_own_texts() -> None:
    one = workload(input_len=parse_lengths("5-50"))
    assert texts(one, 0) == texts(one, 0)
    other = texts(one, 1)
    assert not set(texts(one, 0)) & set(other)
    assert [len(text.split()) for text in texts(one, 0)] == [len(t.split()) for t in other]
    assert texts(workload(input_len=parse_lengths("5-50"), seed=1), 0) != texts(one, 0)


def test_system_prompts_are_shared_by_their_share_and_by_all_runs() -> None:
    shared = workload(prefix_len=30, prefixes=2, prefix_share=0.75)
    found = list(islice(shared.draw(0), 400))
    with_prefix = [one.opening[0]["content"] for one in found if one.opening]
    assert 270 <= len(with_prefix) <= 330
    assert len(set(with_prefix)) == 2
    assert all(len(text.split()) == 30 for text in set(with_prefix))
    again = [one.opening[0]["content"] for one in islice(shared.draw(5), 50) if one.opening]
    assert set(again) == set(with_prefix)
    assert [one.turns for one in found] == [
        one.turns for one in islice(workload(prefix_len=30, prefixes=2).draw(0), 400)
    ]


def test_prose_has_the_length_asked_for_and_is_not_words() -> None:
    import random

    text = make_text("prose", 2000, random.Random(1))
    assert len(text) == round(2000 * 4.2)
    assert text != make_text("prose", 2000, random.Random(2))


def test_sessions_of_an_open_loop_have_the_times_of_their_process() -> None:
    arrivals = Arrivals(4.0)
    found = workload(turns=3, think_s=2.0).timed(10, 0, arrivals)
    assert [one.at for one in found] == arrivals.times(10, seed=0)
    assert all(len(one.turns) == 3 and one.think_s == 2.0 for one in found)


def test_a_prompt_is_a_conversation_or_all_its_texts() -> None:
    history = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert prompt_of(history, chat=True) == history
    assert prompt_of(history, chat=False) == "a\nb"


def write(path: Path, *entries: object) -> str:
    file = path / "trace.jsonl"
    lines = [one if isinstance(one, str) else json.dumps(one) for one in entries]
    file.write_text("\n".join(lines) + "\n\n")
    return str(file)


def test_a_trace_has_times_texts_and_lengths(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"at": 12.0, "input_len": 7},
        {"at": 10, "prompt": "Hello", "output_len": 5},
    )
    sessions = read_trace(path, 2.0, parse_lengths("10-30"), chat=False)
    assert [one.at for one in sessions] == [0.0, 1.0]
    assert sessions[0].turns == (Turn("Hello", 5),)
    assert sessions[1].turns == (Turn(7, 20),)
    first, second = workload(trace=sessions).timed(None, 0, None)
    assert first.turns[0].text == "Hello"
    assert len(str(second.turns[0].text).split()) == 7
    assert second != workload(trace=sessions).timed(None, 1, None)[1]
    assert len(workload(trace=sessions).timed(1, 0, None)) == 1


def test_a_trace_may_have_conversations(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path = write(tmp_path, {"at": 0, "messages": messages})
    (session,) = read_trace(path, 1.0, LENGTHS, chat=True)
    assert [*session.opening, {"role": "user", "content": session.turns[0].text}] == messages
    with pytest.raises(RequestError, match="messages need --chat"):
        read_trace(path, 1.0, LENGTHS, chat=False)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: "),
        ("[1]", "expected an object"),
        ('{"at": 1, "prompt": "x", "tokens": 3}', "unknown key 'tokens'"),
        ('{"prompt": "x"}', "at: expected seconds"),
        ('{"at": -1, "prompt": "x"}', "at: expected seconds"),
        ('{"at": NaN, "prompt": "x"}', "at: expected seconds"),
        ('{"at": true, "prompt": "x"}', "at: expected seconds"),
        ('{"at": 1}', "expected one of prompt, messages, input_len; found none"),
        ('{"at": 1, "prompt": "x", "input_len": 3}', "found prompt, input_len"),
        ('{"at": 1, "prompt": ""}', "prompt: expected a text"),
        ('{"at": 1, "input_len": 0}', "input_len: expected an integer in 1.."),
        ('{"at": 1, "prompt": "x", "output_len": 1.5}', "output_len: expected an integer"),
        ('{"at": 1, "messages": [{"role": "assistant", "content": "x"}]}', "ends with the user's"),
        ('{"at": 1, "messages": []}', "messages: expected a list"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(line: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as found:
        read_trace(write(tmp_path, line), 1.0, LENGTHS, chat=True)
    assert "trace.jsonl, line 1: " in str(found.value) and said in str(found.value)


def test_an_empty_or_binary_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="found no lines"):
        read_trace(write(tmp_path, ""), 1.0, LENGTHS, chat=False)
    (tmp_path / "bad").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="expected UTF-8"):
        read_trace(str(tmp_path / "bad"), 1.0, LENGTHS, chat=False)
