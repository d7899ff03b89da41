"""The keywords of the public classes: what tools see of them, and names of other libraries."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from sdk import LLM, AsyncLLM, CheckpointError, RequestError, SamplingParams
from sdk.api.config import EngineConfig
from sdk.api.options import EngineOptions, engine_config
from sdk.api.other_names import CALLS, ENGINE, SAMPLING
from sdk.loaders.templates.chat_template import TemplateError
from sdk.requests.prompts.kinds import ChatOptions
from tests.api.language_server import LanguageServer

ROOT = Path(__file__).parents[2]
#: Options that take a Path too, which the config keeps as text.
PATHS = {
    "allowed_local_media_path",
    "mmproj",
    "tokenizer",
    "swap_path",
    "disk_offload_path",
    "download_dir",
    "generation_config",
}
#: A small checker's settings: of other packages nothing is read.
MYPY = """[mypy]
python_version = 3.10
follow_imports = silent
[mypy-torch.*,numpy.*,transformers.*,tokenizers.*,huggingface_hub.*,jinja2.*,tqdm.*]
follow_imports = skip
ignore_missing_imports = True
"""
WRONG = {
    'LLM("x", memmory=3)': '"memmory" for "LLM"; did you mean "memory"?',
    'LLM.plan("x", memmory=3)': '"memmory" for "plan" of "LLM"',
    'AsyncLLM("x", memmory=3)': '"memmory" for "AsyncLLM"',
    'LLM("x", num_threads="2")': '"num_threads" to "LLM" has incompatible type "str"',
    "SamplingParams(temprature=1)": '"temprature" for "SamplingParams"',
}


def test_the_options_that_tools_see_are_the_fields_of_the_config() -> None:
    found, wanted = get_type_hints(EngineOptions), get_type_hints(EngineConfig)
    del wanted["model"]
    assert list(found) == [field.name for field in fields(EngineConfig)][1:]
    differing = {name for name, kind in wanted.items() if found[name] != kind}
    assert differing <= PATHS


@pytest.mark.parametrize("call", [LLM, LLM.plan, AsyncLLM])
def test_a_signature_shows_every_option_with_its_default(call: object) -> None:
    shown = inspect.signature(call).parameters  # type: ignore[arg-type]
    assert shown["memory"].kind is inspect.Parameter.KEYWORD_ONLY
    assert not [p for p in shown.values() if p.kind is p.VAR_KEYWORD]
    for field in fields(EngineConfig)[1:]:
        assert shown[field.name].default == field.default
    assert shown["max_num_seqs"].annotation == "int"


def test_the_signature_of_sampling_params_shows_its_fields() -> None:
    shown = inspect.signature(SamplingParams).parameters
    assert list(shown) == [field.name for field in fields(SamplingParams)]
    assert shown["temperature"].default == 1.0
    assert shown["temperature"].kind is inspect.Parameter.KEYWORD_ONLY


def test_what_editors_show_of_an_option_is_what_the_page_says() -> None:
    command = [sys.executable, ".ci/option_docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (ROOT / "sdk" / "api" / "options.py").read_text(encoding="utf-8")
    body = text.partition("class EngineOptions")[2].partition("\n\n\n")[0]
    assert body.count('    """') == len(EngineOptions.__annotations__) + 1  # and the class's own


@pytest.mark.slow
def test_an_editor_completes_options_and_says_what_they_are_for(tmp_path: Path) -> None:
    source = (
        "from sdk import LLM, AsyncLLM, SamplingParams\n"
        'llm = LLM("m", memory="1GiB")\n'
        'other = AsyncLLM("m", kv_cache_dtype="int8")\n'
        "params = SamplingParams(temperature=0)\n"
        'last = LLM("m", max_\n'
    )
    file = tmp_path / "use.py"
    file.write_text(source)
    # the package is found from the folder that is open in the editor, as in an installed one
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    with LanguageServer(tmp_path) as server:
        server.open(file, source)
        memory = server.hover(file, 1, 17)
        assert "memory: int | str | MemoryPool | None" in memory
        assert "Hard budget for weights, KV cache, workspace and tokenizer" in memory
        assert "1.94 times the tokens of float16" in server.hover(file, 2, 26)
        assert "temperature" in server.hover(file, 3, 26)
        offered = server.completions(file, 4, 19)
        assert {"max_model_len=", "max_num_seqs=", "max_waiting="} <= set(offered)


@pytest.mark.slow
def test_an_editor_completes_methods_and_says_what_they_are_for(tmp_path: Path) -> None:
    source = (
        "from sdk import LLM\n"
        'llm = LLM("m")\n'
        'typed = llm.generate("x", returns=int)\n'
        'vectors = llm.embed("x")\n'
        "llm.\n"
    )
    file = tmp_path / "use.py"
    file.write_text(source)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    with LanguageServer(tmp_path) as server:
        server.open(file, source)
        assert "list[ParsedOutput[int]]" in server.hover(file, 2, 1)
        assert "Complete all prompts and wait" in server.hover(file, 2, 13)
        assert "use_tqdm: bool = True" in server.hover(file, 3, 16)
        methods = {name for name in dir(LLM) if name[0] != "_"}
        assert methods <= set(server.completions(file, 4, 4))


@pytest.mark.slow
def test_a_type_checker_refuses_misspelt_options(tmp_path: Path) -> None:
    good = 'LLM("x", memory="1GiB", swap_path=Path("y"), dtype="half"); SamplingParams(top_k=3)'
    fake = 'with FakeLLM("1") as fake: number: int = fake.generate("x", returns=int)[0].parsed'
    good = f"{good}\n{fake}; fake.requests[0].prompt; AsyncLLM(fake)"
    source = "from pathlib import Path\nfrom sdk import LLM, AsyncLLM, SamplingParams\n"
    source += "from sdk.testing import FakeLLM\n"
    (tmp_path / "use.py").write_text("\n".join([source, *WRONG, good]))
    (tmp_path / "mypy.ini").write_text(MYPY)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "use.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(tmp_path / "cache"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert f"Found {len(WRONG)} errors in 1 file" in run.stdout, run.stdout + run.stderr
    for message in WRONG.values():
        assert message in run.stdout


def test_none_is_the_default_of_every_option() -> None:
    names = [field.name for field in fields(EngineConfig)][1:]
    assert engine_config("m", **dict.fromkeys(names)) == engine_config("m")


@pytest.mark.parametrize("name", [name for name, known in ENGINE.items() if known.here])
def test_an_option_of_another_library_names_ours(name: str) -> None:
    with pytest.raises((TypeError, RequestError)) as error:
        engine_config("m", **{name: 12345.5})
    assert name in str(error.value) and ENGINE[name].here in str(error.value)


def test_what_other_libraries_ask_for_and_is_so_anyway_is_accepted() -> None:
    harmless = {
        "disable_log_stats": True,
        "runner": "generate",
        "max_seq_len_to_capture": 8192,
        "enable_sleep_mode": True,
        "n_gpu_layers": 0,
        "verbose": False,
        "rope_scaling": None,
    }
    assert engine_config("m", **harmless) == engine_config("m")
    with pytest.raises(RequestError, match=r"disable_log_stats=False .* nothing is logged"):
        engine_config("m", disable_log_stats=False)
    with pytest.raises(RequestError, match="disable_log_stats=1"):
        engine_config("m", disable_log_stats=1)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_sampling_parameter_of_another_library_names_ours(name: str) -> None:
    with pytest.raises(TypeError) as error:
        SamplingParams(**{name: 1})
    assert f"{name!r}: {SAMPLING[name]}" in str(error.value)


def test_every_name_of_another_library_stands_in_the_docs() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in [*ENGINE, *SAMPLING] if f"`{name}`" not in text] == []


def test_advice_names_what_exists() -> None:
    ours = {field.name for kind in (EngineConfig, SamplingParams) for field in fields(kind)}
    assert not ours & {*ENGINE}
    ours |= {field.name for field in fields(ChatOptions)}
    for call in (LLM.generate, LLM.encode, LLM.embed, LLM.rerank):
        ours |= {*inspect.signature(call).parameters}
    advice = " ".join(
        [*(known.here for known in ENGINE.values()), *SAMPLING.values(), *CALLS.values()]
    )
    assert set(re.findall(r"\b([a-z_]+)=", advice)) <= ours
    assert set(re.findall(r"\buse ([a-z]+_[a-z_]+)\b", advice)) <= ours | {"get_metrics"}


def test_a_swap_space_in_vllms_unit_is_told_ours() -> None:
    with pytest.raises(RequestError, match="swap_space='4GiB'"):
        engine_config("m", swap_space=4)


@pytest.mark.parametrize(("given", "kept"), [("half", "float16"), ("float", "float32")])
def test_vllms_short_names_of_types_are_ours_too(given: str, kept: str) -> None:
    assert engine_config("m", dtype=given).dtype == kept


def test_a_download_dir_is_a_cache_of_the_hub(golden: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(golden / "arch-llama3" / "hf", repository / "snapshots" / ("0" * 40))
    options = {"download_dir": tmp_path, "local_files_only": True, "max_model_len": 16}
    assert LLM.plan("owner/tiny", **options).fits  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="not found in the local cache"):
        LLM.plan("owner/tiny", local_files_only=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_16_bit_dtype_is_met_or_exceeded_on_a_cpu(golden: Path, dtype: Any) -> None:
    prompt = {"prompt_token_ids": [5, 9, 200, 31]}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    answers = []
    for options in ({}, {"dtype": dtype}):
        with LLM(golden / "arch-llama3" / "hf", max_model_len=32, **options) as llm:
            answers.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
            said = f"dtype={dtype!r}: activations are at least that precise" in llm.explain()
            assert said == bool(options)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"hf_overrides": "no"}, "hf_overrides: expected a dict of config.json's keys, found 'no'"),
        ({"hf_overrides": [1]}, "hf_overrides: expected a dict"),
        ({"hf_overrides": {1: 2}}, "hf_overrides: expected a dict"),
        ({"tokenizer": 5}, "tokenizer: expected a path, found 5"),
        ({"revision": 5}, "revision: expected a string, found 5"),
        ({"disk_offload": 4}, "disk_offload: 4 would mean bytes; write disk_offload='4GiB'"),
        ({"disk_offload": 1.5}, "write disk_offload='1.5GiB'"),
        ({"cpu_offload": 4, "device": "cuda"}, "write cpu_offload='4GiB'"),
    ],
)
def test_an_option_of_a_wrong_type_or_unit_is_named(option: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        EngineConfig(model="model.gguf", **option)


def test_a_chat_template_that_is_no_template_is_refused_at_load(golden: Path) -> None:
    """Every conversation would be the text "/nowhere.jinja"."""
    model = golden / "gguf-Q8_0" / "model.gguf"
    with pytest.raises(TemplateError, match=r"found '/nowhere\.jinja'; of a file pass its text"):
        LLM(model, chat_template="/nowhere.jinja", max_model_len=64)


def test_overrides_that_nothing_reads_are_reported(golden: Path) -> None:
    given = {"rope_theta": 5000.0, "rope_thetta": 1.0}
    with LLM(golden / "gguf-Q8_0" / "model.gguf", hf_overrides=given, max_model_len=64) as llm:
        assert any(line.endswith("have no effect: rope_thetta") for line in llm.load_warnings)
