"""Tokenizers of CLIP and SigLIP beside transformers' classes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece
from hypothesis import given, settings, strategies as st

from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from sdk.loaders.tokenizer.siglip import siglip_tokenizer
from sdk.quant.errors import CheckpointError
from tests.dual_models import TEXTS, their_tokenizer, write_tokenizer

PIECES = st.one_of(
    st.sampled_from(
        [
            *TEXTS,
            *(" leading", "tail ", "a\tb\nc", "naïve Café ß", "ﬁne ½ ㎏", "don't-stop (now) [x]"),
            *("emoji 😀", "中文 字", "▁x ▁ y", "a . b", "!!!", "a\u3000b", "A\u00a0B", "e\u0301"),
            *("a\u200bb", "two   red\n bicycles", "A.B.C", "x\x1cy", "İ", "'LL we've"),
        ]
    ),
    st.text(max_size=4),
)


class Both(NamedTuple):
    kind: str
    ours: Any
    theirs: Any


@pytest.fixture(scope="module", params=["clip", "siglip", "siglip2"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(request.param, folder)
    return Both(
        request.param, tokenizer_from_folder(folder), their_tokenizer(request.param, folder)
    )


@settings(max_examples=120, deadline=None)
@given(st.lists(PIECES, max_size=5).map("".join))
def test_texts_become_the_tokens_of_transformers(both: Both, text: str) -> None:
    if "<" in text:  # SigLIP's spells what follows a special token in a text otherwise
        text = text.replace("<", "")
    # embed() puts texts in lower case for SigLIP, by Python as SiglipTokenizer does
    given = text if both.kind == "clip" else text.lower()
    assert list(both.ours.encode(given)) == both.theirs(text).input_ids


def test_every_white_space_is_that_of_transformers(both: Both) -> None:
    spaces = [chr(code) for code in range(0x3001) if chr(code).isspace()]
    texts = [f"a photo{space}of a{space}{space}cat{space}" for space in spaces]
    assert len(spaces) == 29
    for text in texts:
        assert list(both.ours.encode(text)) == both.theirs(text).input_ids, repr(text)


def test_a_model_of_another_kind_is_named(tmp_path: Path) -> None:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=made,
        vocab_size=60,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    file = tmp_path / "spiece.model"
    file.write_bytes(made.getvalue())
    with pytest.raises(CheckpointError, match=r"a Unigram model .* found a model of type 2"):
        siglip_tokenizer(file, {})
    file.write_bytes(b"\x0a\xff")
    with pytest.raises(CheckpointError, match="expected a tokenizer model"):
        siglip_tokenizer(file, {})
