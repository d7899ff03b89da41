"""compressed-tensors folders between this package, llm-compressor and transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

#: In float32; where transformers rounds activations to integers (measured 0.029) or to 8-bit
#: floats (0.075 to 0.084), which is left out here; and in bfloat16, the only type that 4-bit floats
#: are unpacked to there (0.010 to 0.014).
EXACT, INT8, FLOAT8, BFLOAT16 = 1e-4, 0.04, 0.1, 0.02

OURS = {
    "rtn-w4g32": EXACT, "rtn-w4g64s": EXACT, "rtn-w3g32": EXACT, "rtn-w8s": EXACT,
    "rtn-w8a8s": INT8, "fp8-tensor": FLOAT8, "fp8-channel": FLOAT8, "fp8-block": FLOAT8,
    "nvfp4": BFLOAT16, "mxfp4": BFLOAT16,
}  # fmt: skip
#: llm-compressor's names.
THEIRS: dict[str, float] = {
    "W3A16": EXACT, "W4A16": EXACT, "W4A16_ASYM": EXACT, "W5A16": EXACT, "W8A16": EXACT,
    "W8A8": INT8, "FP8": FLOAT8, "FP8_DYNAMIC": FLOAT8, "FP8_BLOCK": FLOAT8,
    "NVFP4A16": BFLOAT16, "MXFP4A16": BFLOAT16, "MXFP8": FLOAT8,
}  # fmt: skip
BY_GPTQ = "W4A16 by GPTQ"


def dtype_for(name: str) -> str:
    return "bfloat16" if name.lower().startswith(("mx", "nv")) else "float32"


@pytest.fixture(scope="module")
def ours(quantized: Any) -> dict[str, Path]:
    found: dict[str, Path] = quantized(list(OURS))
    return found


@pytest.fixture(scope="module")
def ours_there(ours: dict[str, Path], run: Any, prompt: list[int]) -> Any:
    return run("compressed-tensors", "read_transformers", _jobs(ours, prompt))


def _jobs(folders: dict[str, Path], prompt: list[int]) -> dict[str, dict[str, Any]]:
    job = {"prompt": prompt, "method": "compressed-tensors"}
    return {
        name: {**job, "folder": str(folder), "dtype": dtype_for(name)}
        for name, folder in folders.items()
    }


@pytest.mark.parametrize("scheme", OURS)
def test_transformers_reads_ours(
    scheme: str,
    ours: dict[str, Path],
    ours_there: Any,
    prompt: list[int],
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    theirs = ours_there[scheme].arrays
    assert_weights(ours[scheme], theirs, getattr(torch, dtype_for(scheme)))
    assert distance(logits(ours[scheme], prompt), theirs["logits"]) < OURS[scheme]


@pytest.fixture(scope="module")
def theirs(model: Callable[[str], Path], ids: list[list[int]], run: Any) -> Any:
    job = {"model": str(model("llama")), "ids": ids}
    jobs = {
        name: {**job, "method": "rtn", "dtype": dtype_for(name), "options": {"scheme": name}}
        for name in THEIRS
    }
    jobs[BY_GPTQ] = {**jobs["W4A16"], "method": "gptq"}
    return run("compressed-tensors", "write_llmcompressor", jobs, folders=True)


@pytest.fixture(scope="module")
def theirs_there(theirs: Any, run: Any, prompt: list[int]) -> Any:
    folders = {name: made.out for name, made in theirs.items()}
    return run("compressed-tensors", "read_transformers", _jobs(folders, prompt))


@pytest.mark.parametrize("name", [*THEIRS, BY_GPTQ])
def test_a_folder_of_llm_compressor_is_read(
    name: str,
    theirs: Any,
    theirs_there: Any,
    prompt: list[int],
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    made, found = theirs[name].path, theirs_there[name].arrays
    assert_weights(made, found, getattr(torch, dtype_for(name)))
    assert distance(logits(made, prompt), found["logits"]) < THEIRS.get(name, EXACT)
