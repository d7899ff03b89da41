"""Prompts with a suffix: what reaches the model, what ends the answer, what is rejected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sdk import LLM, RequestError, SamplingParams
from tests.api.engines import SHORT

NAMES = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
PREFIX, SUFFIX, MIDDLE, PAD = range(256, 260)


@pytest.fixture(scope="module")
def coder(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The tiny model with a tokenizer of bytes and fill-in-the-middle tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({text: number for number, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    backend.save(str(folder / "tokenizer.json"))
    with LLM(tiny_path, max_model_len=128, tokenizer=str(folder)) as llm:
        yield llm


def text(llm: LLM, ids: list[int]) -> str:
    return llm.get_tokenizer().decode(ids)


def test_prefix_and_suffix_become_one_prompt(coder: LLM) -> None:
    [output] = coder.generate({"prompt": "def f(", "suffix": "  return x"}, SHORT)
    assert output.prompt == "<|fim_prefix|>def f(<|fim_suffix|>  return x<|fim_middle|>"
    assert output.prompt_token_ids[0] == PREFIX and output.prompt_token_ids[-1] == MIDDLE
    [same] = coder.generate({"prompt_token_ids": output.prompt_token_ids}, SHORT)
    assert output.outputs[0].token_ids == same.outputs[0].token_ids
    [first] = coder.generate({"prompt": "a", "suffix": "b", "suffix_first": True}, SHORT)
    assert first.prompt == "<|fim_suffix|>b<|fim_prefix|>a<|fim_middle|>"
    [empty] = coder.generate({"prompt": "", "suffix": ""}, SHORT)
    assert empty.prompt_token_ids == [PREFIX, SUFFIX, MIDDLE]


def test_control_tokens_in_the_code_are_text(coder: LLM) -> None:
    [output] = coder.generate({"prompt": "a<|fim_pad|>", "suffix": "<|fim_middle|>b"}, SHORT)
    ids = output.prompt_token_ids
    assert [i for i in ids if i >= 256] == [PREFIX, SUFFIX, MIDDLE]
    assert "a<|fim_pad|>" in text(coder, ids)


def test_a_separator_ends_the_answer(coder: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={PAD: 100}, ignore_eos=False)
    asked = {"prompt": "a", "suffix": "b"}
    answer = coder.generate(asked, params)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason, answer.text) == ("stop", PAD, "")
    plain = coder.generate("a", params)[0].outputs[0]
    assert plain.finish_reason == "length"
    going_on = coder.generate(asked, params.clone(ignore_eos=True))[0].outputs[0]
    assert going_on.token_ids == [PAD] * 8
    own = coder.generate(asked, params.clone(stop_token_ids=[PAD]))[0].outputs[0]
    assert own.stop_reason == PAD


def test_too_long_a_prompt_is_rejected_or_shortened_at_its_far_ends(coder: LLM) -> None:
    asked = {"prompt": "p" * 200, "suffix": "s" * 200}
    with pytest.raises(RequestError, match="context holds 128"):
        coder.generate(asked, SHORT)
    params = SHORT.clone(truncate_prompt_tokens=43)
    [output] = coder.generate(asked, params)
    assert text(coder, output.prompt_token_ids).replace("|", "") == (
        "<fim_prefix>" + "p" * 30 + "<fim_suffix>" + "s" * 10 + "<fim_middle>"
    )
    [output] = coder.generate(asked, SHORT.clone(truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == 128 - SHORT.max_tokens  # type: ignore[operator]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": "a", "suffix": 3}, "suffix: expected a string"),
        ({"prompt": "a", "suffix_first": True}, "suffix: expected a string"),
        ({"prompt": ["a"], "suffix": "b"}, "prompt: expected a string"),
        ({"prompt": "a", "suffix": "b", "suffix_first": 1}, "suffix_first: expected True or False"),
        ({"prompt_token_ids": [1], "suffix": "b"}, "with 'prompt' also 'suffix'"),
    ],
)
def test_bad_prompts_are_rejected(coder: LLM, asked: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        coder.generate(asked, SHORT)


def test_a_model_without_the_tokens_says_what_is_missing(tiny: LLM) -> None:
    with pytest.raises(RequestError, match=r"no fill-in-the-middle tokens \(such as"):
        tiny.generate({"prompt": "a", "suffix": "b"}, SHORT)


def test_suffixes_work_in_streams_and_with_a_cache_salt(coder: LLM) -> None:
    asked = {"prompt": "def f(", "suffix": "x", "cache_salt": "s"}
    [whole] = coder.generate(asked, SHORT)
    pieces = [piece.outputs[0].text for piece in coder.stream(asked, SHORT)]
    assert "".join(pieces) == whole.outputs[0].text
