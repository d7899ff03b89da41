"""Log-probabilities of tokens that are parts of characters: bytes, names, places and counts.

A tiny model with random weights and a hot sampler writes mostly single bytes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdk import LLM
from sdk.api.logprobs import Logprobs
from sdk.compat.llama_cpp import Llama
from sdk.compat.openai import AsyncOpenAI, OpenAI
from sdk.serving import create_app
from sdk.serving.openai.token_names import TokenNames, places_in_prompt
from sdk.testing import tiny_model
from sdk.tokenizer import LLMTokenizer
from tests.serving.serving import running

ASK = [{"role": "user", "content": "hi"}]
HOT: dict[str, Any] = {"max_tokens": 48, "temperature": 2.0, "seed": 3}
#: Four characters of three bytes each: twelve tokens.
PROMPT = "おはよう"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), "f16")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, max_model_len=256, num_threads=1) as made:
        yield made


@pytest.fixture(scope="module")
def hot(llm: LLM) -> dict[str, Any]:
    """Without control tokens, which are not part of a text."""
    return {**HOT, "logit_bias": dict.fromkeys(llm.get_tokenizer().inner.special_ids, -100)}


def read(data: list[int]) -> str:
    return bytes(data).decode("utf-8", "replace")


def is_part(data: list[int]) -> bool:
    return "�" in read(data)


def check_chat(content: list[Any], text: str, most: int) -> None:
    data = [byte for entry in content for byte in entry["bytes"]]
    assert read(data) == text
    assert sum(is_part(entry["bytes"]) for entry in content) > 3
    for entry in content:
        tops = entry["top_logprobs"]
        assert len(tops) == most
        for one in (entry, *tops):
            assert list(raw(one["token"])) == one["bytes"], "its name has its spaces and its bytes"
        assert [one["logprob"] for one in tops] == sorted(
            (one["logprob"] for one in tops), reverse=True
        )
        own = [one for one in tops if one["bytes"] == entry["bytes"]]
        assert all(one["logprob"] == entry["logprob"] for one in own)


@pytest.mark.parametrize("most", [0, 2])
def test_the_bytes_of_a_chats_tokens_are_its_text(llm: LLM, hot: dict[str, Any], most: int) -> None:
    client = OpenAI(llm)
    asked: dict[str, Any] = {"messages": ASK, "logprobs": True, "top_logprobs": most, **hot}
    whole = client.chat.completions.create(**asked).model_dump()["choices"][0]
    check_chat(whole["logprobs"]["content"], whole["message"]["content"], most)
    chunks = [
        chunk.model_dump()["choices"][0]
        for chunk in client.chat.completions.create(**asked, stream=True)
    ]
    streamed = [entry for chunk in chunks for entry in chunk["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]

    async def later() -> Any:
        return (await AsyncOpenAI(llm).chat.completions.create(**asked)).model_dump()

    assert asyncio.run(later())["choices"][0]["logprobs"] == whole["logprobs"]
    with running(create_app({"tiny": llm})) as server:
        found = server.post("/v1/chat/completions", asked).json["choices"][0]["logprobs"]
    assert [one["bytes"] for one in found["content"]] == [one["bytes"] for one in streamed]
    assert [len(one["top_logprobs"]) for one in found["content"]] == [most] * len(streamed)


def test_a_llama_chat_has_bytes_and_counts_too(model: Path, hot: dict[str, Any]) -> None:
    with Llama(str(model), n_ctx=256, n_threads=1, logits_all=True) as llama:
        found = llama.create_chat_completion(ASK, logprobs=True, top_logprobs=2, **hot)
    choice = found["choices"][0]
    check_chat(choice["logprobs"]["content"], choice["message"]["content"], 2)


def check_completion(scored: dict[str, Any], text: str, first: str) -> None:
    """``first``: the text before the first token."""
    names, places = scored["tokens"], scored["text_offset"]
    assert sum(name.startswith("bytes:\\x") for name in names) > 3
    for name, value, best in zip(
        names, scored["token_logprobs"], scored["top_logprobs"], strict=True
    ):
        assert best is None or best[name] == value
        assert best is None or len(best) in (2, 3)
    data = b"".join(raw(name) for name in names)
    whole = first + text
    assert data.decode("utf-8", "replace") == text
    assert places == sorted(places) and places[0] == len(first)
    for name, place in zip(names, places, strict=True):
        shown = raw(name).decode("utf-8", "ignore")
        assert not shown or whole[place:].startswith(shown)
        assert place < len(whole)


def raw(name: str) -> bytes:
    if not name.startswith("bytes:"):
        return name.encode()
    return bytes(int(digits, 16) for digits in re.findall(r"\\x(..)", name))


@pytest.mark.parametrize("echo", [False, True])
def test_the_tokens_of_a_completion_have_places_and_names_of_their_own(
    llm: LLM, hot: dict[str, Any], echo: bool
) -> None:
    client = OpenAI(llm)
    asked: dict[str, Any] = {"prompt": PROMPT, "logprobs": 2, "echo": echo, **hot}
    whole = client.completions.create(**asked).model_dump()["choices"][0]
    scored = whole["logprobs"]
    check_completion(scored, whole["text"], "" if echo else PROMPT)
    if echo:
        assert scored["text_offset"][:12] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    chunks = [
        chunk.model_dump()["choices"][0]
        for chunk in client.completions.create(**asked, stream=True)
    ]
    for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [one for chunk in chunks for one in chunk["logprobs"][key]] == scored[key]
    with running(create_app({"tiny": llm})) as server:
        found = server.post("/v1/completions", asked).json["choices"][0]["logprobs"]
    assert found["tokens"] == scored["tokens"] and found["text_offset"] == scored["text_offset"]


@pytest.mark.parametrize("echo", [False, True])
def test_a_llama_completion_has_places_and_names_of_its_own(
    model: Path, hot: dict[str, Any], echo: bool
) -> None:
    with Llama(str(model), n_ctx=256, n_threads=1, logits_all=True) as llama:
        [choice] = llama(PROMPT, logprobs=2, echo=echo, **hot)["choices"]
        check_completion(choice["logprobs"], choice["text"], "" if echo else PROMPT)
        if not echo:
            chunks = [one["choices"][0] for one in llama(PROMPT, logprobs=2, stream=True, **hot)]
            rows = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
            for key in ("tokens", "text_offset"):
                assert [one for row in rows for one in row[key]] == choice["logprobs"][key]


def test_two_tokens_of_one_text_keep_their_own_values(llm: LLM) -> None:
    names = TokenNames(llm.get_tokenizer())

    class Twins(TokenNames):
        def __getitem__(self, token: int) -> str:
            return "a" if token in (5, 6, 7) else names[token]

    row = Logprobs(
        np.array([5, 6, 9, 7], np.int32),
        np.array([3.0, 2.0, 1.0, 0.5], np.float32),
        np.array([1, 2, 3, 4], np.int32),
        0.0,
    )
    found = Twins(llm.get_tokenizer()).best(row, 7)
    assert found == {"token_id:5": 3.0, "token_id:6": 2.0, names[9]: 1.0, "a": 0.5}
    assert Twins(llm.get_tokenizer()).best(row, 5)["a"] == 3.0


def test_bos_before_a_prompt_takes_no_place(golden: Path) -> None:
    with LLM(golden / "arch-gemma3" / "hf", max_model_len=64) as llm:
        tokenizer: LLMTokenizer = llm.get_tokenizer()
    assert tokenizer.bos_token_id is not None
    tokens = tokenizer.encode("ab c")
    assert tokens[0] == tokenizer.bos_token_id
    places = places_in_prompt(tokenizer, tokens, "ab c")
    assert places[:2] == [0, 0] and max(places) < 4
    spelled = tokenizer.decode(tokens[:1]) + "ab c"
    assert places_in_prompt(tokenizer, tokens, spelled)[1] == len(spelled) - 4
