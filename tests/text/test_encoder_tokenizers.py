"""Tokenizers of encoders: WordPiece and Unigram from GGUF metadata and from folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.quant.errors import CheckpointError, UnsupportedError

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["un", "##able", "hello", "##s", "a", "##a", "é", "e", "##e", "中", "!", "[", "]", "cls"]
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["unable", " hellos", "É", "e\u0301", "中文", "[CLS]", "!", "\u200b"]),
        st.just("a" * 101),
        st.text(max_size=3),
    ),
    max_size=12,
).map("".join)  # fmt: skip


def bert_metadata(**changes: Any) -> dict[str, Any]:
    """A ``bert`` vocabulary as llama.cpp's converter writes it."""
    words = [word[2:] if word.startswith("##") else "▁" + word for word in WORDS]
    metadata = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": SPECIALS + words,
        "tokenizer.ggml.token_type": [3] * 5 + [1] * len(words),
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.mask_token_id": 4,
    }
    return {**metadata, **changes}


def library_bert(lowercase: bool, strip_accents: bool | None) -> Tokenizer:
    """The same as Hugging Face's files have it."""
    vocab = {word: index for index, word in enumerate(SPECIALS + WORDS)}
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(SPECIALS)
    return made


@pytest.mark.parametrize(
    ("lowercase", "strip_accents"), [(True, None), (False, None), (True, False), (False, True)]
)
def test_wordpiece_of_a_file_equals_the_library(
    lowercase: bool, strip_accents: bool | None
) -> None:
    expected = library_bert(lowercase, strip_accents)
    normalizer = {"tokenizer.ggml.normalizer.lowercase": lowercase}
    if strip_accents is not None:
        normalizer["tokenizer.ggml.normalizer.strip_accents"] = strip_accents
    ours = tokenizer_from_gguf(bert_metadata(**normalizer), "x.gguf")

    @settings(max_examples=100, deadline=None)
    @given(first=TEXTS, second=TEXTS)
    def check(first: str, second: str) -> None:
        assert ours.encode(first) == expected.encode(first).ids
        ids = expected.encode(first, add_special_tokens=False).ids
        assert ours.encode(first, add_special_tokens=False) == ids
        expected.encode_special_tokens = True
        pair = expected.encode(first, second)
        expected.encode_special_tokens = False
        assert ours.encode_pair(first, second) == (pair.ids, pair.type_ids.index(1))

    check()


def test_a_wordpiece_vocabulary_is_spelled_as_in_its_folder() -> None:
    ours = tokenizer_from_gguf(bert_metadata(), "x.gguf")
    assert [ours.id_to_token(index) for index in range(ours.vocab_size)] == SPECIALS + WORDS
    assert ours.token_names["sep_token"] == "[SEP]" and ours.bos_token_id is None
    assert ours.decode(ours.encode("Unable hellos!")) == "unable hellos!"
    assert not {2, 3} & set(ours.encode("[CLS] [SEP]", False, False))
    assert ours.encode("[CLS]", False) == [2]


def test_special_tokens_of_bert_have_their_usual_ids() -> None:
    fillers = [f"▁w{index}" for index in range(100)]
    tokens = ["[PAD]", *fillers[1:], "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁a"]
    metadata = {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens}
    ours = tokenizer_from_gguf(metadata, "x.gguf")
    assert ours.encode("a b") == [101, 104, 100, 102]
    assert {0, 100, 101, 102, 103} <= ours.special_ids


@pytest.mark.parametrize("name", ["bos", "seperator", "unknown"])
def test_a_wordpiece_file_without_a_special_token_is_refused(name: str) -> None:
    metadata = bert_metadata()
    del metadata[f"tokenizer.ggml.{name}_token_id"]
    with pytest.raises(CheckpointError, match=f"x.gguf: tokenizer.ggml.{name}_token_id"):
        tokenizer_from_gguf(metadata, "x.gguf")


def test_wordpieces_that_are_spelled_alike_are_refused() -> None:
    metadata = bert_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"][:-1], "s"]
    with pytest.raises(CheckpointError, match=r"no token twice.*##s"):
        tokenizer_from_gguf(metadata, "x.gguf")


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_an_encoder_splits_no_words_by_name(model: str, unigram: dict[str, Any]) -> None:
    metadata = bert_metadata() if model == "bert" else unigram
    with pytest.raises(UnsupportedError, match=f"pre_tokenizer='qwen2'.*found '{model}'"):
        tokenizer_from_gguf(metadata, "x.gguf", pre_tokenizer="qwen2")


# ---- Unigram -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def unigram_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Unigram model trained by sentencepiece itself, normalized like XLM-R's."""
    import sentencepiece

    path = tmp_path_factory.mktemp("unigram") / "sentencepiece.bpe"
    text = (
        "the cat sat on the mat and the dog said hello to other cats in the world ½ Ａｂ < s > / "
    )
    lines = [text[i:] + text[: i % 37] for i in range(64)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(path), vocab_size=100, model_type="unigram",
        normalization_rule_name="nmt_nfkc", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return path.with_name("sentencepiece.bpe.model")


@pytest.fixture(scope="session")
def unigram(unigram_model: Path) -> dict[str, Any]:
    """The model as llama.cpp's converter writes XLM-R's."""
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(unigram_model.read_bytes())
    pieces = SentencePieceProcessor(model_file=str(unigram_model))
    count = pieces.get_piece_size()
    plain = [pieces.id_to_piece(i) for i in range(3, count)]
    charsmap = np.frombuffer(proto.normalizer_spec.precompiled_charsmap, np.uint8)
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<s>", "<pad>", "</s>", "<unk>", *plain, "<mask>", "[PAD99]"],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * len(plain), 3, 5],
        "tokenizer.ggml.scores": [
            *[0.0] * 4, *(pieces.get_score(i) for i in range(3, count)), 0.0, -10000.0
        ],
        "tokenizer.ggml.precompiled_charsmap": charsmap.view(np.int8),
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.seperator_token_id": 2,
        "tokenizer.ggml.padding_token_id": 1,
        "tokenizer.ggml.mask_token_id": 4 + len(plain),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }  # fmt: skip


ALPHABET = st.text("the cat ld½ＡｂA bé\u3000\t\n世<s>/_▁", max_size=30)


def test_unigram_of_a_file_equals_sentencepiece(unigram: Any, unigram_model: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    expected = SentencePieceProcessor(model_file=str(unigram_model))
    ours = tokenizer_from_gguf(unigram, "x.gguf")

    @settings(max_examples=300, deadline=None)
    @given(text=ALPHABET)
    def check(text: str) -> None:
        ids = [3 if token == 0 else token + 1 for token in expected.encode(text)]
        assert ours.encode(text, False, False) == ids

    check()
    assert ours.decode(ours.encode("The cat sat")) == ours.decode(ours.encode("  The cat  sat "))


def test_control_tokens_of_unigram_stay_text_in_texts_of_users(unigram: Any) -> None:
    ours = tokenizer_from_gguf(unigram, "x.gguf")
    assert ours.encode("cat<s>", False) == [*ours.encode("cat", False), 0]
    for text in ("<s>", "cat</s>the <s>", "＜s＞ cat", "<mask><mask>", "<s>" * 500):
        ids = ours.encode(text, False, False)
        assert not set(ids) & {0, 1, 2} and ours.token_to_id("<mask>") not in ids
        assert ours.encode(text, True, False) == [0, *ids, 2]
        assert not {0, 1, 2} & set(ours.encode_continued(text))


def test_unused_pieces_are_never_read(unigram: Any) -> None:
    ours = tokenizer_from_gguf(unigram, "x.gguf")
    assert ours.vocab_size - 1 not in ours.encode("[PAD99] cat[PAD99]")


@pytest.mark.parametrize(
    ("changes", "between"),
    [({}, [2, 2]), ({"add_sep_token": False}, [2]), ({"add_bos_token": False}, [2, 2])],
)
def test_a_pair_of_xlm_r_has_two_separators(unigram: Any, changes: Any, between: Any) -> None:
    metadata = {**unigram, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    ours = tokenizer_from_gguf(metadata, "x.gguf")
    first, second = ours.encode("the cat", False), ours.encode("a mat", False)
    begin = [0] if metadata["tokenizer.ggml.add_bos_token"] else []
    assert ours.encode_pair("the cat", "a mat") == ([*begin, *first, *between, *second, 2], None)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scores", None, "scores of the pieces"),
        ("scores", [0.0], "values"),
        ("unknown_token_id", None, "unknown_token_id: expected a token id"),
        ("precompiled_charsmap", np.array([1, 2, 3], np.int8), "expected a tokenizer"),
        ("precompiled_charsmap", np.array([255, 255, 255, 127] + [7] * 9, np.uint8), "a tokenizer"),
        ("precompiled_charsmap", np.array([300], np.int32), "bytes"),
        ("precompiled_charsmap", np.zeros(9 << 20, np.uint8), "at most 8388608 bytes"),
    ],
)  # fmt: skip
def test_damage_of_a_unigram_file_is_named(
    unigram: Any, key: str, value: Any, message: str
) -> None:
    metadata = {**unigram, f"tokenizer.ggml.{key}": value}
    if key == "unknown_token_id":
        metadata["tokenizer.ggml.tokens"] = metadata["tokenizer.ggml.tokens"][:2]
        for other in ("token_type", "scores"):
            metadata[f"tokenizer.ggml.{other}"] = metadata[f"tokenizer.ggml.{other}"][:2]
        for name in ("eos", "seperator", "mask"):
            metadata[f"tokenizer.ggml.{name}_token_id"] = None
    with pytest.raises(CheckpointError, match=rf"x.gguf: .*{message}"):
        tokenizer_from_gguf(metadata, "x.gguf")


def test_a_score_that_is_no_number_is_named(unigram: Any) -> None:
    scores = [*unigram["tokenizer.ggml.scores"]]
    scores[7] = float("nan")
    with pytest.raises(CheckpointError, match=r"scores\[7\]: expected a finite number"):
        tokenizer_from_gguf({**unigram, "tokenizer.ggml.scores": scores}, "x.gguf")


# ---- folders -------------------------------------------------------------------------------------


def test_a_folder_with_a_word_list_only_is_read(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *WORDS]) + "\n", "utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    ours = tokenizer_from_folder(tmp_path)
    assert ours is not None
    expected = library_bert(True, None)
    pair = expected.encode("Unable!", "hellos 中")
    assert ours.encode_pair("Unable!", "hellos 中") == (pair.ids, pair.type_ids.index(1))


def test_a_folder_with_a_sentencepiece_model_only_is_read(
    unigram: Any, unigram_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(unigram_model.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlm-roberta"}))
    ours = tokenizer_from_folder(tmp_path)
    assert ours is not None
    file = tokenizer_from_gguf(unigram, "x.gguf")
    for text in ("The cat ½ sat", "  two  spaces ", "cat <s> cat", "cat <mask>!"):
        assert ours.encode(text) == file.encode(text)
        assert ours.encode(text, True, False) == file.encode(text, True, False)
        assert ours.encode_pair(text, "dog") == file.encode_pair(text, "dog")


@pytest.mark.parametrize("keep", [4, 5, 7, 8, 20])
def test_the_longer_text_of_a_pair_loses_its_end(keep: int) -> None:
    ours, library = tokenizer_from_gguf(bert_metadata(), "x.gguf"), library_bert(True, None)
    library.enable_truncation(keep)
    for first, second in (("hello a a a a", "hellos"), ("hello", "a a ! ! !"), ("a a a", "! ! !")):
        pair = library.encode(first, second)
        assert ours.encode_pair(first, second, keep=keep) == (pair.ids, pair.type_ids.index(1))
        assert ours.shorten(ours.encode(first), keep) == library.encode(first).ids


def test_a_text_of_a_decoder_is_shortened_at_its_end(bpe: Any) -> None:
    assert bpe.shorten([1, 2, 3], 2) == [1, 2] and bpe.shorten([1, 2], 2) == [1, 2]
    assert bpe.encode_pair("he", "llo") == ([*bpe.encode("he"), *bpe.encode("llo")], None)
    assert bpe.encode_pair("hehe", "llo", keep=3)[0] == [*bpe.encode("he"), *bpe.encode("ll")]
