"""How a request without parameters is sampled, and who says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, CheckpointError, RequestError, SamplingParams
from sdk.api.options import engine_config
from sdk.loading.sampling_defaults import OWN, SamplingDefaults, sampling_defaults
from sdk.memory.resolve import open_model


@pytest.fixture(scope="module")
def folder(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that a test may give a generation_config.json."""
    target: Path = tmp_path_factory.mktemp("tiny") / "model"
    shutil.copytree(golden / "arch-llama3" / "hf", target)
    return target


def found(folder: Path, generation: dict[str, Any] | None, **options: Any) -> SamplingDefaults:
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if generation is not None:
        file.write_text(json.dumps(generation))
    config = engine_config(folder, **options)
    checkpoint = open_model(config)
    try:
        return sampling_defaults(config, checkpoint)
    finally:
        checkpoint.close()


def test_a_model_that_names_no_sampling_gets_this_librarys(folder: Path) -> None:
    for generation in (None, {"eos_token_id": 2}, {"max_new_tokens": 9}):
        defaults = found(folder, generation)
        assert defaults.params.temperature == OWN["temperature"] < 1
        assert "this library's" in str(defaults)
    assert defaults.params.max_tokens == 9


def test_what_a_file_names_wins_over_all_of_ours(folder: Path) -> None:
    assert found(folder, {"top_k": 20}).params == SamplingParams(top_k=20)
    assert found(folder, {"do_sample": False, "temperature": 0.6}).params.greedy
    defaults = found(folder, {"temperature": 0.6, "top_p": 0.95})
    assert str(defaults) == "temperature 0.6, top_p 0.95: generation_config.json"


def test_the_sampling_of_a_gguf_file_wins_too(tiny_path: Path) -> None:
    config = engine_config(tiny_path)
    checkpoint = open_model(config)
    checkpoint.generation_config = {"temperature": 0.3}
    defaults = sampling_defaults(config, checkpoint)
    checkpoint.close()
    assert defaults.params == SamplingParams(temperature=0.3)
    assert "general.sampling" in defaults.source


def test_vllms_neutral_defaults_are_one_argument_away(folder: Path) -> None:
    assert found(folder, {"top_k": 20}, generation_config="vllm").params == SamplingParams()
    assert found(folder, None, generation_config="vllm").params == SamplingParams()


def test_a_generation_config_may_come_from_another_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.4}')
    assert found(folder, None, generation_config=tmp_path).params.temperature == 0.4
    with pytest.raises(CheckpointError, match="expected 'auto', 'vllm' or a folder"):
        found(folder, None, generation_config="nowhere")


def test_single_values_may_be_overridden(folder: Path) -> None:
    given = {"temperature": 0.5, "max_new_tokens": 7}
    defaults = found(folder, {"top_k": 20}, override_generation_config=given)
    assert defaults.params == SamplingParams(temperature=0.5, top_k=20, max_tokens=7)
    assert defaults.source == "override_generation_config over generation_config.json"


@pytest.mark.parametrize("override", [{"heat": 1}, {"temperature": -1}, 3, {1: 2}])
def test_a_bad_override_is_refused_by_plan_and_by_loading(folder: Path, override: Any) -> None:
    for call in (LLM.plan, LLM):
        with pytest.raises(RequestError, match="override_generation_config"):
            call(folder, override_generation_config=override)  # type: ignore[operator]


def test_a_file_with_a_value_out_of_range_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config: temperature must be .* got -2"):
        found(folder, {"temperature": -2})


def test_explain_says_what_applies_and_explicit_parameters_mean_what_they_say(
    tiny_path: Path,
) -> None:
    with LLM(tiny_path, max_model_len=64) as llm:
        assert "\nsampling   temperature 0" in llm.explain()
        assert llm.get_default_sampling_params() == SamplingParams(**OWN)
        prompt = {"prompt_token_ids": [7, 8, 9]}
        params = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
        [explicit] = llm.generate(prompt, params)
        [ours] = llm.generate(prompt, params.clone(**OWN))
    with LLM(tiny_path, max_model_len=64, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        [neutral] = llm.generate(prompt, params)
    assert explicit.outputs[0].token_ids == neutral.outputs[0].token_ids
    assert explicit.outputs[0].token_ids != ours.outputs[0].token_ids
