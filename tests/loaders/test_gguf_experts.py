"""Tensors of a GGUF file that hold the matrices of all experts of a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError
from sdk.quant.weight import BlockWeight

Save = Callable[..., Path]
EXPERTS, HIDDEN, INNER, Q4_0, NVFP4 = 3, 32, 64, 2, 40
PATH = "model.layers.0.mlp.experts"


@pytest.fixture
def mixtral(files: Any) -> Any:
    """A llama whose layer has three experts in Q4_0; every nibble is its expert's number + 8."""
    model = files.llama()
    model.metadata |= {"llama.expert_count": (4, EXPERTS), "llama.expert_used_count": (4, 2)}
    for part, (rows, columns) in {
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }.items():
        del model.tensors[f"blk.0.ffn_{part}.weight"]
        blocks = np.zeros((EXPERTS, rows, columns // 32, 18), np.uint8)
        scales = np.arange(1, rows * (columns // 32) + 1, dtype="<f2") / 64
        blocks[..., :2] = scales.reshape(rows, -1, 1).view(np.uint8)
        blocks[..., 2:] = 0x11 * (np.arange(EXPERTS, dtype=np.uint8) + 8)[:, None, None, None]
        dims = (columns, rows, EXPERTS)
        model.tensors[f"blk.0.ffn_{part}_exps.weight"] = (dims, Q4_0, blocks.tobytes())
    model.tensors["blk.0.ffn_gate_inp.weight"] = ((HIDDEN, EXPERTS), 0, files.f32(EXPERTS, HIDDEN))
    return model


def test_every_expert_is_a_packed_matrix_of_its_own(mixtral: Any, save: Save) -> None:
    checkpoint = open_checkpoint(save(mixtral.build()))
    assert checkpoint.config["model_type"] == "mixtral"
    assert checkpoint.config["num_local_experts"] == EXPERTS
    assert checkpoint.config["num_experts_per_tok"] == 2
    for part, shape in {
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }.items():
        scales = torch.arange(1, shape[0] * shape[1] // 32 + 1) / 64
        for expert in range(EXPERTS):
            weight = checkpoint.weight(f"{PATH}.{expert}.{part}_proj")
            assert isinstance(weight, BlockWeight)
            expected = (expert * scales).view(shape[0], -1).repeat_interleave(32, dim=1)
            assert torch.equal(weight.dequantize(), expected)
    assert checkpoint.weight("model.layers.0.mlp.gate").shape == (EXPERTS, HIDDEN)
    assert not any("ffn" in name for name in checkpoint.unused() if "norm" not in name)


def with_nvfp4(model: Any, scales: list[float]) -> None:
    """The down projections in NVFP4, one value throughout, with the factors of all experts."""
    blocks = np.full((EXPERTS, HIDDEN, 36), 0x22, np.uint8)
    blocks[..., :4] = 0x40
    dims = (INNER, HIDDEN, EXPERTS)
    model.tensors["blk.0.ffn_down_exps.weight"] = (dims, NVFP4, blocks.tobytes())
    factors = np.array(scales, "<f4").tobytes()
    model.tensors["blk.0.ffn_down_exps.scale"] = ((len(scales),), 0, factors)


def test_the_factor_beside_nvfp4_experts_is_each_ones_own(mixtral: Any, save: Save) -> None:
    with_nvfp4(mixtral, [1.0, 2.0, -0.5])
    checkpoint = open_checkpoint(save(mixtral.build()))
    found = [checkpoint.weight(f"{PATH}.{e}.down_proj").dequantize() for e in range(EXPERTS)]
    assert bool((found[0] != 0).all())
    assert torch.equal(found[1], 2 * found[0]) and torch.equal(found[2], -0.5 * found[0])
    assert "blk.0.ffn_down_exps.scale" not in checkpoint.unused()


def test_factors_for_another_number_of_experts_are_refused(mixtral: Any, save: Save) -> None:
    with_nvfp4(mixtral, [1.0, 2.0])
    checkpoint = open_checkpoint(save(mixtral.build()))
    with pytest.raises(CheckpointError, match=r"exps\.scale': expected F32 \[3\], found F32 \[2\]"):
        checkpoint.weight(f"{PATH}.0.down_proj")


def test_an_expert_that_the_metadata_do_not_count_is_missing(mixtral: Any, save: Save) -> None:
    checkpoint = open_checkpoint(save(mixtral.build()))
    assert checkpoint.has(f"{PATH}.2.up_proj")
    assert not checkpoint.has(f"{PATH}.3.up_proj")
    assert not checkpoint.has(f"{PATH}.0.up_proj.bias")
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj is missing"):
        checkpoint.weight(f"{PATH}.3.up_proj")


def test_a_tensor_of_other_experts_than_the_metadata_say_is_refused(
    mixtral: Any, save: Save
) -> None:
    mixtral.metadata["llama.expert_count"] = (4, 4)
    checkpoint = open_checkpoint(save(mixtral.build()))
    message = r"ffn_up_exps.weight'.*expected shape \[4, 64, 32\].*found \[3, 64, 32\]"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.weight(f"{PATH}.0.up_proj")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_used_count", 4, "expert_used_count is 4, expected an integer from 1 to 3"),
        ("expert_count", 1025, "expert_count is 1025, expected an integer from 0 to 1024"),
    ],
)
def test_impossible_numbers_of_experts_are_refused(
    mixtral: Any, save: Save, key: str, value: int, message: str
) -> None:
    mixtral.metadata[f"llama.{key}"] = (4, value)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(save(mixtral.build()))
