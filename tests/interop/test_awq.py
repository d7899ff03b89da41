"""AWQ folders between this package, autoawq, and gptqmodel under transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import sdk

Run = Callable[..., Path]
#: gptqmodel multiplies in float16 on a CPU.
HALF = 5e-3


def test_gptqmodel_and_autoawq_read_ours(
    model: Callable[[str], Path],
    ids: list[list[int]],
    prompt: list[int],
    tmp_path: Path,
    run: Run,
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    out = sdk.quantize(model("llama"), tmp_path / "made", "awq-w4g64", calibration=ids, tokens=64)
    job = {"folder": str(out), "prompt": prompt, "method": "awq", "dtype": "float16"}
    theirs = np.load(run("gptqmodel", "read_transformers", **job))
    assert_weights(out, theirs, torch.float16)
    assert distance(logits(out, prompt), theirs["logits"]) < HALF
    assert_weights(out, np.load(run("extras", "read_autoawq", folder=str(out))), torch.float16)


def test_a_folder_of_gptqmodel_is_read(
    model: Callable[[str], Path],
    ids: list[list[int]],
    prompt: list[int],
    tmp_path: Path,
    run: Run,
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    options = {"bits": 4, "group_size": 128}
    job = {"model": str(model("llama")), "ids": ids, "method": "awq", "options": options}
    made = run("gptqmodel", "write_gptqmodel", out=str(tmp_path / "made"), **job)
    job = {"folder": str(made), "prompt": prompt, "method": "awq", "dtype": "float16"}
    theirs = np.load(run("gptqmodel", "read_transformers", **job))
    assert_weights(made, theirs, torch.float16)
    assert distance(logits(made, prompt), theirs["logits"]) < HALF


@pytest.mark.parametrize("group", [64, 128])
def test_a_folder_of_autoawq_is_read(
    group: int,
    model: Callable[[str], Path],
    ids: list[list[int]],
    run: Run,
    quantize_with: Callable[..., Path],
    assert_weights: Callable[..., None],
) -> None:
    made = quantize_with("autoawq", model("llama"), f"awq-w4g{group}", ids)
    settings = json.loads((made / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "awq" and settings["group_size"] == group
    assert_weights(made, np.load(run("extras", "read_autoawq", folder=str(made))), torch.float16)
