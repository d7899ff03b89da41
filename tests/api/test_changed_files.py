"""Model files that are cut, replaced or gone when they are read: an error, never another model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sdk import LLM, CheckpointError
from tests.api.engines import ask
from tests.scripts import run_python

#: Loads each model while its files are cut at some point of the load; last, an intact one.
CUT_WHILE_LOADING = """
import os, shutil, sys
from pathlib import Path
from sdk import LLM, CheckpointError

work, intact = Path(sys.argv[1]), sys.argv[2]
for model in map(Path, sys.argv[3:]):
    for point in (0.0, 0.4, 0.9):
        for left in (0, 0.8):
            copy = work / "copy"
            if model.is_dir():
                shutil.copytree(model, copy)
                files = sorted(copy.glob("*.safetensors"))
            else:
                shutil.copyfile(model, copy)
                files = [copy]

            def cut(stage, done, total):
                if done >= point * total and done < total:
                    for file in files:
                        os.truncate(file, min(file.stat().st_size, int(left * sizes[file])))

            sizes = {file: file.stat().st_size for file in files}
            try:
                LLM(copy, max_model_len=64, skip_tokenizer_init=True, on_progress=cut).close()
            except CheckpointError as error:
                assert "truncated while it was read" in str(error), error
                print(model.name, point, left)
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
with LLM(intact, max_model_len=64) as llm:
    print(len(llm.generate("hello")[0].outputs))
"""


def sharded(folder: Path, out: Path) -> Path:
    """The model of ``folder`` in three files and an index."""
    tensors = load_file(folder / "model.safetensors")
    places = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(tensors)}
    out.mkdir()
    for file in sorted(set(places.values())):
        save_file({n: t for n, t in tensors.items() if places[n] == file}, out / file)
    index = {"metadata": {}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copyfile(folder / "config.json", out / "config.json")
    return out


def test_a_file_that_is_cut_while_it_is_loaded_is_an_error_and_the_process_lives(
    golden: Path, tmp_path: Path
) -> None:
    single = golden / "ct-w4a16"
    models = [golden / "gguf-Q8_0" / "model.gguf", single, sharded(single, tmp_path / "sharded")]
    found = run_python(CUT_WHILE_LOADING, tmp_path, models[0], *models).splitlines()
    points = [(point, left) for point in (0.0, 0.4, 0.9) for left in (0, 0.8)]
    expected = [f"{model.name} {point} {left}" for model in models for point, left in points]
    assert found == [*expected, "1"]


def _other_gguf(path: Path, golden: Path) -> None:
    shutil.copyfile(golden / "gguf-Q4_0" / "model.gguf", path)


def _other_numbers(path: Path, golden: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _gone(path: Path, golden: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("change", [_other_gguf, _other_numbers, _gone])
def test_an_llm_does_not_wake_up_as_another_model(
    tiny_path: Path, golden: Path, tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copyfile(tiny_path, path)
    with LLM(path, max_model_len=64) as llm:
        expected = ask(llm, 1, 2)
        llm.sleep(2)
        change(path, golden)
        with pytest.raises(
            CheckpointError, match=r"wake_up: the files of model\.gguf have changed"
        ):
            llm.wake_up()
        shutil.copyfile(tiny_path, path)  # another inode and time, the same model
        llm.wake_up()
        assert ask(llm, 1, 2) == expected


def test_another_config_beside_the_same_weights_is_another_model(
    golden: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(golden / "ct-w4a16", tmp_path / "model"))
    with LLM(folder, max_model_len=64) as llm:
        llm.sleep(2)
        config = json.loads((folder / "config.json").read_text())
        config["rms_norm_eps"] *= 10
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match="wake_up: the files of model have changed"):
            llm.wake_up()
