"""Long texts are read in portions, or refused, with the ids of the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sdk.loaders.tokenizer.backend_traits import BackendTraits
from sdk.loaders.tokenizer.base import TokenizerFacts
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.loaders.tokenizer.hf import JsonTokenizer
from sdk.loaders.tokenizer.portions import PORTION, portions
from sdk.loaders.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from sdk.quant.tokenizer import TooManyTokens

TEXT = st.lists(
    st.sampled_from(
        [
            *(
                "a",
                "Word",
                "don't",
                "I'll",
                "ÄÖ",
                "汉字",
                "テスト",
                "한국",
                "e\u0301",
                "😀",
                "\u0301",
            ),
            *(
                "1",
                "1234567",
                "٣",
                "½",
                ".",
                ",",
                "...",
                "!?",
                "(",
                ")",
                "'",
                '"',
                "`",
                "|",
                "$",
                "_",
            ),
            *(
                " ",
                " ",
                " ",
                " a",
                " b",
                "  ",
                "\t",
                "\u00a0",
                "\u3000",
                "\n",
                "\n",
                "\n\n",
                "\r\n",
            ),
            *("<|im_end|>", "/", "\\", "。", "，", "．", "\u2028"),
        ]
    ),
    max_size=40,
).map("".join)
DIFFERENT = sorted(
    {pre for pre in PRE_TOKENIZERS.values() if not pre.raw and not pre.joins_words}, key=str
)


def splitter(pre: PreTokenizer) -> Any:
    steps = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*steps, byte_level])


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("number", range(len(DIFFERENT)))
def test_no_pre_tokenizer_makes_a_word_across_a_cut(number: int) -> None:
    pre = splitter(DIFFERENT[number])

    @settings(max_examples=150, deadline=None)
    @given(text=TEXT, size=st.integers(1, 6))
    def check(text: str, size: int) -> None:
        parts = list(portions(text, size))
        assert "".join(parts) == text
        words = [word for part in parts for word, _ in pre.pre_tokenize_str(part)]
        assert words == [word for word, _ in pre.pre_tokenize_str(text)]

    check()
    assert len(list(portions("one two three\nfour", 1))) == 4


@pytest.mark.parametrize("name", ["superbpe", "exaone-moe"])
def test_a_long_text_is_not_cut_where_words_have_spaces(make_metadata: Any, name: str) -> None:
    made = make_metadata["gpt2"](**{"tokenizer.ggml.pre": name})
    count = len(made["tokenizer.ggml.tokens"])
    made["tokenizer.ggml.tokens"].append("aĠ")
    made["tokenizer.ggml.token_type"].append(1)
    made["tokenizer.ggml.merges"].append("a Ġ")
    tokenizer = tokenizer_from_gguf(made, "x.gguf")
    assert tokenizer.encode("a " * 3 * PORTION + "a") == [count] * 3 * PORTION + [ord("a")]


def prose(count: int) -> str:
    line = (
        "The quick brown fox, aged 12345 years, doesn't jump over\nthe lazy dog: ÄÖÜ 汉字测试。\n"
    )
    return (line * (count // len(line) + 1))[:count]


@pytest.mark.parametrize("parse_special", [True, False])
def test_long_prose_has_the_ids_of_the_whole(smollm2_tokenizer: Any, parse_special: bool) -> None:
    text = prose(5 * PORTION) + "<|im_end|> and on\n" + prose(3 * PORTION)
    step = PORTION // 8  # short enough to be read at once, and cut where words end
    expected: list[int] = []
    for part in portions(text, step):
        assert len(part) <= PORTION
        expected += smollm2_tokenizer.encode(part, parse_special=parse_special)
    assert smollm2_tokenizer.encode(text, parse_special=parse_special) == expected
    assert smollm2_tokenizer.decode(expected, skip_special_tokens=False) == text


def library(kind: str) -> Tokenizer:
    """A tokenizer.json of a kind, with a few merges."""
    if kind == "metaspace":
        units = [f"<0x{byte:02X}>" for byte in range(256)]
        words = [*"▁abcdethlo", "▁t", "he", "▁the"]
        merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    else:
        units = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = ["Ġt", "he", "Ġthe"]
        merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys([*units, *words]))}
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=kind == "metaspace")
    tokenizer = Tokenizer(model)
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        tokenizer.pre_tokenizer = splitter(PRE_TOKENIZERS["qwen2"])
        tokenizer.decoder = decoders.ByteLevel()
    if kind == "nfc":
        tokenizer.normalizer = normalizers.NFC()
    if kind == "strips":
        tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    if kind == "shrinks":
        tokenizer.normalizer = normalizers.Strip()
    if kind == "unknown words":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\w+ \w+"), behavior="isolated"), splitter(DIFFERENT[0])]
        )
    return tokenizer


KINDS = {  # (divisible, bounded)
    "bytes": (True, True),
    "nfc": (True, True),
    "strips": (True, False),
    "metaspace": (False, True),
    "shrinks": (False, False),
    "unknown words": (False, True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_any_kind_gives_the_ids_of_the_whole(kind: str) -> None:
    backend = library(kind)
    tokenizer = JsonTokenizer(library(kind), TokenizerFacts(), kind)
    traits = BackendTraits.of(backend)
    assert (traits.divisible, bool(traits.spellings)) == KINDS[kind]
    for text in (prose(3 * PORTION), " " * 70_000, "<|end|>   the " * 2000, "the" * 30_000):
        expected = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected
        try:
            assert tokenizer.encode(text, add_special_tokens=False, stop_after=2) == []
        except TooManyTokens as error:
            assert 2 < error.at_least <= len(expected)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", [kind for kind, (_, bounded) in KINDS.items() if bounded])
def test_no_text_has_fewer_tokens_than_the_bound(kind: str) -> None:
    backend = library(kind)
    traits = BackendTraits.of(backend)

    @settings(max_examples=200, deadline=None)
    @given(text=TEXT)
    def check(text: str) -> None:
        count = len(backend.encode(text, add_special_tokens=False).ids)
        assert traits.fewest_tokens(text) <= count

    check()


def test_special_tokens_around_a_long_text_are_there_once(smollm2_tokenizer: Any) -> None:
    from tokenizers import processors

    backend = library("bytes")
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    first, last = backend.token_to_id("<s>"), backend.token_to_id("</s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", first), ("</s>", last)]
    )
    tokenizer = JsonTokenizer(backend, TokenizerFacts(), "around")
    ids = tokenizer.encode(prose(3 * PORTION))
    assert (ids[0], ids[-1]) == (first, last)
    assert ids[1:-1] == tokenizer.encode(prose(3 * PORTION), add_special_tokens=False)


@pytest.mark.parametrize("name", ["smollm2_tokenizer", "gemma3_tokenizer"])
def test_a_text_that_cannot_fit_is_not_tokenized(name: str, request: Any) -> None:
    tokenizer = request.getfixturevalue(name)
    for text in ("a" * 3_000_000, "abcdefghij" * 300_000, " " * 3_000_000, "word " * 600_000):
        with pytest.raises(TooManyTokens) as caught:
            tokenizer.encode(text, stop_after=8000)
        assert caught.value.at_least > 8000
    assert len(tokenizer.encode("word " * 3000, stop_after=8000)) <= 8000


@pytest.mark.parametrize("name", ["smollm2_tokenizer", "json"])
def test_the_bound_of_a_conversation_counts_what_is_before_its_long_message(
    name: str, request: Any
) -> None:
    if name == "json":
        template = "{% for one in messages %}{{ one.content }}<|end|>{% endfor %}"
        backend = library("strips")
        special = frozenset([backend.token_to_id("<|end|>")])
        facts = TokenizerFacts(special_ids=special, chat_template=template)
        tokenizer: Any = JsonTokenizer(backend, facts, name)
    else:
        tokenizer = request.getfixturevalue(name)
    said = ["<|end|> word " * 2000, "ok", "word " * 6000]  # <|end|> is a control token of "json"
    roles = ["user", "assistant", "user"]
    messages = [{"role": r, "content": text} for r, text in zip(roles, said, strict=True)]
    needed = len(tokenizer.encode_chat(messages))
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode_chat(messages, stop_after=needed - 1500)
    assert needed - 1500 < caught.value.at_least <= needed


def test_a_long_conversation_with_control_tokens_is_refused_early(smollm2_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "<|im_start|>" * 100_000}]
    with pytest.raises(TooManyTokens):
        smollm2_tokenizer.encode_chat(messages, stop_after=8000)
