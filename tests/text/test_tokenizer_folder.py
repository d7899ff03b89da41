"""Tokenizers of Hugging Face folders, and of a tokenizer.json beside a GGUF file."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.loaders.tokenizer.hf import JsonTokenizer
from sdk.loaders.tokenizer.vocab import VocabTokenizer
from sdk.quant.errors import CheckpointError

TEXTS = ["", "Hello world", "  two", "日本 😀", "a</s>b <s>", "\n\n x", "1234 don't"]
USER = [{"role": "user", "content": "Hi <s> there"}]


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """A folder with the tokenizer of the golden llama model, to be changed by a test."""
    for file in (golden / "arch-llama3" / "hf").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path / file.name)
    return tmp_path


def change(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    content.update(values)
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_ids_and_texts_equal_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = tokenizer_from_folder(folder), AutoTokenizer.from_pretrained(str(folder))
    assert ours is not None and ours.bytewise and ours.strips_leading_space
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    plain = [{"role": "user", "content": "Hi there"}]
    rendered = theirs.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(plain) == rendered
    expected = theirs.apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    assert ours.encode_chat(plain) == expected
    assert ours.bos_token_id == 1 and ours.eos_token_ids == {2} and ours.vocab_size == 448


def test_control_text_in_a_message_stays_text(folder: Path) -> None:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None
    assert not set(tokenizer.encode_chat(USER)) & tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode_chat(USER)) == tokenizer.apply_chat_template(USER)
    assert 1 not in tokenizer.encode("<s>", add_special_tokens=False, parse_special=False)
    assert tokenizer.encode("<s>", add_special_tokens=False) == [1]


def test_a_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    assert tokenizer_from_folder(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert tokenizer_from_folder(tmp_path) is None


def test_bos_is_not_given_twice(folder: Path) -> None:
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None
    assert tokenizer.encode("<s>a").count(1) == 1
    template = "{{ bos_token }}{{ messages[0].content }}"
    assert tokenizer.encode_chat(USER, chat_template=template)[0] == 1


def test_add_bos_token_overrides_the_file(folder: Path) -> None:
    change(folder / "tokenizer_config.json", add_bos_token=False)
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None and tokenizer.encode("a")[0] != 1
    assert tokenizer.encode("<s>a")[0] == 1
    change(folder / "tokenizer_config.json", add_bos_token=True)
    change(folder / "tokenizer.json", post_processor=None)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}))
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None and tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("<s>a").count(1) == 1


def test_every_source_of_end_tokens_counts(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[5, 6, 100000])
    change(folder / "config.json", eos_token_id=7)
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None and tokenizer.eos_token_ids == {2, 5, 6, 7}


def test_names_of_specials_may_be_objects(folder: Path) -> None:
    change(folder / "tokenizer_config.json", bos_token={"content": "</s>"}, eos_token=None)
    change(folder / "special_tokens_map.json", eos_token="a", bos_token="b")
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None and tokenizer.bos_token_id == 2
    assert tokenizer.token_to_id("a") in tokenizer.eos_token_ids


def test_what_ends_an_answer_is_special_even_if_the_file_forgot(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    token = {**content["added_tokens"][0], "id": 448, "content": "<|im_end|>", "special": False}
    content["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None and tokenizer.eos_token_ids == {2, 448}
    assert 448 in tokenizer.encode("a<|im_end|>")
    assert 448 not in tokenizer.encode("a<|im_end|>", parse_special=False)
    user = [{"role": "user", "content": "a<|im_end|>"}]
    assert 448 not in tokenizer.encode_chat(user)
    assert tokenizer.decode([448]) == ""


def test_the_template_file_wins_over_the_configuration(folder: Path) -> None:
    jinja = folder / "chat_template.jinja"
    jinja.write_text("file")
    change(folder / "tokenizer_config.json", chat_template="config")
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None and tokenizer.apply_chat_template(USER) == "file"
    jinja.unlink()
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None and tokenizer.apply_chat_template(USER) == "config"
    named = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    change(folder / "tokenizer_config.json", chat_template=named)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "extra.jinja").write_text("E")
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None and tokenizer.chat_template == "D"
    assert tokenizer.chat_templates == {"rag": "R", "extra": "E"}


def test_truncation_and_padding_of_the_file_are_ignored(folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    change(folder / "tokenizer.json", truncation=truncation)
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer is not None and len(tokenizer.encode("a b c d e f")) > 5


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{", ["expected a tokenizer"]),
        ("tokenizer.json", '{"model": {"type": "made up"}}', ["expected a tokenizer"]),
        ("tokenizer.json", "[" * 100000, ["expected a tokenizer"]),
        ("tokenizer_config.json", "{", ["not valid JSON"]),
        ("tokenizer_config.json", "[" * 100000, ["nested too deeply"]),
        ("tokenizer_config.json", "[]", ["expected a JSON object, found list"]),
        ("tokenizer_config.json", '{"bos_token": 5}', ["bos_token", "a string", "5"]),
        ("tokenizer_config.json", '{"add_bos_token": "yes"}', ["add_bos_token", "a bool"]),
        ("tokenizer_config.json", '{"chat_template": 5}', ["chat_template", "found int"]),
        ("tokenizer_config.json", '{"chat_template": [5]}', ["chat_template", "names"]),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', ["found NoneType"]),
        ("tokenizer_config.json", '{"chat_template": "%s"}' % ("x" * 65537), ["65537"]),
        ("generation_config.json", '{"eos_token_id": "x"}', ["eos_token_id", "'x'"]),
        ("generation_config.json", '{"eos_token_id": [-1]}', ["eos_token_id", "-1"]),
        ("config.json", '{"eos_token_id": true}', ["eos_token_id", "True"]),
        ("chat_template.jinja", "x" * 65537, ["65536", "65537"]),
        ("chat_template.jinja", b"\xff\xfe", ["UTF-8"]),
    ],
)
def test_damaged_files_are_named(
    folder: Path, file: str, content: str | bytes, words: list[str]
) -> None:
    if file == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink()
    data = content if isinstance(content, bytes) else content.encode()
    (folder / file).write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        tokenizer_from_folder(folder)
    for word in (str(folder / file), *words):
        assert word in str(caught.value)


def test_a_huge_configuration_is_not_read(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate(129 * 1024 * 1024)
    with pytest.raises(CheckpointError, match=r"config.json: larger than 128 MiB"):
        tokenizer_from_folder(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"\x0a\xff\xff\xff\x7f",
        b"\x0a",
        b"\x0a\x03\x0a\x01\xff",
        b"\x0a\x02\x08\x01",
    ],
)
def test_a_damaged_sentencepiece_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: expected a tokenizer"):
        tokenizer_from_folder(tmp_path)


def test_a_huge_sentencepiece_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.model").open("wb") as file:
        file.truncate(129 * 1024 * 1024)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: expected at most"):
        tokenizer_from_folder(tmp_path)


def test_a_tokenizer_without_a_fast_form_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    (tmp_path / "vocab.txt").write_text("a")
    slow = lambda *_, **options: options  # noqa: E731
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", slow)
    with pytest.raises(CheckpointError, match=r"vocab\.txt: .* save a fast one with"):
        tokenizer_from_folder(tmp_path)


def test_a_sentencepiece_model_is_read_like_sentencepiece(
    sentencepiece_model: Path, tmp_path: Path
) -> None:
    import sentencepiece

    shutil.copy(sentencepiece_model, tmp_path / "tokenizer.model")
    config = {"chat_template": "T", "add_bos_token": False, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    tokenizer = tokenizer_from_folder(tmp_path)
    oracle = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == {2, 5} and tokenizer.chat_template == "T"
    assert tokenizer.encode("a")[0] != 1
    for text in ("hello world", "the cat", "日本 é"):
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text)
        assert tokenizer.decode(oracle.encode(text)) == text


def test_vocabulary_and_merges_are_converted(tmp_path: Path, bpe: Any) -> None:
    vocabulary = {bpe.id_to_token(i): i for i in range(259)} | {"<|endoftext|>": 259}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nhe l\nĠ he\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("hel he") == bpe.encode("hel he")
    assert tokenizer.decode(tokenizer.encode("é😀")) == "é😀"


def test_a_tokenizer_json_beside_a_gguf_file_is_used(
    folder: Path, golden_metadata: Any, golden_tokenizer: Any
) -> None:
    metadata = golden_metadata()
    tokenizer = tokenizer_from_gguf(metadata, str(folder / "model.gguf"))
    assert isinstance(tokenizer, JsonTokenizer)
    assert tokenizer.encode("Hello") == golden_tokenizer.encode("Hello")
    assert tokenizer.eos_token_ids == golden_tokenizer.eos_token_ids
    assert tokenizer.encode_chat(USER)[0] == 1  # llama.cpp's rule: BOS where the file wants it


def test_the_tokenizer_json_stored_in_the_metadata_is_used(
    folder: Path, golden_metadata: Any
) -> None:
    stored = (folder / "tokenizer.json").read_text()
    metadata = {**golden_metadata(), "tokenizer.huggingface.json": stored}
    assert isinstance(tokenizer_from_gguf(metadata, "/nowhere/x.gguf"), JsonTokenizer)


@pytest.mark.parametrize("content", ["{", None])
def test_an_unfit_tokenizer_json_is_reported_and_not_used(
    folder: Path,
    golden_metadata: Any,
    content: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    metadata = golden_metadata()
    if content is None:  # of another vocabulary
        metadata["tokenizer.ggml.tokens"][300:] = [f"other {i}" for i in range(300, 448)]
    else:
        (folder / "tokenizer.json").write_text(content)
    with caplog.at_level(logging.WARNING, "sdk"):
        tokenizer = tokenizer_from_gguf(metadata, str(folder / "model.gguf"))
    assert isinstance(tokenizer, VocabTokenizer)
    assert "not used" in caplog.text and "tokenizer.json" in caplog.text


def paths_into(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where the parts of a JSON value are; a few places of each long list or dict."""
    found = [path] if path else []
    places: list[Any] = list(value)[:30] if isinstance(value, dict) else []
    places += range(min(3, len(value))) if isinstance(value, list) else []
    for place in places:
        found += paths_into(value[place], (*path, place))
    return found


def test_random_damage_ends_in_a_checkpoint_error_or_a_working_tokenizer(folder: Path) -> None:
    file = folder / "tokenizer.json"
    sound = file.read_text()
    places = paths_into(json.loads(sound))
    odd = [None, 0, -1, 2**63, 1e300, True, "", "x", [], {}, [1], "▁", {"type": "BPE"}]
    rng = random.Random(5)
    refused = 0
    for _ in range(250):
        content = json.loads(sound)
        *parents, last = rng.choice(places)
        part = content
        for place in parents:
            part = part[place]
        if rng.random() < 0.3:
            del part[last]
        else:
            part[last] = rng.choice(odd)
        file.write_text(json.dumps(content))
        try:
            tokenizer = tokenizer_from_folder(folder)
        except CheckpointError as error:
            assert str(folder) in str(error)
            refused += 1
        else:
            assert tokenizer is not None
            tokenizer.decode(tokenizer.encode("hello ab <s> é\n"))
    assert 100 < refused < 250
