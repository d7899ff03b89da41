"""Fill-in-the-middle tokens, and the order of prompts with a suffix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sdk.api.errors import RequestError
from sdk.loaders.tokenizer.base import TokenizerFacts
from sdk.loaders.tokenizer.fim import fim_tokens
from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.loaders.tokenizer.hf import JsonTokenizer
from sdk.quant.errors import CheckpointError
from sdk.requests.prompts.kinds import fim_prompt
from tests.text.conftest import tiny_bpe, tiny_spm

#: Spellings, the text of a prompt in the default order, and with the other one.
KNOWN = {
    "qwen": ("<|fim_prefix|> <|fim_suffix|> <|fim_middle|>", "PpSsM", "SsPpM"),
    "starcoder": ("<fim_prefix> <fim_suffix> <fim_middle>", "PpSsM", "SsPpM"),
    "santacoder": ("<fim-prefix> <fim-suffix> <fim-middle>", "PpSsM", "SsPpM"),
    "deepseek": ("<｜fim▁begin｜> <｜fim▁hole｜> <｜fim▁end｜>", "PpSsM", "SsPpM"),
    "codellama": ("▁<PRE> ▁<SUF> ▁<MID>", "PpSsM", "PSsMp"),
    "glm": ("<|code_prefix|> <|code_suffix|> <|code_middle|>", "PpSsM", "SsPpM"),
    "seed-coder": ("<[fim-prefix]> <[fim-suffix]> <[fim-middle]>", "SsPpM", "PpSsM"),
}


def with_tokens(names: list[str], **changes: Any) -> Any:
    tiny = tiny_bpe(**changes)
    tiny["tokenizer.ggml.tokens"] = [*tiny["tokenizer.ggml.tokens"], *names]
    tiny["tokenizer.ggml.token_type"] = [*tiny["tokenizer.ggml.token_type"], *[3] * len(names)]
    return tokenizer_from_gguf(tiny, "x.gguf")


def prompt(tokenizer: Any, first: bool | None = None, keep: int | None = None) -> str:
    prefix = tokenizer.encode("pppp", False)
    suffix = tokenizer.encode_continued("ssss")
    ids = fim_prompt(tokenizer, prefix, suffix, first, keep)
    fim = tokenizer.fim_tokens
    spelled = {fim.prefix: "P", fim.suffix: "S", fim.middle: "M"}
    return "".join(spelled.get(i) or tokenizer.decode([i]) for i in ids)


@pytest.mark.parametrize("name", KNOWN)
def test_known_spellings_give_the_model_s_order(name: str) -> None:
    spelled, usual, other = KNOWN[name]
    tokenizer = with_tokens(spelled.split())
    first = tokenizer.fim_tokens.suffix_first

    def long(order: str) -> str:
        return order.replace("p", "pppp").replace("s", "ssss")

    assert prompt(tokenizer) == prompt(tokenizer, first) == long(usual)
    assert prompt(tokenizer, not first) == long(other)


def test_a_model_without_a_middle_token_begins_with_the_suffix() -> None:
    tokenizer = with_tokens(["[PREFIX]", "[SUFFIX]"])
    assert prompt(tokenizer) == prompt(tokenizer, True) == "SssssPpppp"
    with pytest.raises(RequestError, match="suffix_first: expected True or nothing"):
        prompt(tokenizer, False)


def test_a_model_without_such_tokens_says_so(smollm2_tokenizer: Any) -> None:
    assert smollm2_tokenizer.fim_tokens is None
    with pytest.raises(RequestError, match="no fill-in-the-middle tokens"):
        fim_prompt(smollm2_tokenizer, [5], [6], None, None)
    assert with_tokens(["<fim_prefix>", "<fim_suffix>"]).fim_tokens is None


@pytest.mark.parametrize(
    "keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")]
)
def test_the_keys_of_a_gguf_file_name_the_tokens(keys: tuple[str, ...]) -> None:
    named = {f"tokenizer.ggml.{key}_token_id": 97 + i for i, key in enumerate(keys)}
    fim = with_tokens([], **named).fim_tokens
    assert (fim.prefix, fim.suffix, fim.middle) == (97, 98, 99)
    assert not fim.suffix_first
    both = with_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], **named)
    assert both.fim_tokens.prefix == 97
    with pytest.raises(CheckpointError, match=keys[0]):
        with_tokens([], **{**named, f"tokenizer.ggml.{keys[0]}_token_id": 10**6})


def test_separators_of_files_end_a_middle() -> None:
    names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<file_sep>", "other"]
    tokenizer = with_tokens(names)
    ends = {tokenizer.id_to_token(i) for i in tokenizer.fim_tokens.ends}
    assert ends == set(names) - {"other"}


def test_too_long_a_prompt_keeps_what_is_next_to_the_middle() -> None:
    tokenizer = with_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    assert prompt(tokenizer, keep=9) == "PppppSssM"
    assert prompt(tokenizer, keep=11) == prompt(tokenizer)
    prefix, suffix = list(range(50)), list(range(100, 150))
    ids = fim_prompt(tokenizer, prefix, suffix, None, 43)
    assert ids[1:31] == prefix[20:] and ids[32:42] == suffix[:10]
    assert len(fim_prompt(tokenizer, prefix[:5], suffix, None, 43)) == 43
    assert len(fim_prompt(tokenizer, prefix, suffix[:5], None, 43)) == 43
    assert fim_prompt(tokenizer, prefix, suffix, None, 1)[0] == tokenizer.fim_tokens.prefix


def test_a_continued_text_has_no_space_before_it_and_no_control_tokens() -> None:
    spm = tokenizer_from_gguf(tiny_spm(), "x.gguf")
    assert spm.decode(spm.encode("ab", False)[:1]) == spm.decode(spm.encode_continued("ab"))
    assert [spm.id_to_token(i) for i in spm.encode("ab", False)] == ["▁ab"]
    assert [spm.id_to_token(i) for i in spm.encode_continued("ab")] == ["ab"]
    assert 1 not in spm.encode_continued("<s>")


@pytest.mark.parametrize("space", ["Prepend", "Metaspace"])
def test_a_continued_text_of_a_tokenizer_json_has_no_space_before_it(space: str) -> None:
    from tokenizers import normalizers

    vocabulary = {"▁": 0, "a": 1, "b": 2, "▁a": 3, "<unk>": 4}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>"))
    if space == "Prepend":
        prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        backend.normalizer = normalizers.Sequence([prepend, replace])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = JsonTokenizer(backend, TokenizerFacts(), "tokenizer.json")
    assert tokenizer.encode("ab a") == [3, 2, 3]
    assert tokenizer.encode_continued("ab a") == [1, 2, 3]
    assert tokenizer.encode_continued("ab a " * 2000)[-3:] == [2, 3, 0]


@pytest.mark.parametrize("first", [False, True])
def test_prompts_of_code_llama_equal_those_of_transformers(tmp_path: Path, first: bool) -> None:
    from transformers import CodeLlamaTokenizer

    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["▁", *"defab(:)\n", "de", "def", "▁def", "▁a", "ab"]
    merges = [("d", "e"), ("de", "f"), ("▁", "def"), ("▁", "a"), ("a", "b")]
    vocabulary = {name: i for i, name in enumerate([*names, *pieces])}
    theirs = CodeLlamaTokenizer(vocab=vocabulary, merges=merges)
    theirs.save_pretrained(tmp_path)
    ours = tokenizer_from_folder(tmp_path)
    assert ours is not None
    fim = fim_tokens(theirs._tokenizer.token_to_id)
    assert ours.fim_tokens == fim
    text, rest = "def ab(", " a:\n  def b"
    expected = theirs(text, suffix=rest, suffix_first=first)["input_ids"]
    prefix, suffix = ours.encode(text, False, False), ours.encode_continued(rest)
    assert fim_prompt(ours, prefix, suffix, first, None) == expected
