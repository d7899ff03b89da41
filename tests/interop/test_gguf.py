"""GGUF files of ours in llama.cpp: the logits of both."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import sdk
from tests.accuracy.test_both_formats import MODELS
from tests.models.conftest import tiny

#: llama.cpp rounds activations to 8 bits where weights are quantized: 1.6e-2 to 3.2e-2 by
#: tests/golden/README.md; on plain weights it is 4e-4 to 6e-4 off.
ROUNDED, PLAIN = 0.04, 2e-3


SCHEMES = {"f16": PLAIN, "q4_0": ROUNDED, "q5_1": ROUNDED, "q8_0": ROUNDED, "q4_k_m": ROUNDED}
FAMILIES = ("llama3", "qwen3", "gemma3")
#: The other ones in float16, where rounded activations would send tokens to other experts.
#: llama.cpp rounds the dimensions that YaRN blends, which gpt-oss says not to do: 0.011 to 0.017
#: for four random models, 0.0011 to 0.0016 without YaRN.
KINDS = {
    **MODELS,
    "gpt_oss without YaRN": {
        **MODELS["gpt_oss"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


@pytest.fixture(scope="module")
def files(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Ours, by family and scheme; the tokenizer knows 448 tokens."""
    place = tmp_path_factory.mktemp("gguf")
    found = {}
    for family in FAMILIES:
        for scheme in SCHEMES:
            out = place / f"{family}-{scheme}.gguf"
            found[out.stem] = sdk.quantize(golden / f"arch-{family}" / "hf", out, scheme)
    for number, (kind, options) in enumerate(KINDS.items()):
        folder = place / f"{number}"  # the name goes into the file, and llama.cpp looks for "phi3"
        made = tiny(kind.split()[0], **{**options, "vocab_size": 448})
        made.half().save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(golden / "arch-llama3" / "hf" / name, folder / name)
        found[kind] = sdk.quantize(folder, place / f"{kind}.gguf", "f16")
    return found


@pytest.fixture(scope="module")
def known(prompt: list[int]) -> list[int]:
    """Tokens of that vocabulary, beyond the 32 positions of Phi-3's short factors."""
    return [token % 448 for token in prompt + prompt[:16]]


@pytest.fixture(scope="module")
def in_llama_cpp(files: dict[str, Path], known: list[int], run: Any) -> Any:
    jobs = {name: {"folder": str(path), "prompt": known} for name, path in files.items()}
    return run("llama-cpp", "read_llama_cpp", jobs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_llama_cpp_gives_our_logits(
    family: str,
    scheme: str,
    files: dict[str, Path],
    in_llama_cpp: Any,
    known: list[int],
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
) -> None:
    name = f"{family}-{scheme}"
    theirs = in_llama_cpp[name].arrays["logits"]
    assert distance(logits(files[name], known), theirs) < SCHEMES[scheme]


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_gives_our_logits_of_experts_and_of_long_rope(
    kind: str,
    files: dict[str, Path],
    in_llama_cpp: Any,
    known: list[int],
    logits: Callable[..., Tensor],
    distance: Callable[..., float],
) -> None:
    bound = 0.02 if kind == "gpt_oss" else 5e-3
    theirs = in_llama_cpp[kind].arrays["logits"]
    assert distance(logits(files[kind], known), theirs) < bound
