"""How a GGUF file's tokenizer splits words: what an engine says where the file does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, RequestError, UnsupportedError
from sdk.testing import tiny_model

KEY = b"tokenizer.ggml.pre"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_model(tmp_path_factory.mktemp("tiny"), "f16").read_bytes()


def renamed(file: bytes, folder: Path, pre: bytes) -> str:
    """The file with another name of its split."""
    begin = file.index(KEY) + len(KEY) + 4  # after the type of the value
    size = int.from_bytes(file[begin : begin + 8], "little")
    path = folder / "m.gguf"
    assert len(pre) == size, f"expected a name of {size} letters"
    path.write_bytes(file[: begin + 8] + pre + file[begin + 8 + size :])
    return str(path)


def name_of(file: bytes) -> bytes:
    begin = file.index(KEY) + len(KEY) + 4
    return file[begin + 8 : begin + 8 + int.from_bytes(file[begin : begin + 8], "little")]


def test_a_split_that_is_not_known_needs_a_name_that_is(file: bytes, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_model_len": 64, "num_threads": 1}
    own = name_of(file)
    path = renamed(file, tmp_path, b"x" * len(own))
    with pytest.raises(UnsupportedError, match=r"m.gguf: tokenizer.ggml.pre is 'x+', which is not"):
        LLM(path, **options)
    with LLM(path, pre_tokenizer=own.decode(), **options) as llm:
        assert llm.load_warnings == ()
        found = llm.get_tokenizer().encode("the cat sat")
    with LLM(renamed(file, tmp_path, own), **options) as llm:
        assert llm.get_tokenizer().encode("the cat sat") == found
    with LLM(path, skip_tokenizer_init=True, **options) as llm:
        assert llm.load_warnings == ()


def test_a_missing_name_is_in_the_warnings(
    file: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file.replace(KEY, KEY[:-3] + b"old"))
    with LLM(str(path), max_model_len=64, num_threads=1) as llm:
        [warning] = llm.load_warnings
        assert "tokenizer.ggml.pre is missing" in warning and warning in llm.explain()
    assert warning in caplog.text  # which `embedlm run` prints


def test_the_option_is_for_gguf_files(golden: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"pre_tokenizer='qwen2': expected a GGUF file"):
        LLM(golden / "arch-llama3" / "hf", pre_tokenizer="qwen2", max_model_len=64)
    with pytest.raises(RequestError, match=r"pre_tokenizer: expected a"):
        LLM(golden / "arch-llama3" / "model.gguf", pre_tokenizer=3)  # type: ignore[arg-type]
