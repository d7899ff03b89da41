"""Mixtures of experts between this package, gptqmodel and llm-compressor.

transformers 5 keeps the experts of a layer in one tensor. Both libraries take it apart before they
quantize and write the tensors of every expert; transformers joins them again, but for zero points,
which it drops, and for Mixtral's under llm-compressor's names, which it passes over.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdk.loaders.folders.expert_names import first_spelling, spelled_as_ours

FAMILIES = ("mixtral", "qwen3_moe")
#: gptqmodel multiplies in float16 on a CPU; transformers in float32.
HALF, EXACT = 5e-3, 1e-4
GPTQ = {"bits": 4, "group_size": 32}
SCHEMES = ("gptq-w4g32", "rtn-w4g32s")


@pytest.fixture(scope="module")
def of_gptqmodel(model: Any, ids: list[list[int]], run: Any) -> Any:
    job = {"ids": ids, "method": "gptq", "options": GPTQ}
    jobs = {kind: {**job, "model": str(model(kind))} for kind in FAMILIES}
    return run("gptqmodel", "write_gptqmodel", jobs, folders=True)


@pytest.fixture(scope="module")
def of_llm_compressor(model: Any, ids: list[list[int]], run: Any) -> Any:
    job = {"ids": ids, "method": "rtn", "dtype": "float32", "options": {"scheme": "W4A16"}}
    jobs = {kind: {**job, "model": str(model(kind))} for kind in FAMILIES}
    return run("compressed-tensors", "write_llmcompressor", jobs, folders=True)


@pytest.fixture(scope="module")
def ours(quantized: Any) -> dict[str, dict[str, Path]]:
    return {kind: quantized(SCHEMES, kind) for kind in FAMILIES}


@pytest.fixture(scope="module")
def in_gptqmodel(of_gptqmodel: Any, ours: Any, run: Any, prompt: list[int]) -> Any:
    job = {"prompt": prompt, "method": "gptq", "dtype": "float16"}
    folders = {f"theirs, {kind}": made.out for kind, made in of_gptqmodel.items()}
    folders |= {f"ours, {kind}": made["gptq-w4g32"] for kind, made in ours.items()}
    jobs = {name: {**job, "folder": str(folder)} for name, folder in folders.items()}
    return run("gptqmodel", "read_gptqmodel", jobs)


def renamed(folder: Path) -> Path:
    """A copy of a folder under the names that transformers finds."""
    copy = folder.with_name(f"{folder.name}-renamed")
    shutil.copytree(folder, copy)
    if "mixtral" in (copy / "config.json").read_text():
        tensors = load_file(copy / "model.safetensors")
        tensors = {first_spelling(spelled_as_ours(name)): t for name, t in tensors.items()}
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.fixture(scope="module")
def in_transformers(of_llm_compressor: Any, ours: Any, run: Any, prompt: list[int]) -> Any:
    job = {"prompt": prompt, "method": "compressed-tensors"}
    jobs = {}
    for kind in FAMILIES:
        theirs, made = renamed(of_llm_compressor[kind].path), ours[kind]["rtn-w4g32s"]
        jobs[f"theirs, {kind}"] = {**job, "folder": str(theirs), "dtype": "float32"}
        # experts are unpacked in the type of their scales
        jobs[f"ours, {kind}"] = {**job, "folder": str(made), "dtype": "float16"}
    return run("compressed-tensors", "read_transformers", jobs)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_of_gptqmodel_is_read(
    kind: str,
    of_gptqmodel: Any,
    in_gptqmodel: Any,
    prompt: list[int],
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    made, theirs = of_gptqmodel[kind].path, in_gptqmodel[f"theirs, {kind}"].arrays
    assert_weights(made, theirs, torch.float16)
    assert distance(logits(made, prompt), theirs["logits"]) < HALF


@pytest.mark.parametrize("kind", FAMILIES)
def test_gptqmodel_reads_ours(
    kind: str,
    ours: dict[str, dict[str, Path]],
    in_gptqmodel: Any,
    prompt: list[int],
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    made, theirs = ours[kind]["gptq-w4g32"], in_gptqmodel[f"ours, {kind}"].arrays
    assert_weights(made, theirs, torch.float16)
    assert distance(logits(made, prompt), theirs["logits"]) < HALF


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_folder_of_llm_compressor_is_read(
    kind: str,
    of_llm_compressor: Any,
    in_transformers: Any,
    prompt: list[int],
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    made, theirs = of_llm_compressor[kind].path, in_transformers[f"theirs, {kind}"].arrays
    assert_weights(made, theirs, torch.float32)
    assert distance(logits(made, prompt), theirs["logits"]) < EXACT


@pytest.mark.parametrize("kind", FAMILIES)
def test_transformers_reads_ours(
    kind: str,
    ours: dict[str, dict[str, Path]],
    in_transformers: Any,
    prompt: list[int],
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
    assert_weights: Callable[..., None],
) -> None:
    made, theirs = ours[kind]["rtn-w4g32s"], in_transformers[f"ours, {kind}"].arrays
    assert_weights(made, theirs, torch.float16)
    assert distance(logits(made, prompt), theirs["logits"]) < HALF
