"""compressed-tensors folders between this package, llm-compressor and transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

#: In float32, and where activations are rounded to 8 bits too, by their rule or by ours.
EXACT, ROUNDED = 1e-4, 0.04
#: The packages unpack MX formats in bfloat16 only.
BFLOAT16 = 2e-2

OURS = {
    "rtn-w4g32": EXACT, "rtn-w4g64s": EXACT, "rtn-w3g32": EXACT, "rtn-w8s": EXACT,
    "rtn-w8a8s": ROUNDED, "fp8-tensor": ROUNDED, "fp8-channel": ROUNDED, "fp8-block": ROUNDED,
    "nvfp4": EXACT, "mxfp4": BFLOAT16,
}  # fmt: skip
#: llm-compressor's names.
THEIRS: dict[str, float] = {
    "W3A16": EXACT, "W4A16": EXACT, "W4A16_ASYM": EXACT, "W5A16": EXACT, "W8A16": EXACT,
    "W8A8": ROUNDED, "FP8": ROUNDED, "FP8_DYNAMIC": ROUNDED, "FP8_BLOCK": ROUNDED,
    "NVFP4A16": EXACT, "MXFP4A16": BFLOAT16, "MXFP8": ROUNDED,
}  # fmt: skip
BY_GPTQ = "W4A16 by GPTQ"


def dtype_for(name: str) -> str:
    return "bfloat16" if name.lower().startswith("mx") else "float32"


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
