"""compressed-tensors folders between this package, llm-compressor and transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sdk

Run = Callable[..., Path]
#: In float32, and where activations are rounded to 8 bits too, by their rule or by ours.
EXACT, ROUNDED = 1e-4, 0.04
#: The packages unpack MX formats in bfloat16 only.
BFLOAT16 = 2e-2

OURS = {
    "rtn-w4g32": EXACT, "rtn-w4g64s": EXACT, "rtn-w3g32": EXACT, "rtn-w8s": EXACT,
    "rtn-w8a8s": ROUNDED, "fp8-tensor": ROUNDED, "fp8-channel": ROUNDED, "fp8-block": ROUNDED,
    "nvfp4": EXACT, "mxfp4": BFLOAT16,
}  # fmt: skip


@pytest.mark.parametrize("scheme", OURS)
def test_transformers_reads_ours(
    scheme: str,
    model: Callable[[str], Path],
    prompt: list[int],
    tmp_path: Path,
    run: Run,
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    out = sdk.quantize(model("llama"), tmp_path / "made", scheme)
    dtype = "bfloat16" if scheme == "mxfp4" else "float32"
    job = {"folder": str(out), "prompt": prompt, "method": "compressed-tensors", "dtype": dtype}
    theirs = np.load(run("compressed-tensors", "read_transformers", **job))
    assert_weights(out, theirs, getattr(torch, dtype))
    assert distance(logits(out, prompt), theirs["logits"]) < OURS[scheme]


#: llm-compressor's names, and its own words for a fifth bit.
THEIRS: dict[str, tuple[str, dict[str, Any], float]] = {
    "W4A16": ("rtn", {"scheme": "W4A16"}, EXACT),
    "W4A16, by GPTQ": ("gptq", {"scheme": "W4A16"}, EXACT),
    "W4A16_ASYM": ("rtn", {"scheme": "W4A16_ASYM"}, EXACT),
    "W3A16": ("rtn", {"scheme": "W3A16"}, EXACT),
    "W5A16": ("rtn", {"scheme": "W5A16"}, EXACT),
    "W8A16": ("rtn", {"scheme": "W8A16"}, EXACT),
    "W8A8": ("rtn", {"scheme": "W8A8"}, ROUNDED),
    "FP8": ("rtn", {"scheme": "FP8"}, ROUNDED),
    "FP8_DYNAMIC": ("rtn", {"scheme": "FP8_DYNAMIC"}, ROUNDED),
    "FP8_BLOCK": ("rtn", {"scheme": "FP8_BLOCK"}, ROUNDED),
    "NVFP4A16": ("rtn", {"scheme": "NVFP4A16"}, EXACT),
    "MXFP4A16": ("rtn", {"scheme": "MXFP4A16"}, BFLOAT16),
    "MXFP8": ("rtn", {"scheme": "MXFP8"}, ROUNDED),
}


@pytest.mark.parametrize("name", THEIRS)
def test_a_folder_of_llm_compressor_is_read(
    name: str,
    model: Callable[[str], Path],
    ids: list[list[int]],
    prompt: list[int],
    tmp_path: Path,
    run: Run,
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    method, options, bound = THEIRS[name]
    dtype = "bfloat16" if name.startswith("MX") else "float32"
    job = {"model": str(model("llama")), "ids": ids, "method": method, "options": options}
    out = str(tmp_path / "made")
    made = run("compressed-tensors", "write_llmcompressor", out=out, dtype=dtype, **job)
    job = {"folder": str(made), "prompt": prompt, "method": "compressed-tensors", "dtype": dtype}
    theirs = np.load(run("compressed-tensors", "read_transformers", **job))
    assert_weights(made, theirs, getattr(torch, dtype))
    assert distance(logits(made, prompt), theirs["logits"]) < bound
