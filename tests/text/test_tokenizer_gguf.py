"""Tokenizers built from GGUF metadata give llama.cpp's ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Regex, pre_tokenizers

from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.loaders.tokenizer.pretokenizers import PRE_TOKENIZERS
from sdk.quant.errors import UnsupportedError

VECTORS = json.loads((Path(__file__).parent / "llama_cpp_vectors.json").read_text("utf-8"))


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "golden"])
def test_ids_equal_llama_cpp(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    assert len(VECTORS[name]) > 140
    wrong = [
        (text, special)
        for text, special, ids in VECTORS[name]
        if tokenizer.encode(text, add_special_tokens=False, parse_special=special) != ids
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "golden"])
def test_decoding_gives_the_text_back(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(f"{name}_tokenizer")
    for text, _, _ in VECTORS[name]:
        if "\x01" in text or "\u2581" in text:  # SmolLM2 has no tokens for some control bytes
            continue
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_specials_of_real_models_are_read(smollm2_tokenizer: Any, gemma3_tokenizer: Any) -> None:
    assert smollm2_tokenizer.eos_token_ids == {0, 2}
    assert smollm2_tokenizer.bos_token_id == 1
    assert smollm2_tokenizer.vocab_size == 49152
    assert gemma3_tokenizer.eos_token_ids == {1, 106}  # </s> (212) is an HTML tag to Gemma
    assert gemma3_tokenizer.encode("")[:1] == [2]
    assert gemma3_tokenizer.vocab_size == 262144
    assert smollm2_tokenizer.warnings == ()


def test_bos_is_not_given_twice(gemma3_tokenizer: Any, spm: Any) -> None:
    assert gemma3_tokenizer.encode("<bos>hi") == gemma3_tokenizer.encode("hi")
    assert spm.encode("<s>")[0] == 1 and spm.encode("<s>").count(1) == 1


def test_text_of_a_user_never_becomes_a_control_token(bpe: Any, spm: Any) -> None:
    assert bpe.encode("<|im_end|>") == [260]
    plain = bpe.encode("<|im_end|>", parse_special=False)
    assert 260 not in plain and bpe.decode(plain) == "<|im_end|>"
    # "<" + "s" + ">" would merge into the control token <s>, "<0x0A>" is the name of a byte.
    for text in ("<s>", "</s>", "<0x0A>"):
        ids = spm.encode(text, add_special_tokens=False, parse_special=False)
        assert not set(ids) & {0, 1, 2}
        assert spm.decode(ids) == text


def test_user_defined_tokens_are_found_in_any_text(bpe: Any) -> None:
    assert bpe.encode("a<tool>b", parse_special=False)[1] == 261
    assert 261 not in bpe.special_ids
    assert bpe.decode([261]) == "<tool>"


def test_spm_joins_the_best_score_first_and_falls_back_to_bytes(spm: Any) -> None:
    names = [spm.id_to_token(i) for i in spm.encode("ab é", add_special_tokens=False)]
    # ▁a scores better than ▁ab, but ab best of all: ab first, then ▁ + ab.
    assert names == ["▁ab", "▁", "<0xC3>", "<0xA9>"]


def test_spm_equals_sentencepiece_on_any_text(sentencepiece_model: Path) -> None:
    import sentencepiece

    oracle = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    kinds = (("unknown", 2), ("control", 3), ("byte", 6))
    count = oracle.vocab_size()
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [oracle.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [oracle.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": [
            next((kind for name, kind in kinds if getattr(oracle, f"is_{name}")(i)), 1)
            for i in range(count)
        ],
    }
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")

    @settings(max_examples=300, deadline=None)
    @given(text=st.text("thecatsmodgnlrw  é日<>/s0x", min_size=1, max_size=40))
    def check(text: str) -> None:
        ids = oracle.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False, parse_special=False) == ids
        assert tokenizer.decode(ids) == text

    check()


def test_missing_bytes_become_the_unknown_token(make_metadata: Any) -> None:
    metadata = make_metadata["llama"]()
    kinds = list(metadata["tokenizer.ggml.token_type"])
    kinds[3 + 0xC3] = 5
    tokenizer = tokenizer_from_gguf({**metadata, "tokenizer.ggml.token_type": kinds}, "x.gguf")
    assert tokenizer.encode("é", add_special_tokens=False)[-1] == 0


def test_arrays_may_be_numpy(make_metadata: Any) -> None:
    metadata = make_metadata["llama"]()
    arrays = {
        "tokenizer.ggml.scores": np.array(metadata["tokenizer.ggml.scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(metadata["tokenizer.ggml.token_type"], np.int32),
    }
    one, other = (tokenizer_from_gguf(m, "x.gguf") for m in (metadata, {**metadata, **arrays}))
    assert one.encode("ab a  b") == other.encode("ab a  b")


def test_eos_is_added_where_the_file_says_so(make_metadata: Any) -> None:
    metadata = make_metadata["llama"](**{"tokenizer.ggml.add_eos_token": True})
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    assert tokenizer.encode("a")[-1] == 2
    assert tokenizer.encode("a", add_special_tokens=False)[-1] != 2
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert tokenizer_from_gguf(metadata, "x.gguf").encode("a")[0] != 1


def test_lone_surrogates_are_read_as_replacement_characters(bpe: Any, spm: Any) -> None:
    for tokenizer in (bpe, spm):
        assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
        assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")


def test_ids_without_a_token_add_no_text(bpe: Any) -> None:
    assert bpe.decode([104, 100000, -1, 105]) == bpe.decode([104, 105])
    assert bpe.id_to_token(262) is None and bpe.id_to_bytes(-1) == b""


def test_invalid_utf8_is_decoded_as_python_does(bpe: Any) -> None:
    assert bpe.decode([0xE6, 0x97, 0x41, 0xFF]) == b"\xe6\x97\x41\xff".decode("utf-8", "replace")


def test_a_well_known_end_of_turn_counts_whatever_its_type(make_metadata: Any) -> None:
    metadata = make_metadata["gpt2"]()
    metadata["tokenizer.ggml.token_type"] = [1] * 262
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    assert tokenizer.eos_token_ids == {259, 260}
    assert {259, 260} <= tokenizer.special_ids


def test_end_of_message_is_no_end_in_the_harmony_format(make_metadata: Any) -> None:
    metadata = make_metadata["gpt2"]()
    metadata["tokenizer.ggml.tokens"] += ["<|return|>", "<|call|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3]
    metadata["tokenizer.ggml.eos_token_id"] = 262
    assert tokenizer_from_gguf(metadata, "x.gguf").eos_token_ids == {260, 262, 263}


def test_a_file_older_than_names_of_pre_tokenizers_is_reported(
    make_metadata: Any, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = make_metadata["gpt2"](**{"tokenizer.ggml.pre": None})
    tokenizer = tokenizer_from_gguf(metadata, "odd.gguf")
    assert len(tokenizer.warnings) == 1 and "tokenizer.ggml.pre is miss" in tokenizer.warnings[0]
    assert "odd.gguf" in caplog.text


def test_an_unknown_pre_tokenizer_is_refused_unless_another_one_is_named(
    make_metadata: Any,
) -> None:
    metadata = make_metadata["gpt2"](**{"tokenizer.ggml.pre": "made-up"})
    with pytest.raises(UnsupportedError, match=r"odd.gguf: .*pre is 'made-up'.*tokenizer=FOLDER"):
        tokenizer_from_gguf(metadata, "odd.gguf")
    found = tokenizer_from_gguf(metadata, "odd.gguf", pre_tokenizer="qwen2")
    known = tokenizer_from_gguf(make_metadata["gpt2"](**{"tokenizer.ggml.pre": "qwen2"}), "x.gguf")
    assert found.warnings == ()
    assert found.encode("hello 2024 worlds") == known.encode("hello 2024 worlds")


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("gpt2", "made-up", "expected one of .*qwen2.*, found 'made-up'"),
        ("llama", "qwen2", "tokenizer.ggml.model is 'gpt2', found 'llama'"),
    ],
)
def test_a_pre_tokenizer_that_cannot_be_used_is_refused(
    make_metadata: Any, kind: str, name: str, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=rf"x.gguf: pre_tokenizer.*{message}"):
        tokenizer_from_gguf(make_metadata[kind](), "x.gguf", pre_tokenizer=name)


BYTEWISE = sorted(name for name, pre in PRE_TOKENIZERS.items() if not pre.raw)


@pytest.mark.parametrize("pre", BYTEWISE)
def test_every_pre_tokenizer_compiles_and_loses_nothing(make_metadata: Any, pre: str) -> None:
    tokenizer = tokenizer_from_gguf(make_metadata["gpt2"](**{"tokenizer.ggml.pre": pre}), "x.gguf")
    text = "Hello they'LL pay 12345.67€\r\n\n  你好 мир, don't!  \t…(x)ﬀ e\u0301"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_word_that_is_a_token_wins_over_merges_in_the_llama3_family(make_metadata: Any) -> None:
    metadata = make_metadata["gpt2"]()
    metadata["tokenizer.ggml.tokens"].append("world")
    metadata["tokenizer.ggml.token_type"].append(1)
    assert 262 not in tokenizer_from_gguf(metadata, "x.gguf").encode("world")
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert tokenizer_from_gguf(metadata, "x.gguf").encode("world") == [262]


def test_gemma4_merges_characters_and_keeps_newline_runs_whole() -> None:
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["a", "b", "▁", "▁a", "\n", "\n\n"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens + pieces,
        "tokenizer.ggml.token_type": [2, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.merges": ["▁ a"],
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    names = [tokenizer.id_to_token(i) for i in tokenizer.encode("b a\n\né\n")]
    assert names == ["<s>", "b", "▁a", "\n\n", "<0xC3>", "<0xA9>", "\n"]
    assert tokenizer.decode(tokenizer.encode("b a\n\né\n")) == "b a\n\né\n"


@pytest.mark.parametrize("pre", ["gemma4", "granite-embed-multi-311m", "sarvam-moe"])
def test_a_split_of_gemma4_reads_characters_in_a_file_of_a_byte_level_model(pre: str) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["<unk>", "<bos>", "é", "▁", "▁é"],
        "tokenizer.ggml.token_type": [2, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["▁ é"],
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    assert tokenizer.encode("é é") == [*([1] if pre != "sarvam-moe" else []), 2, 4]
    assert tokenizer.decode([2, 4]) == "é é"


SPLITS = {
    "afmoe": "a|1|234|567|ไ|.b",
    "tiny_aya": "a|1|234|567|ไ|.b",
    "superbpe": "a|1|234|567|ไ.b",
    "spark2_5": "a|1|2|3|4|5|6|7|ไ|.b",
    "kimi-k2": "a|123|456|7|ไ|.b",
    "minicpm5": "a|123|456|7|ไ|.b",
    "laguna": "a|1|2|3|4|5|6|7|ไ|.b",
    "chameleon": "a|1|2|3|4|5|6|7|ไ|.|b",
}


@pytest.mark.parametrize("pre", SPLITS)
def test_numbers_are_split_as_the_model_was_trained(pre: str) -> None:
    steps = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[pre].patterns]
    words = pre_tokenizers.Sequence(steps).pre_tokenize_str("a1234567ไ.b")
    assert "|".join(word for word, _ in words) == SPLITS[pre]


def test_phi3_specials_swallow_the_space_after_them(make_metadata: Any) -> None:
    metadata = make_metadata["llama"](**{"general.name": "Phi-3 mini"})
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    assert tokenizer.encode("</s>\n a") == tokenizer.encode("</s>a")
    assert tokenizer.encode("<s>\n a") != tokenizer.encode("<s>a")
