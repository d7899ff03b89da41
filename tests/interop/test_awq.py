"""AWQ folders between this package, autoawq, and gptqmodel under transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: gptqmodel multiplies in float16 on a CPU.
HALF = 5e-3


def test_gptqmodel_and_autoawq_read_ours(
    quantized: Any,
    prompt: list[int],
    run: Any,
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    ours = quantized(["awq-w4g64"])["awq-w4g64"]
    job = {"folder": str(ours), "prompt": prompt, "method": "awq", "dtype": "float16"}
    theirs = run("gptqmodel", "read_transformers", {"": job})[""].arrays
    assert_weights(ours, theirs, torch.float16)
    assert distance(logits(ours, prompt), theirs["logits"]) < HALF
    assert_weights(ours, run("extras", "read_autoawq", {"": job})[""].arrays, torch.float16)


def test_a_folder_of_gptqmodel_is_read(
    model: Callable[[str], Path],
    ids: list[list[int]],
    prompt: list[int],
    run: Any,
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    options = {"bits": 4, "group_size": 128}
    job = {"model": str(model("llama")), "ids": ids, "method": "awq", "options": options}
    made = run("gptqmodel", "write_gptqmodel", {"": job}, folders=True)[""].path
    job = {"folder": str(made), "prompt": prompt, "method": "awq", "dtype": "float16"}
    theirs = run("gptqmodel", "read_gptqmodel", {"": job})[""].arrays
    assert_weights(made, theirs, torch.float16)
    assert distance(logits(made, prompt), theirs["logits"]) < HALF


def test_a_folder_of_autoawq_is_read(
    model: Callable[[str], Path],
    ids: list[list[int]],
    run: Any,
    quantize_with: Callable[..., Path],
    assert_weights: Callable[..., None],
) -> None:
    made = quantize_with("autoawq", model("llama"), "awq-w4g64", ids)
    settings = json.loads((made / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "awq" and settings["group_size"] == 64
    theirs = run("extras", "read_autoawq", {"": {"folder": str(made)}})[""].arrays
    assert_weights(made, theirs, torch.float16)
