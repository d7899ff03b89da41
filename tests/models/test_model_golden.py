"""The golden checkpoints of three architectures against their stored logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.models.conftest import DictCheckpoint, Paged


@pytest.mark.parametrize("name", ["arch-llama3", "arch-qwen3", "arch-gemma3"])
def test_logits_are_those_of_the_golden_file(
    name: str, golden: Path, load: Callable[..., Any]
) -> None:
    folder = golden / name / "hf"
    config = json.loads((folder / "config.json").read_text())
    checkpoint = DictCheckpoint(config, load_file(folder / "model.safetensors"))
    stored = np.load(golden / name / "golden.npz")
    expected = torch.from_numpy(stored["logits"])
    expected = expected - expected.mean(dim=1, keepdim=True)
    found = Paged(load(checkpoint)).run("a", stored["prompt"].tolist(), [10])
    found = found - found.mean(dim=1, keepdim=True)
    assert (found - expected).norm() / expected.norm() <= 1e-4
    assert checkpoint.unused() == []
