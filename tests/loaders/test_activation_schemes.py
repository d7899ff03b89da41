"""What each format says of the inputs of its layers, and files that say it wrongly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.weights.layouts import ActivationScheme, inputs_of
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import StackedWeight, concat

SHAPE = (12, 64)
Scheme = ActivationScheme


def settings(inputs: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    """compressed-tensors; 8-bit integers per channel unless ``weights`` says otherwise."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def integers() -> dict[str, Tensor]:
    codes = torch.randint(-128, 128, SHAPE, generator=torch.Generator().manual_seed(0))
    return {".weight": codes.to(torch.int8), ".weight_scale": torch.rand(12, 1) + 0.1}


def floats(*scale: int) -> dict[str, Tensor]:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return {".weight": values.to(torch.float8_e4m3fn), ".weight_scale": torch.rand(scale) + 0.1}


def nvfp4(**more: Tensor) -> dict[str, Tensor]:
    packed = torch.randint(0, 256, (12, 32), generator=torch.Generator().manual_seed(0))
    return {"": packed.to(torch.uint8), "scale": torch.ones(12, 4).to(torch.float8_e4m3fn), **more}


DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
POINT = torch.tensor([-7], dtype=torch.int8)


@pytest.mark.parametrize(
    ("said", "tensors", "scheme", "spec"),
    [
        (None, {}, None, "w8a16s"),
        ({**DYNAMIC, "num_bits": 16}, {}, None, "w8a16s"),
        (DYNAMIC, {}, Scheme("int"), "w8a8s"),
        ({**DYNAMIC, "strategy": "tensor"}, {}, Scheme("int"), "w8a8s"),
        ({**DYNAMIC, "symmetric": False}, {}, Scheme("int", symmetric=False), "w8a8s"),
        ({**DYNAMIC, "num_bits": 4}, {}, Scheme("int", 4), "w8a4s"),
        (
            {**DYNAMIC, "strategy": "group", "group_size": 32},
            {},
            Scheme("int", group=32),
            "w8a8s",
        ),
        (STATIC, {".input_scale": torch.tensor([0.25])}, Scheme("int", static=0.25), "w8a8s"),
        (
            {**STATIC, "symmetric": False},
            {".input_scale": torch.tensor(0.5).bfloat16(), ".input_zero_point": POINT},
            Scheme("int", static=0.5, zero=-7, symmetric=False),
            "w8a8s",
        ),
        ({**DYNAMIC, "type": "float"}, {}, Scheme("e4m3"), "w8afp8s"),
    ],
)
def test_compressed_tensors_describes_inputs_of_integers(
    layers: Any,
    said: dict[str, Any] | None,
    tensors: dict[str, Tensor],
    scheme: ActivationScheme | None,
    spec: str,
) -> None:
    weight = layers.weight(settings(said), {**integers(), **tensors}, SHAPE)
    assert (inputs_of(weight.layout), str(weight.spec)) == (scheme, spec)
    assert weight.inputs == ("" if scheme is None else str(scheme))


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        ({"strategy": "token", "dynamic": True}, Scheme("e4m3")),
        ({"strategy": "group", "group_size": 16, "dynamic": True}, Scheme("e4m3", group=16)),
        ({"strategy": "tensor", "dynamic": False}, Scheme("e4m3", static=0.125)),
        (
            {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"},
            Scheme("e4m3", group=32, rule="mx"),
        ),
    ],
)
def test_compressed_tensors_describes_inputs_of_8_bit_floats(
    layers: Any, said: dict[str, Any], scheme: ActivationScheme
) -> None:
    tensors = {**floats(12, 1), ".input_scale": torch.tensor([0.125])}
    config = settings({"num_bits": 8, "type": "float", "symmetric": True, **said}, type="float")
    weight = layers.weight(config, tensors, SHAPE)
    assert inputs_of(weight.layout) == scheme
    assert str(weight.spec) == "fp8afp8"


def test_compressed_tensors_describes_inputs_of_4_bit_floats(layers: Any) -> None:
    said = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16}
    said |= {"strategy": "tensor_group", "dynamic": "local"}
    tensors = {f".weight_{k or 'packed'}": v for k, v in nvfp4().items()}
    tensors |= {f".{k}_global_scale": torch.tensor([8.0]) for k in ("weight", "input")}
    config = settings(said, num_bits=4, type="float", strategy="tensor_group", group_size=16)
    weight = layers.weight(config, tensors, SHAPE)
    assert inputs_of(weight.layout) == Scheme("e2m1", 4, 16, "nv", factor=8.0)
    assert str(weight.spec) == "nvfp4afp4"
    said |= {"strategy": "group", "group_size": 32, "dynamic": True}
    config = settings(said, num_bits=4, type="float", strategy="group", group_size=32)
    powers = torch.full((12, 2), 120, dtype=torch.uint8)
    tensors = {".weight_packed": tensors[".weight_packed"], ".weight_scale": powers}
    weight = layers.weight(config, tensors, SHAPE)
    assert inputs_of(weight.layout) == Scheme("e2m1", 4, 32, "mx")


def test_groups_of_one_kind_that_round_otherwise_are_told_apart_by_their_targets(
    layers: Any,
) -> None:
    config = settings(DYNAMIC)
    groups = config["config_groups"]
    groups["group_1"] = {**groups["group_0"], "input_activations": None}
    for targets, scheme in (
        (["re:.*down_proj"], None),
        (["model.layers.0.mlp.down_proj"], None),
        (["re:.*mlp.(gate|up|down)_proj$"], None),
        (["re:.*q_proj", "re:(", "re:(.*)*.*", "re:" + ".*" * 50], Scheme("int")),
    ):
        groups["group_1"]["targets"] = targets
        assert inputs_of(layers.weight(config, integers(), SHAPE).layout) == scheme


@pytest.mark.parametrize("scale", [math.nan, math.inf, 0.0, -1.0, 1e-42])
def test_static_scales_that_are_no_positive_number_are_refused(layers: Any, scale: float) -> None:
    tensors = {**integers(), ".input_scale": torch.tensor([scale])}
    with pytest.raises(CheckpointError, match=r"input_scale'.* number"):
        layers.weight(settings(STATIC), tensors, SHAPE)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({}, "input_scale': missing"),
        ({".input_scale": torch.ones(2)}, r"input_scale': shape \[2\], expected one number"),
        ({".input_scale": torch.ones(1, dtype=torch.int8)}, "input_scale': I8, expected"),
        ({".input_scale": torch.ones(1)}, "input_zero_point': missing"),
        ({".input_scale": torch.ones(1), ".input_zero_point": POINT.repeat(2)}, r"shape \[2\]"),
        ({".input_scale": torch.ones(1), ".input_zero_point": POINT.float()}, "F32, expected I8"),
        (
            {".input_scale": torch.ones(1), ".input_zero_point": torch.tensor([200]).int()},
            "is 200, expected -128 to 127",
        ),
    ],
)
def test_static_tensors_that_do_not_fit_are_refused(
    layers: Any, tensors: dict[str, Tensor], error: str
) -> None:
    config = settings({**STATIC, "symmetric": False})
    with pytest.raises(CheckpointError, match=error):
        layers.weight(config, {**integers(), **tensors}, SHAPE)


@pytest.mark.parametrize(
    ("said", "error", "kind"),
    [
        ("int8", "input_activations is int8, expected an object", CheckpointError),
        ({"num_bits": 1}, "num_bits is 1, expected 2 to 8", CheckpointError),
        ({"num_bits": "8"}, "num_bits is 8, expected", CheckpointError),
        ({"num_bits": 6, "type": "float"}, "activations of 6 bits and type 'float'", None),
        ({"type": "fixed"}, "type 'fixed'", None),
        ({"dynamic": False, "strategy": "token"}, "the strategy 'token' with static scales", None),
        ({"strategy": "channel"}, "the strategy 'channel'", None),
        ({"strategy": "group"}, "group_size is None, expected 1 or more", CheckpointError),
        ({"strategy": "group", "group_size": -1}, "group_size is -1", CheckpointError),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(
    layers: Any, said: Any, error: str, kind: type[Exception] | None
) -> None:
    config = settings({**DYNAMIC, **said} if isinstance(said, dict) else said)
    with pytest.raises(kind or UnsupportedError, match=error):
        layers.open(config, integers(), SHAPE)


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        ({}, None),
        ({"activation_scheme": "dynamic"}, Scheme("e4m3")),
        ({"activation_scheme": "static"}, Scheme("e4m3", static=2.0)),
        (
            {"activation_scheme": "dynamic", "weight_block_size": [8, 16]},
            Scheme("e4m3", group=16),
        ),
        (
            {
                "activation_scheme": "dynamic",
                "weight_block_size": [8, 16],
                "scale_fmt": "ue8m0",
            },
            Scheme("e4m3", group=16, rule="power"),
        ),
    ],
)
@pytest.mark.parametrize("name", [".input_scale", ".activation_scale"])
def test_fp8_folders_name_their_scheme(
    layers: Any, said: dict[str, Any], scheme: ActivationScheme | None, name: str
) -> None:
    tensors = {**floats(12, 1), name: torch.tensor(2.0)}
    weight = layers.weight({"quant_method": "fp8", **said}, tensors, SHAPE)
    assert inputs_of(weight.layout) == scheme


def test_fp8_folders_that_say_it_wrongly_are_refused(layers: Any) -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "static"}
    with pytest.raises(CheckpointError, match="input_scale': missing"):
        layers.weight(fp8, floats(1), SHAPE)
    with pytest.raises(CheckpointError, match=r"input_scale': is -1\.0, expected a positive"):
        layers.weight(fp8, {**floats(1), ".input_scale": torch.tensor(-1.0)}, SHAPE)
    with pytest.raises(CheckpointError, match="activation_scheme is 'often', expected dynamic or"):
        layers.open({**fp8, "activation_scheme": "often"}, floats(1), SHAPE)


def test_fbgemm_rounds_every_token_with_a_bound(layers: Any) -> None:
    fbgemm = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    weight = layers.weight(fbgemm, floats(12, 1), SHAPE)
    assert inputs_of(weight.layout) == Scheme("e4m3", limit=1200.0)
    tensors = {**floats(12, 1), ".input_scale_ub": torch.tensor([300.0])}
    assert inputs_of(layers.weight(fbgemm, tensors, SHAPE).layout) == Scheme("e4m3", limit=300.0)
    for wrong in (0, -1.0, "12", True, 1e300):
        with pytest.raises(CheckpointError, match="activation_scale_ub is"):
            layers.open({**fbgemm, "activation_scale_ub": wrong}, floats(12, 1), SHAPE)


@pytest.mark.parametrize(
    ("algorithm", "tensors", "scheme"),
    [
        ("FP8", {**floats(1), ".input_scale": torch.tensor(0.5)}, Scheme("e4m3", static=0.5)),
        ("FP8_PER_CHANNEL_PER_TOKEN", floats(12), Scheme("e4m3")),
        (
            "MXFP8",
            {**floats(1), ".weight_scale": torch.full((12, 2), 120, dtype=torch.uint8)},
            Scheme("e4m3", group=32, rule="mx"),
        ),
        ("MIXED_PRECISION", floats(12), None),
    ],
)
def test_modelopt_rounds_8_bit_floats_by_its_algorithm(
    layers: Any, algorithm: str, tensors: dict[str, Tensor], scheme: ActivationScheme | None
) -> None:
    config = {"quant_method": "modelopt", "quant_algo": algorithm}
    assert inputs_of(layers.weight(config, tensors, SHAPE).layout) == scheme


def test_modelopt_rounds_4_bit_floats_where_it_has_a_scale(layers: Any) -> None:
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    tensors = {f".weight{'_' * bool(k)}{k}": v for k, v in nvfp4().items()}
    tensors[".weight_scale_2"] = torch.tensor(0.5)
    assert inputs_of(layers.weight(config, tensors, SHAPE).layout) is None
    tensors[".input_scale"] = torch.tensor(0.25)
    found = inputs_of(layers.weight(config, tensors, SHAPE).layout)
    assert found == Scheme("e2m1", 4, 16, "nv", factor=4.0)
    with pytest.raises(CheckpointError, match="input_scale': missing"):
        layers.weight({**config, "quant_algo": "FP8"}, floats(1), SHAPE)


def test_layers_whose_inputs_are_rounded_alike_are_joined(layers: Any) -> None:
    def made(scale: float) -> Any:
        tensors = {**integers(), ".input_scale": torch.tensor([scale])}
        return layers.weight(settings(STATIC), tensors, SHAPE)

    same = concat([made(0.5), made(0.5)])
    assert not isinstance(same, StackedWeight) and same.inputs == "int8 static"
    unlike = concat([made(0.5), made(0.25)])
    assert isinstance(unlike, StackedWeight) and unlike.inputs == "int8 static"
    half = same.narrow("in", 0, 32)
    assert half.inputs == "int8 static" and str(half.spec) == "w8a8s"
