"""config.json: what is filled in, what is refused, and quantized folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdk.kernels.errors import SdkError
from sdk.loaders.folders.hf_folder import MAX_CONFIG, complete_config
from sdk.loaders.json_file import read_json
from sdk.loaders.model_shapes import LIMITS, expected_shape
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError

EMBED = "model.embed_tokens.weight"
ONES = np.ones((8, 32), np.float32)


@pytest.fixture
def folder(files: Any, tmp_path: Path) -> Path:
    made: Path = files.folder(tmp_path / "model")
    return made


# -- configs ---------------------------------------------------------------------------------------


def test_defaults_of_the_model_class_are_filled_in(files: Any, folder: Path) -> None:
    config = open_checkpoint(folder).config
    assert config["rms_norm_eps"] == 1e-6
    assert config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["vocab_size"] == 8


def test_code_named_by_a_config_is_ignored_and_an_unknown_model_left_as_it_is(
    files: Any, tmp_path: Path
) -> None:
    config = files.config(auto_map={"AutoConfig": "evil.Config"}, torch_dtype="float32")
    assert "auto_map" not in open_checkpoint(files.folder(tmp_path / "a", config=config)).config
    config["model_type"] = "never_heard_of"
    unknown = open_checkpoint(files.folder(tmp_path / "b", config=config)).config
    assert unknown["model_type"] == "never_heard_of"
    assert "auto_map" not in unknown


def test_a_model_that_also_sees_is_reduced_to_its_language_model(files: Any) -> None:
    text = files.config(model_type="gemma3_text", head_dim=8)
    raw = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    config = complete_config(raw, "config.json")
    assert config["model_type"] == "gemma3_text"
    assert config["eos_token_id"] == [1, 106]
    assert config["hidden_size"] == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.json: not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"model_type": "llama", "rms_norm_eps": NaN}', "NaN is not allowed in JSON"),
        ('{"model_type": "llama", "rms_norm_eps": -Infinity}', "-Infinity is not allowed in JSON"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ('{"a": ' + "[" * 10**5 + "]" * 10**5 + "}", "nested too deeply"),
        ('{"vocab_size": 1' + "0" * 10**5 + "}", "a number of 100001 digits"),
        ("{}", "model_type is None, expected a name"),
        ('{"model_type": 3}', "model_type is 3"),
    ],
    ids=lambda value: value[:30],
)
def test_a_config_that_is_not_sound_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_a_missing_or_huge_config_is_refused(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text("{" + " " * MAX_CONFIG + "}")
    with pytest.raises(CheckpointError, match=r"config.json: larger than 8 MiB"):
        open_checkpoint(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no model in the folder .*config.json"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"expected config.json next to the weights"):
        open_checkpoint(folder / "model.safetensors")
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        read_json(path, 100)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (key, value)
        for key in sorted(LIMITS)
        for value in (0, -1, 2**40, 2**63, "8", 1.5, True)
        if (key, value) != ("sliding_window", 0)  # no window
    ],
)
def test_numbers_outside_their_limits_are_named(files: Any, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=f"here: {key} is {value!r}, expected"):
        complete_config(files.config(**{key: value}), "here")


def test_sizes_that_differ_from_layer_to_layer_may_be_lists(files: Any) -> None:
    raw = files.config(model_type="unknown_here", intermediate_size=[64, 128])
    assert complete_config(raw, "here")["intermediate_size"] == [64, 128]
    raw["intermediate_size"] = [64, 0]
    with pytest.raises(CheckpointError, match="intermediate_size is 0, expected"):
        complete_config(raw, "here")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a positive number"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0, expected a positive number"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4', expected a positive number"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "not a valid llama config"),
        ({"text_config": {"model_type": "llama", "vocab_size": 2**40}}, "text_config: vocab_size"),
    ],
)
def test_contradictions_in_a_config_are_named(
    files: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        complete_config(files.config(**changes), "here")


ODD_VALUES: list[Any] = [
    None, True, 0, -1, 2**63, 1e308, -0.5, "", "x", [], [1], ["x"], [[]], {}, {"a": 1}, {"a": {}},
    {"rope_type": "yarn"}, {"rope_type": 3}, {"factor": "x"},
]  # fmt: skip
ODD_KEYS = [
    "model_type", "text_config", "quantization_config", "auto_map", "architectures", "rope_theta",
    "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "head_dim", "hidden_act",
    "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype", "rms_norm_eps",
    *sorted(LIMITS),
]  # fmt: skip


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "phi3", "granite"])
def test_no_odd_value_in_a_config_fails_in_another_way_than_by_an_error(
    files: Any, folder: Path, model_type: str
) -> None:
    opened = 0
    for key in ODD_KEYS:
        for value in ODD_VALUES:
            config = files.config(model_type=model_type) | {key: value}
            (folder / "config.json").write_text(json.dumps(config))
            try:
                checkpoint = open_checkpoint(folder)
                checkpoint.weight("model.embed_tokens")
                opened += 1
            except SdkError:
                pass
    assert 0 < opened < len(ODD_KEYS) * len(ODD_VALUES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embed_tokens", (8, 32)),
        ("model.layers.0.self_attn.q_proj", (32, 32)),
        ("model.layers.0.self_attn.k_proj.bias", (16,)),
        ("model.layers.0.self_attn.qkv_proj", (64, 32)),
        ("model.layers.0.self_attn.o_proj", (32, 32)),
        ("model.layers.0.mlp.gate_up_proj", (128, 32)),
        ("model.layers.0.mlp.down_proj", (32, 64)),
        ("model.layers.0.self_attn.k_norm", (8,)),
        ("model.layers.0.input_layernorm", (32,)),
        ("model.norm", (32,)),
        ("model.layers.0.mlp.router", None),
    ],
)
def test_shapes_follow_from_the_config(
    files: Any, name: str, expected: tuple[int, ...] | None
) -> None:
    assert expected_shape(files.config(), name) == expected
    assert expected_shape(files.config(model_type="persimmon"), name) is None
    assert expected_shape({"model_type": "llama"}, name) is None


def test_olmo_2_normalizes_all_heads_at_once(files: Any) -> None:
    config = files.config(model_type="olmo2")
    assert expected_shape(config, "model.layers.0.self_attn.q_norm") == (32,)
    assert expected_shape(config, "model.layers.0.self_attn.k_norm") == (16,)


# -- quantized folders -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "AQLM"}, "names aqlm: AQLM, sums of codebooks"),
        ({"quant_method": "bitblas"}, "names bitblas: BitBLAS, codes in the order of a GPU"),
        ({"quant_method": "exl3"}, "names exl3: EXL3, trellis codes"),
        ({"quant_method": "higgs"}, "names higgs: HIGGS, rotated vectors"),
        ({"quant_method": "marlin"}, "names marlin: Marlin, codes in the order of a GPU"),
        ({"quant_method": "quark"}, "names quark: Quark"),
        ({"quant_method": "sparseml"}, "names sparseml: SparseML, sparse"),
        ({"quant_method": "spqr"}, "names spqr: SpQR, codes plus outliers"),
        ({"quant_method": "vptq"}, "names vptq: VPTQ, vector codebooks"),
        ({"quant_method": "gguf-types"}, "names gguf_types"),
        ({"quant_method": "../no"}, "names _no"),
        ({"quant_method": ""}, "names "),
        ({"producer": {"name": "nobody"}}, "names nobody"),
        ({"producer": "nobody"}, "names nobody"),
        ({}, "quantization_config names no method"),
    ],
)
def test_a_method_that_is_not_run_is_refused_by_name(
    files: Any, tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    config = files.config(quantization_config=settings)
    message = rf"weights are quantized \(.*{named}.*\), which is not supported; use the model"
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(files.folder(tmp_path / "a", config=config))
    config = {"model_type": "gemma3", "text_config": config}
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(files.folder(tmp_path / "b", config=config))
    apart = files.folder(tmp_path / "c", config=files.config(quantization_config=None))
    (apart / "quantize_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(apart)


@pytest.mark.parametrize("method", [3, ["gptq"], {"name": "gptq"}, True])
def test_a_method_without_a_name_is_refused(files: Any, tmp_path: Path, method: Any) -> None:
    config = files.config(quantization_config={"quant_method": method})
    with pytest.raises(CheckpointError, match=r"quant_method is .*, expected the name of a method"):
        open_checkpoint(files.folder(tmp_path / "model", config=config))


def test_a_quantization_config_that_is_no_object_is_refused(files: Any, tmp_path: Path) -> None:
    config = files.config(quantization_config="gptq")
    with pytest.raises(CheckpointError, match=r"quantization_config is gptq, expected an object"):
        open_checkpoint(files.folder(tmp_path / "model", config=config))


@pytest.mark.parametrize(
    ("ending", "method"),
    [
        ("qweight", "GPTQ or AWQ"),
        ("weight_packed", "compressed-tensors"),
        ("SCB", "bitsandbytes LLM.int8"),
        ("weight.quant_state.bitsandbytes__nf4", "bitsandbytes nf4"),
        ("weight.quant_state.bitsandbytes__fp4", "bitsandbytes fp4"),
        ("gate_up_proj_blocks", "MXFP4"),
        ("_weight_qdata", "torchao"),
        ("W_q", "HQQ"),
    ],
)
def test_tensors_of_another_method_than_the_config_names_are_refused(
    files: Any, tmp_path: Path, ending: str, method: str
) -> None:
    tensors = {EMBED: ONES, f"model.layers.0.mlp.down_proj.{ending}": np.ones(3)}
    config = files.config(quantization_config={"quant_method": "fp8"})
    message = rf"quantization_config names fp8, but tensor .*{ending}' is written by {method}"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(files.folder(tmp_path / "model", tensors, config))


def test_quantized_tensors_are_recognised_without_a_config(files: Any, tmp_path: Path) -> None:
    tensors = {EMBED: ONES, "model.layers.0.mlp.act.scales": np.ones(3)}
    with pytest.raises(UnsupportedError, match=r"act\.scales' is written by AWQ for activation"):
        open_checkpoint(files.folder(tmp_path / "model", tensors))
