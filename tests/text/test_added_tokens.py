"""Added tokens go through the decoder like any other: texts are those of the tokenizers library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from sdk import LLM, SamplingParams
from sdk.loaders.tokenizer.base import TokenizerFacts
from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.loaders.tokenizer.hf import JsonTokenizer
from sdk.loaders.tokenizer.sentencepiece import sentencepiece_metadata
from sdk.text.detokenizer import IncrementalDetokenizer
from tests.models.conftest import tiny

SPACE = "▁"
CHAIN = (decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse())
DECODERS = {
    "byte level": decoders.ByteLevel(),
    "fallback": decoders.Sequence([*CHAIN]),
    "strip": decoders.Sequence([*CHAIN, decoders.Strip(" ", 1, 0)]),
    "metaspace": decoders.Metaspace(SPACE, prepend_scheme="always"),
    "metaspace first": decoders.Metaspace(SPACE, prepend_scheme="first"),
    "metaspace never": decoders.Metaspace(SPACE, prepend_scheme="never"),
    "strip each": decoders.Sequence([CHAIN[0], decoders.Strip(" ", 1, 0)]),
    "two spaces": decoders.Sequence([*CHAIN, decoders.Strip(" ", 2, 0)]),
    "none": None,
}
ADDED = ["▁▁", "▁▁▁▁", "<0x09>", "<0xE2>", "é", "ĠĠ", "<x>▁", " lead", "\n\n", "a▁▁b", "▁"]
SPECIAL = ["<s>", "<|end▁of|>"]
GOLDEN = ("arch-gemma3", "arch-llama3", "arch-qwen3")


def backend_with(decoder: Any) -> Any:
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"abcĠ.,", "▁a", "▁▁c", "b▁a", "."]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoder
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in ADDED])
    backend.add_special_tokens(SPECIAL)
    return backend


def own(backend: Any) -> JsonTokenizer:
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    facts = TokenizerFacts(special_ids=frozenset(special))
    return JsonTokenizer(Tokenizer.from_str(backend.to_str()), facts, "tokenizer.json")


def streamed(tokenizer: Any, ids: list[int], skip: bool) -> str:
    pieces = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    return "".join(map(pieces.push, ids)) + pieces.finish()


def check(tokenizer: JsonTokenizer, backend: Any, ids: list[int], skip: bool) -> None:
    expected = backend.decode(ids, skip_special_tokens=skip)
    found = tokenizer.decode(ids, skip_special_tokens=skip)
    if "�" not in expected:
        assert found == expected
    elif not tokenizer.bytewise:
        return  # the library makes U+FFFD of all bytes in a row if one is wrong
    assert re.sub("�+", "", streamed(tokenizer, ids, skip)) == re.sub("�+", "", found)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=100, deadline=None)
def test_ids_have_the_text_of_the_library(name: str, data: Any, skip: bool) -> None:
    backend = backend_with(DECODERS[name])
    tokenizer = own(backend)
    late = backend.token_to_id("a")
    some = st.integers(late, backend.get_vocab_size() - 1) | st.integers(0, late)
    check(tokenizer, backend, data.draw(st.lists(some, max_size=8)), skip)


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_of_real_vocabularies_have_the_text_of_the_library(golden: Path, name: str) -> None:
    folder = golden / name / "hf"
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(folder)
    added = sorted(backend.get_added_tokens_decoder())
    count = backend.get_vocab_size()
    assert isinstance(tokenizer, JsonTokenizer)

    @given(st.lists(st.integers(0, count - 1) | st.sampled_from(added), max_size=8), st.booleans())
    @settings(max_examples=60, deadline=None)
    def run(ids: list[int], skip: bool) -> None:
        if skip:  # files next to it may call more tokens special
            ids = [i for i in ids if i not in tokenizer.special_ids]
        check(tokenizer, backend, ids, skip)

    run()


def test_spaces_are_stripped_only_at_the_beginning_of_a_stream() -> None:
    backend = backend_with(DECODERS["two spaces"])
    ids = [backend.token_to_id(text) for text in ("a", "▁", "▁a")]
    assert streamed(own(backend), ids, True) == backend.decode(ids) == "a  a"


def test_the_bytes_of_an_added_token_are_those_of_its_text() -> None:
    backend = backend_with(DECODERS["fallback"])
    tokenizer = own(backend)
    for text, data in (("▁▁▁▁", b"    "), ("<0x09>", b"\t"), ("<x>▁", b"<x> ")):
        assert tokenizer.id_to_bytes(backend.token_to_id(text)) == data


def test_metaspace_drops_every_space_of_the_first_token_only() -> None:
    backend = backend_with(DECODERS["metaspace"])
    tokenizer = own(backend)
    ids = [backend.token_to_id(text) for text in ("▁▁", "▁▁c", "a▁▁b")]
    assert tokenizer.decode(ids) == streamed(tokenizer, ids, True) == "  ca  b"
    assert tokenizer.decode(ids[1:]) == "ca  b" and tokenizer.decode(ids[2:]) == "ab"


def test_a_user_defined_piece_of_a_tokenizer_model_spells_spaces(tmp_path: Path) -> None:
    def message(*fields: tuple[int, bytes | int]) -> bytes:
        out = b""
        for number, value in fields:
            if isinstance(value, int):
                out += bytes([number << 3, value])
            else:
                out += bytes([number << 3 | 2, len(value)]) + value
        return out

    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("▁▁▁", 4), ("▁", 1), ("a", 1)]
    data = b"".join(message((1, message((1, text.encode()), (3, kind)))) for text, kind in pieces)
    data += message((2, message((3, 2))), (3, message((3, 0), (4, 0))))
    file = tmp_path / "tokenizer.model"
    file.write_bytes(data)
    metadata = sentencepiece_metadata(file)
    assert metadata is not None
    tokenizer = tokenizer_from_gguf(metadata, str(file))
    assert tokenizer.encode("a   a", add_special_tokens=False) == [5, 3, 5]
    assert tokenizer.decode([5, 3, 5]) == "a   a"


def test_a_stop_string_sees_the_spaces_of_an_added_token(tmp_path: Path) -> None:
    backend = backend_with(DECODERS["fallback"])
    tiny("llama", vocab_size=backend.get_vocab_size()).save_pretrained(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    forced = {backend.token_to_id("▁▁▁▁"): 100.0}
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias=forced)
    with LLM(tmp_path, max_model_len=64, num_threads=1) as llm:
        [plain] = llm.generate(["abc"], params)
        assert plain.outputs[0].text == " " * 12
        [stopped] = llm.generate(["abc"], params.clone(stop="     "))
    answer = stopped.outputs[0]
    assert (answer.finish_reason, answer.text, len(answer.token_ids)) == ("stop", "", 2)
