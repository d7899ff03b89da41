"""Models in folders with any name: spaces, letters of any alphabet, bytes that are not Unicode."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from sdk import LLM, SamplingParams, quantize
from sdk.api.errors import CheckpointError

NAMES = {"space": "with space", "letters": "имя 模型", "bytes": os.fsdecode(b"bad\xff\xfename")}
TWO = SamplingParams(max_tokens=2, temperature=0)


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "bytes" and sys.platform != "linux":
        pytest.skip("file names are Unicode on this system")
    made = tmp_path / NAMES[request.param]
    made.mkdir()
    return made


@pytest.mark.parametrize("model", ["gguf-Q8_0/model.gguf", "arch-llama3/hf"])
def test_a_model_answers_as_from_a_plain_path(model: str, folder: Path, golden: Path) -> None:
    source = golden / model
    there = folder / source.name
    shutil.copytree(source, there) if source.is_dir() else shutil.copy(source, there)
    texts = []
    for path in (source, there):
        with LLM(path, max_model_len=64) as llm:
            texts.append(llm.generate("one two", TWO)[0].outputs[0].text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("scheme", "name"), [("q8_0", "out.gguf"), ("rtn-w8g32", "out")])
def test_a_quantized_model_is_written_there(
    scheme: str, name: str, folder: Path, golden: Path
) -> None:
    shutil.copytree(golden / "arch-llama3" / "hf", folder / "source")
    made = quantize(folder / "source", folder / name, scheme)
    assert Path(made) == folder / name
    with LLM(made, max_model_len=64) as llm:
        assert llm.generate("one two", TWO)[0].finished


def test_a_damaged_tokenizer_is_still_named(folder: Path, golden: Path) -> None:
    shutil.copytree(golden / "arch-llama3" / "hf", folder / "hf")
    (folder / "hf" / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a tokenizer") as error:
        LLM(folder / "hf", max_model_len=64)
    assert "surrogates" not in str(error.value)
