"""Contradictory tokenizer metadata is refused, naming file and key."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sdk.loaders.templates.chat_template import TemplateError
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.quant.errors import CheckpointError, UnsupportedError

T = "tokenizer.ggml."


def refuse(metadata: dict[str, Any], *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        tokenizer_from_gguf(metadata, "bad.gguf")
    for word in ("bad.gguf", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokens", None, ["tokens", "no such key"]),
        ("tokens", [], ["tokens", "no tokens"]),
        ("tokens", "abc", ["tokens", "an array", "str"]),
        ("tokens", [b"a"], ["tokens[0]", "a string", "bytes"]),
        ("token_type", [1, 2], ["token_type", "one per token", "2"]),
        ("token_type", 7, ["token_type", "an array"]),
        ("bos_token_id", 10**6, ["bos_token_id", "1000000"]),
        ("eos_token_id", -1, ["eos_token_id", "-1"]),
        ("eot_token_id", 2**32 - 1, ["eot_token_id"]),
        ("eom_token_id", 2**32 - 1, ["eom_token_id"]),
        ("unknown_token_id", 99999, ["unknown_token_id"]),
        ("padding_token_id", "x", ["padding_token_id", "a token id"]),
        ("eos_token_id", True, ["eos_token_id", "bool"]),
        ("eos_token_id", 1.5, ["eos_token_id", "float"]),
        ("add_bos_token", 1, ["add_bos_token", "a bool"]),
        ("add_eos_token", "yes", ["add_eos_token", "a bool"]),
        ("model", None, ["tokenizer.ggml.model", "no such key"]),
        ("model", 3, ["tokenizer.ggml.model", "a string"]),
    ],
)
def test_a_bad_value_is_named(
    make_metadata: Any, kind: str, key: str, value: Any, words: list[str]
) -> None:
    metadata = make_metadata[kind](**{T + key: value})
    refuse({k: v for k, v in metadata.items() if v is not None}, *words)


def test_a_token_twice_is_refused(make_metadata: Any) -> None:
    metadata = make_metadata["gpt2"]()
    metadata[T + "tokens"][5] = metadata[T + "tokens"][6]
    refuse(metadata, "tokens", "twice")


@pytest.mark.parametrize("value", [7, -1])
def test_an_unknown_token_type_is_refused(make_metadata: Any, value: int) -> None:
    metadata = make_metadata["llama"]()
    metadata[T + "token_type"][4] = value
    refuse(metadata, "token_type[4]", str(value))


def test_token_types_that_are_no_integers_are_refused(make_metadata: Any) -> None:
    metadata = make_metadata["llama"]()
    metadata[T + "token_type"] = [1.0] * len(metadata[T + "tokens"])
    refuse(metadata, "token_type", "float64")
    metadata[T + "token_type"] = [[1], [1, 2]] + [1] * (len(metadata[T + "tokens"]) - 2)
    refuse(metadata, "token_type")


@pytest.mark.parametrize("name", ["<0x-1>", "<0x0G>", "<0xA>", "<0xaa>", "0x0A", "<0x0A>\n"])
def test_a_malformed_byte_token_is_refused(make_metadata: Any, name: str) -> None:
    metadata = make_metadata["llama"]()
    metadata[T + "tokens"][10] = name
    refuse(metadata, "tokens[10]", "byte token")


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (None, ["no such key"]),
        ([0.0], ["one per token", "1"]),
        ("nan", ["scores[3]", "NaN"]),
        ("str", ["numbers"]),
    ],
)
def test_bad_scores_are_refused(make_metadata: Any, scores: Any, words: list[str]) -> None:
    metadata = make_metadata["llama"]()
    count = len(metadata[T + "tokens"])
    if scores is None:
        del metadata[T + "scores"]
    elif scores == "nan":
        metadata[T + "scores"] = [0.0] * 3 + [float("nan")] + [0.0] * (count - 4)
    else:
        metadata[T + "scores"] = ["a"] * count if scores == "str" else scores
    refuse(metadata, "tokenizer.ggml.scores", *words)


@pytest.mark.parametrize(
    ("merge", "words"),
    [
        ("he", ["merges[3]", "two pieces"]),
        ("", ["merges[3]", "two pieces"]),
        ("h ", ["merges[3]", "two pieces"]),
        ("zz yy", ["merges[3]", "pieces of the vocabulary", "zz"]),
        ("z z", ["merges[3]", "pieces of the vocabulary", "zz"]),
    ],
)
def test_a_malformed_merge_is_refused(make_metadata: Any, merge: str, words: list[str]) -> None:
    metadata = make_metadata["gpt2"]()
    metadata[T + "merges"].append(merge)
    refuse(metadata, *words)


def test_a_vocabulary_the_library_cannot_use_is_refused(make_metadata: Any) -> None:
    metadata = make_metadata["gpt2"]()
    metadata[T + "tokens"][0] = "\ud800"  # no UTF-8
    refuse(metadata, "merges", "a usable vocabulary")


def test_merges_that_lead_to_a_control_token_are_left_out(make_metadata: Any) -> None:
    metadata = make_metadata["gpt2"](**{T + "eos_token_id": 257})  # "hel"
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    assert tokenizer.encode("hel", parse_special=False) == [256, 108]
    assert tokenizer.encode("hel") == [257]


def test_merges_must_be_there_and_be_strings(make_metadata: Any) -> None:
    metadata = make_metadata["gpt2"]()
    metadata[T + "merges"] = [1, 2]
    refuse(metadata, "merges[0]", "a string")
    del metadata[T + "merges"]
    refuse(metadata, "merges", "no such key")


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.rag"])
def test_a_template_over_64_kib_is_refused(make_metadata: Any, key: str) -> None:
    refuse(make_metadata["gpt2"](**{key: "x" * 65537}), key, "65536", "65537")
    refuse(make_metadata["gpt2"](**{key: 5}), key, "a string")
    tokenizer = tokenizer_from_gguf(make_metadata["gpt2"](**{key: "x" * 65536}), "good.gguf")
    assert tokenizer.chat_template is not None


@pytest.mark.parametrize("model", ["plamo3", "none", "made up"])
def test_other_tokenizer_models_are_named_as_unsupported(make_metadata: Any, model: str) -> None:
    with pytest.raises(UnsupportedError, match=f"bad.gguf.*{model}.*skip_tokenizer_init"):
        tokenizer_from_gguf(make_metadata["gpt2"](**{T + "model": model}), "bad.gguf")


def test_holes_in_the_vocabulary_are_named_as_llama_cpp_does(make_metadata: Any) -> None:
    metadata = make_metadata["gpt2"]()
    metadata[T + "tokens"] += ["", ""]
    metadata[T + "token_type"] += [1, 1]
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    assert tokenizer.id_to_token(263) == "[EMPTY_263]"


def test_named_templates_are_kept_apart(make_metadata: Any) -> None:
    source = "T{% if tools %}{{ tools[0].name }}{% endif %}"
    metadata = make_metadata["gpt2"](**{"tokenizer.chat_template.tool_use": source})
    tokenizer = tokenizer_from_gguf(metadata, "x.gguf")
    message = [{"role": "user", "content": "x"}]
    assert tokenizer.chat_templates == {"tool_use": source}
    assert tokenizer.apply_chat_template(message, chat_template="tool_use") == "T"
    assert tokenizer.apply_chat_template(message, tools=[{"name": "f"}]) == "Tf"
    assert tokenizer.apply_chat_template(message, chat_template="{{ 'own' }}") == "own"
    with pytest.raises(
        TemplateError, match=r"one of the model's \(tool_use\), found 'own'; of a file"
    ):
        tokenizer.apply_chat_template(message, chat_template="own")
    assert tokenizer.apply_chat_template(message) == "x<|im_end|>"


ODD: list[Any] = [
    None, 0, -1, 2**63, 2**32 - 1, 1.5, float("nan"), True, "", "x", "\ud800", "\0", [], [1], ["a"],
    [[1]], [None], b"x", {}, "gpt2", "llama", "gemma4", "default", "{{",
]  # fmt: skip


def test_random_damage_ends_in_a_checkpoint_error_or_a_working_tokenizer(
    make_metadata: Any,
) -> None:
    rng = random.Random(11)
    refused = 0
    for _ in range(500):
        metadata = make_metadata[rng.choice(["gpt2", "llama"])]()
        for _ in range(rng.randint(1, 2)):
            key = rng.choice([*metadata, "tokenizer.huggingface.json", T + "eot_token_id"])
            value = metadata.get(key)
            if isinstance(value, list) and value and rng.random() < 0.7:
                place = rng.randrange(len(value))
                damaged = [value[:place], value[place:], [*value[:place], rng.choice(ODD)]]
                damaged.append([*value[:place], value[0], *value[place + 1 :]])
                damaged.append([*value[:place], rng.choice(ODD), *value[place + 1 :]])
                metadata[key] = rng.choice(damaged)
            else:
                metadata[key] = rng.choice(ODD)
        try:
            tokenizer = tokenizer_from_gguf(metadata, "bad.gguf")
        except CheckpointError as error:
            assert "bad.gguf" in str(error)
            refused += 1
        else:
            tokenizer.encode("hello ab <s><|im_end|> é\n")
            tokenizer.decode(range(300))
    assert 250 < refused < 500
