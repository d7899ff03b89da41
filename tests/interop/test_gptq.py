"""GPTQ folders between this package, auto-gptq, and gptqmodel under transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sdk

Run = Callable[..., Path]
Logits = Callable[..., Tensor]
Distance = Callable[..., float]
AssertWeights = Callable[..., None]
#: gptqmodel multiplies in float16 on a CPU.
HALF = 5e-3

#: Ours, one of each thing a GPTQ file can say: bits, zero points, order of columns.
SCHEMES = (
    *("gptq-w4g64", "gptq-w4g64s", "gptq-w4g64-act", "gptq-w2g64", "gptq-w3g64", "gptq-w8g128s"),
)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gptqmodel_reads_ours(
    scheme: str,
    model: Callable[[str], Path],
    ids: list[list[int]],
    prompt: list[int],
    tmp_path: Path,
    run: Run,
    logits: Logits,
    distance: Distance,
    assert_weights: AssertWeights,
) -> None:
    out = sdk.quantize(model("llama"), tmp_path / "made", scheme, calibration=ids, tokens=64)
    job = {"folder": str(out), "prompt": prompt, "method": "gptq", "dtype": "float16"}
    theirs = np.load(run("gptqmodel", "read_transformers", **job))
    assert_weights(out, theirs, torch.float16)
    assert distance(logits(out, prompt), theirs["logits"]) < HALF


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "gptq-w4g64-act"])
def test_auto_gptq_reads_ours(
    scheme: str,
    model: Callable[[str], Path],
    ids: list[list[int]],
    tmp_path: Path,
    run: Run,
    assert_weights: AssertWeights,
) -> None:
    """It takes every zero point for one of the first version, as symmetric ones are read anyhow."""
    out = sdk.quantize(model("llama"), tmp_path / "made", scheme, calibration=ids, tokens=64)
    theirs = np.load(run("extras", "read_auto_gptq", folder=str(out)))
    assert_weights(out, theirs, torch.float32)


#: What gptqmodel is asked for; bits without a name of their own lie in planes (``gptq_p``).
GPTQMODEL: dict[str, dict[str, Any]] = {
    "v1": {"bits": 4, "group_size": 128, "format": "gptq"},
    "v2, asymmetric": {"bits": 4, "group_size": 64, "format": "gptq_v2", "sym": False},
    "act-order": {"bits": 4, "group_size": 64, "desc_act": True, "act_group_aware": False},
    "2 bits": {"bits": 2, "group_size": 64},
    "3 bits": {"bits": 3, "group_size": 64, "format": "gptq_v2", "sym": False},
    "5 bits, in planes": {"bits": 5, "group_size": 64, "format": "gptq_p"},
    "8 bits, a channel": {"bits": 8, "group_size": -1, "act_group_aware": False},
}


@pytest.mark.parametrize("name", GPTQMODEL)
def test_a_folder_of_gptqmodel_is_read(
    name: str,
    model: Callable[[str], Path],
    ids: list[list[int]],
    prompt: list[int],
    tmp_path: Path,
    run: Run,
    logits: Logits,
    distance: Distance,
    assert_weights: AssertWeights,
) -> None:
    job = {"model": str(model("llama")), "ids": ids, "method": "gptq", "options": GPTQMODEL[name]}
    made = run("gptqmodel", "write_gptqmodel", out=str(tmp_path / "made"), **job)
    job = {"folder": str(made), "prompt": prompt, "method": "gptq", "dtype": "float16"}
    theirs = np.load(run("gptqmodel", "read_transformers", **job))
    assert_weights(made, theirs, torch.float16)
    assert distance(logits(made, prompt), theirs["logits"]) < HALF


@pytest.mark.parametrize(
    "scheme",
    [
        *("gptq-w4g64s", "gptq-w4g64", "gptq-w4g128s-act", "gptq-w2g64s", "gptq-w3g128"),
        "gptq-w8g128s",
    ],
)
def test_a_folder_of_auto_gptq_is_read(
    scheme: str,
    model: Callable[[str], Path],
    ids: list[list[int]],
    tmp_path: Path,
    run: Run,
    quantize_with: Callable[..., Path],
    assert_weights: AssertWeights,
) -> None:
    made = quantize_with("auto-gptq", model("llama"), scheme, ids)
    settings = json.loads((made / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "gptq" and settings["sym"] == ("s" in scheme[-5:])
    theirs = np.load(run("extras", "read_auto_gptq", folder=str(made)))
    assert_weights(made, theirs, torch.float32)
