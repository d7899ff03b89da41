"""llama.cpp's own vocabularies, with the texts and ids it tests itself on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdk.loaders.gguf_files.reader import read_gguf
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf

VOCABULARIES = Path(__file__).parents[2] / "build" / "interop" / "vocabularies"
NAMES = (
    *(
        "bert-bge",
        "command-r",
        "deepseek-coder",
        "deepseek-llm",
        "falcon",
        "gemma-4",
        "gpt-2",
        "llama-bpe",
    ),
    *("llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)


@pytest.mark.parametrize("name", NAMES)
def test_every_text_has_the_ids_of_llama_cpp(name: str) -> None:
    path = VOCABULARIES / f"ggml-vocab-{name}.gguf"
    tokenizer = tokenizer_from_gguf(read_gguf(path).metadata, str(path))
    between = "\n__ggml_vocab_test__\n"  # and most files end with it
    inputs = Path(f"{path}.inp").read_bytes().decode()  # not as text: carriage returns are tested
    texts = inputs.removesuffix(between).split(between)
    lines = Path(f"{path}.out").read_text(encoding="utf-8").splitlines()
    expected = [[int(token) for token in line.split()] for line in lines]
    assert len(texts) == len(expected) > 40
    found = [
        tokenizer.encode(text, add_special_tokens=False, parse_special=False) for text in texts
    ]
    wrong = [i for i, ids in enumerate(found) if ids != expected[i]]
    assert [(texts[i], found[i], expected[i]) for i in wrong] == []


def test_the_tests_know_every_vocabulary_with_vectors() -> None:
    found = {path.name.split(".")[0] for path in VOCABULARIES.glob("*.inp")}
    assert found == {f"ggml-vocab-{name}" for name in NAMES}
