"""Random files get a vocabulary for the engines that do not open them without."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from sdk.api.errors import RequestError
from sdk.bench import models
from sdk.bench.random_blocks import write_shape
from sdk.bench.real_shapes import Dense
from sdk.bench.settings import Settings
from sdk.bench.vocabulary import vocabulary, with_vocabulary
from sdk.loaders.gguf_files.reader import read_gguf

SHAPE = Dense(256, 2, 4, 2, 512, head_dim=64, vocab=3_200)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    write_shape(tmp_path / "m.gguf", "tiny", SHAPE)
    return tmp_path / "m.gguf"


def contents(path: Path) -> dict[str, tuple[Any, bytes]]:
    file, data = read_gguf(path), path.read_bytes()
    file.close()
    return {
        name: ((one.shape, one.type.name), data[one.start : one.start + one.nbytes])
        for name, one in file.tensors.items()
    }


def test_a_copy_has_the_same_matrices_and_a_vocabulary_that_works(plain: Path) -> None:
    copy = with_vocabulary(plain)
    assert contents(copy) == contents(plain)
    ids, params = {"prompt_token_ids": [5, 900, 3_000]}, SamplingParams(temperature=0, max_tokens=4)
    with LLM(plain, max_model_len=64) as one, LLM(copy, max_model_len=64) as other:
        expected, found = one.generate(ids, params)[0], other.generate(ids, params)[0]
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        tokenizer = other.get_tokenizer()
        words = tokenizer.encode("Hello zZ, é\n", add_special_tokens=False)
        assert tokenizer.decode(words) == "Hello zZ, é\n"
        assert len(words) < len("Hello zZ, é\n")
        assert len(tokenizer) == SHAPE.vocab


def test_the_copy_is_made_once_for_each_state_of_the_file(plain: Path) -> None:
    copy = with_vocabulary(plain)
    written = copy.stat().st_mtime_ns
    assert with_vocabulary(plain) == copy and copy.stat().st_mtime_ns == written
    assert with_vocabulary(copy) == copy
    os.utime(plain, ns=(written + 1, written + 1))
    assert with_vocabulary(plain) == copy and copy.stat().st_mtime_ns > written
    assert sorted(path.name for path in plain.parent.iterdir()) == [plain.name, copy.name]


@pytest.mark.parametrize("size", [258, 300, 5_000, 128_256])
def test_all_tokens_of_a_vocabulary_differ_and_merges_make_tokens(size: int) -> None:
    made = vocabulary(size)
    tokens = set(made["tokenizer.ggml.tokens"])
    assert len(tokens) == len(made["tokenizer.ggml.token_type"]) == size
    for merge in made["tokenizer.ggml.merges"]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= tokens


def test_too_little_room_is_said_before_anything_is_written(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(plain.parent)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(RequestError, match=r"m\.gguf: expected .* for a copy with a vocabulary"):
        with_vocabulary(plain)
    assert list(plain.parent.iterdir()) == [plain]


def test_engines_that_need_a_vocabulary_open_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "REAL_SHAPES", {"random-8b": SHAPE})
    with models.ModelFiles("random-8b") as files:
        others: dict[str, Any] = dict.fromkeys(("requests", "prompt_lens", "contexts"), (1,))
        settings = Settings(
            **{**others, "model": files.path, "threads": 1, "rounds": 1, "kv": "auto"},
            peers=(),
            output_len=1,
            unpacked=files.unpacked,
            with_vocabulary=files.with_vocabulary,
            progress=lambda text: None,
        )
        opened = {
            engine: Path(settings.opening(engine, 1, 64).model)
            for engine in ("embedlm", "llama.cpp", "openvino", "openvino-f32", "mistral.rs")
        }
    copy = with_vocabulary(Path(files.path))
    assert opened["embedlm"] == opened["llama.cpp"] == Path(files.path) != copy
    assert opened["openvino"] == opened["openvino-f32"] == opened["mistral.rs"] == copy


def test_a_file_of_the_user_is_opened_as_it_is(plain: Path) -> None:
    with models.ModelFiles(str(plain)) as files:
        assert files.with_vocabulary() == str(plain)
    assert list(plain.parent.iterdir()) == [plain]
