"""Every name that files have for a model: it runs, or the error says what it is."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from sdk.loaders.open import read_headers
from sdk.models.architecture import architecture, architectures, gguf_names, gguf_rules
from sdk.models.auto import read_config
from sdk.models.other_models import REFUSED, refused_gguf
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.loaders.conftest import llama_gguf

#: MODEL_ARCH_NAMES of gguf-py in llama.cpp of 1 October 2026. Release 0.19.0 of the package has 126
#: of them and no other.
GGUF_NAMES = Path(__file__).with_name("gguf_names.txt").read_text(encoding="utf-8").split()


def always_native() -> set[str]:
    """The GGUF names of which every file is that of an architecture."""
    return {
        rules.name for own in architectures() for rules in gguf_rules(own) if rules.matches is None
    }


def error_of(name: str, folder: Path) -> CheckpointError:
    """The error of a file that says nothing but the name of its architecture."""
    path = folder / "model.gguf"
    file = llama_gguf()
    file.metadata = {"general.architecture": (8, name)}
    path.write_bytes(file.build())
    with pytest.raises(CheckpointError) as error:
        read_headers(path)
    return error.value


def test_a_gguf_file_of_every_name_is_read_or_says_what_it_is(tmp_path: Path) -> None:
    known, always = gguf_names(), always_native()
    for name in [*GGUF_NAMES, "whisper"]:
        error, refusal = error_of(name, tmp_path), refused_gguf(name)
        if name in always:  # read, as far as its sizes
            assert f"{name}." in str(error)
            assert not isinstance(error, UnsupportedError)
        elif name not in known:
            assert refusal is not None, f"{name}: add it to a group of models/other_models.py"
            assert isinstance(error, UnsupportedError)
            told = f"{name}: {refusal.what}, which does not run: {refusal.why}. {refusal.instead}"
            assert told in str(error)


def test_an_unknown_name_lists_those_that_run(tmp_path: Path) -> None:
    error = error_of("no-such-model", tmp_path)
    assert isinstance(error, UnsupportedError)
    assert "'no-such-model' is not known; expected one of " in str(error)
    assert ", llama, " in str(error)


def test_the_table_names_every_model_once_and_none_that_runs() -> None:
    gguf = [name for models in REFUSED for name in models.gguf]
    types = [name for models in REFUSED for name in models.types]
    assert len(set(gguf)) == len(gguf)
    assert len(set(types)) == len(types)
    assert not always_native() & {*gguf}, "these run now: take them out of models/other_models.py"
    assert not [name for name in types if architecture(name) is not None], "the same"
    assert {*gguf} - {*GGUF_NAMES} == {"whisper"}


def test_configs_of_the_table_are_refused_without_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    for models in REFUSED:
        for name in models.types:
            with pytest.raises(UnsupportedError, match=f"'{name}': ") as error:
                read_config({"model_type": name})
            assert str(models.refusal) in str(error.value)


@pytest.mark.slow  # 11 s: transformers imports the code of 400 models
def test_every_type_of_transformers_is_read_or_refused_by_name() -> None:
    """With the defaults of its class; ours are the only exceptions."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    read = []
    for name in CONFIG_MAPPING_NAMES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                values = transformers.CONFIG_MAPPING[name]().to_dict()
        except Exception:  # a class that has no defaults
            continue
        try:
            read_config(values)
        except (CheckpointError, UnsupportedError) as error:
            words = ("expected", "which does not run", "run it with transformers")
            assert any(word in str(error) for word in words), name
        else:
            read.append(name)
    assert len(read) > 120
