"""``LLM.get_tokenizer()`` answers the calls of transformers' tokenizers as these do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, RequestError

TEXTS = ["Hello world", "  naïve café – 日本語 🙂", "<|im_start|> is text here", ""]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


@pytest.fixture(scope="module")
def folder(golden: Path) -> Path:
    return golden / "arch-llama3" / "hf"


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[Any]:
    with LLM(folder, max_model_len=64) as llm:
        yield llm.get_tokenizer()


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_texts_become_the_same_ids(ours: Any, theirs: Any) -> None:
    for text in TEXTS:
        assert ours(text)["input_ids"] == ours(text).input_ids == theirs(text)["input_ids"]
        assert ours(text).attention_mask == theirs(text)["attention_mask"]
        assert ours.encode(text) == theirs.encode(text)
        plain = {"add_special_tokens": False}
        assert ours.encode(text, **plain) == theirs.encode(text, **plain)
        assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]
    short = {"truncation": True, "max_length": 3, "add_special_tokens": False}
    assert ours(TEXTS[0], **short).input_ids == theirs(TEXTS[0], **short)["input_ids"]


def test_ids_become_the_same_text(ours: Any, theirs: Any) -> None:
    for text in TEXTS:
        ids = theirs.encode(text)
        for skip in (False, True):
            given = {"skip_special_tokens": skip}
            wanted = theirs.decode(ids, clean_up_tokenization_spaces=False, **given)
            assert ours.decode(ids, **given) == wanted
            assert ours.batch_decode([ids], **given) == [wanted]
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        tokens = theirs.convert_ids_to_tokens(ids)
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert ours.decode(theirs.eos_token_id) == theirs.eos_token
    assert ours.convert_ids_to_tokens(10**6) is None


def test_the_named_tokens_are_the_same(ours: Any, theirs: Any) -> None:
    for role in ("bos", "eos", "pad", "unk"):
        for name in (f"{role}_token", f"{role}_token_id"):
            assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs) == ours.vocab_size
    assert ours.eos_token_id in ours.eos_token_ids
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids)
    assert ours.chat_template == theirs.chat_template


@pytest.mark.parametrize("opening", [False, True])
def test_conversations_become_the_same_text_and_ids(ours: Any, theirs: Any, opening: bool) -> None:
    given: dict[str, Any] = {"add_generation_prompt": opening}
    text = theirs.apply_chat_template(CHAT, tokenize=False, **given)
    assert ours.apply_chat_template(CHAT, tokenize=False, **given) == text
    ids = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=False, **given)
    assert ours.apply_chat_template(CHAT, **given) == ids
    assert ours.apply_chat_template(CHAT, None, tokenize=False) == theirs.apply_chat_template(
        CHAT, None, tokenize=False
    )


def test_a_tokenizer_of_a_gguf_file_knows_its_tokens_too(tiny: LLM) -> None:
    tokenizer = tiny.get_tokenizer()
    assert tokenizer.eos_token_id in tokenizer.eos_token_ids
    assert tokenizer.convert_tokens_to_ids(str(tokenizer.eos_token)) == tokenizer.eos_token_id
    ids = tokenizer("hello").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "hello"


def test_what_is_no_text_or_conversation_is_refused(ours: Any) -> None:
    for call in (
        lambda: ours.encode(3),
        lambda: ours(["a", None]),
        lambda: ours("a", truncation=True),
        lambda: ours.apply_chat_template([{"role": "user"}]),
        lambda: ours.apply_chat_template(CHAT, chat_template="{{ nothing( }}"),
    ):
        with pytest.raises(RequestError):
            call()


def test_bytes_of_tokens_add_up(ours: Any) -> None:
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False, parse_special=False)
        data = b"".join(ours.decode_bytes([token]) for token in ids)
        assert data == ours.decode_bytes(ids)
        assert data.decode() in (text, f" {text}")  # decode drops the space that may be added
    marked = ours.encode("Hi")
    assert ours.decode_bytes(marked, skip_special_tokens=True) == b" Hi"
    assert ours.decode_bytes(marked) == ours.bos_token.encode() + b" Hi"
