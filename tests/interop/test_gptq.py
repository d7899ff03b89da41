"""GPTQ folders between this package, auto-gptq, and gptqmodel under transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

Logits = Callable[..., Tensor]
Distance = Callable[..., float]
AssertWeights = Callable[..., None]
#: gptqmodel multiplies in float16 on a CPU.
HALF = 5e-3
#: Ours, one of each thing a GPTQ file can say: bits, zero points, order of columns.
SCHEMES = (
    *("gptq-w4g64", "gptq-w4g64s", "gptq-w4g64-act", "gptq-w2g64", "gptq-w3g64", "gptq-w8g128s"),
)
#: What gptqmodel is asked for; 5 bits lie in planes (``gptq_p``).
GPTQMODEL: dict[str, dict[str, Any]] = {
    "v1": {"bits": 4, "group_size": 128, "format": "gptq"},
    "v2, asymmetric": {"bits": 4, "group_size": 64, "format": "gptq_v2", "sym": False},
    "act-order": {"bits": 4, "group_size": 64, "desc_act": True, "act_group_aware": False},
    "2 bits": {"bits": 2, "group_size": 64},
    "3 bits": {"bits": 3, "group_size": 64, "format": "gptq_v2", "sym": False},
    "5 bits, in planes": {"bits": 5, "group_size": 64, "format": "gptq_p"},
    "8 bits, a channel": {"bits": 8, "group_size": -1, "act_group_aware": False},
}


@pytest.fixture(scope="module")
def ours(quantized: Any) -> dict[str, Path]:
    found: dict[str, Path] = quantized(SCHEMES)
    return found


@pytest.fixture(scope="module")
def in_gptqmodel(ours: dict[str, Path], run: Any, prompt: list[int]) -> Any:
    job = {"prompt": prompt, "method": "gptq", "dtype": "float16"}
    jobs = {scheme: {**job, "folder": str(folder)} for scheme, folder in ours.items()}
    return run("gptqmodel", "read_transformers", jobs)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gptqmodel_reads_ours(
    scheme: str,
    ours: dict[str, Path],
    in_gptqmodel: Any,
    prompt: list[int],
    logits: Logits,
    distance: Distance,
    assert_weights: AssertWeights,
) -> None:
    theirs = in_gptqmodel[scheme].arrays
    assert_weights(ours[scheme], theirs, torch.float16)
    assert distance(logits(ours[scheme], prompt), theirs["logits"]) < HALF


@pytest.fixture(scope="module")
def of_gptqmodel(model: Any, ids: list[list[int]], run: Any) -> Any:
    job = {"model": str(model("llama")), "ids": ids, "method": "gptq"}
    jobs = {name: {**job, "options": options} for name, options in GPTQMODEL.items()}
    return run("gptqmodel", "write_gptqmodel", jobs, folders=True)


@pytest.fixture(scope="module")
def back_in_gptqmodel(of_gptqmodel: Any, run: Any, prompt: list[int]) -> Any:
    job = {"prompt": prompt, "method": "gptq", "dtype": "float16"}
    jobs = {name: {**job, "folder": str(made.out)} for name, made in of_gptqmodel.items()}
    return run("gptqmodel", "read_gptqmodel", jobs)


@pytest.mark.parametrize("name", GPTQMODEL)
def test_a_folder_of_gptqmodel_is_read(
    name: str,
    of_gptqmodel: Any,
    back_in_gptqmodel: Any,
    prompt: list[int],
    logits: Logits,
    distance: Distance,
    assert_weights: AssertWeights,
) -> None:
    made, theirs = of_gptqmodel[name].path, back_in_gptqmodel[name].arrays
    assert_weights(made, theirs, torch.float16)
    assert distance(logits(made, prompt), theirs["logits"]) < HALF


@pytest.mark.parametrize("scheme", ["gptq-w4g64s", "gptq-w4g128s-act", "gptq-w3g128"])
def test_a_folder_of_auto_gptq_is_read(
    scheme: str,
    model: Callable[[str], Path],
    ids: list[list[int]],
    run: Any,
    quantize_with: Callable[..., Path],
    assert_weights: AssertWeights,
) -> None:
    made = quantize_with("auto-gptq", model("llama"), scheme, ids)
    settings = json.loads((made / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["bits"]) == ("gptq", int(scheme[6]))
    theirs = run("extras", "read_auto_gptq", {scheme: {"folder": str(made)}})[scheme].arrays
    assert_weights(made, theirs, torch.float32)
