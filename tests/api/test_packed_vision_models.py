"""Vision models whose text is packed by AWQ or GPTQ and whose tower is not, beside transformers
with the values that the packed weights have."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdk import LLM
from tests.api.test_vision_models import (
    GEMMA_56,
    GREEDY,
    QWEN_4,
    SEVERAL,
    answer,
    expected,
    write_model,
)
from tests.loaders.test_awq_folder import nibbles
from tests.loaders.test_gptq_folder import stream
from tests.vision_prompts import Family, picture, with_images

GROUP = 32
#: As published checkpoints have them.
SETTINGS: dict[str, dict[str, Any]] = {
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": ["visual"],
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": False,
        "checkpoint_format": "gptq",
        "modules_in_block_to_quantize": None,
        "dynamic": {"-:.*vision_tower.*": {}, "-:.*multi_modal_projector.*": {}},
    },
}
_OF_TEXT = re.compile(r"(?:language_model\.|model\.)+layers\.\d+\..+_proj\.weight")


def packed(values: Tensor, method: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix rounded to 4 bits, and the values that they have."""
    rows, columns = values.shape
    blocks = values.view(rows, -1, GROUP)
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = torch.round(-low / scales.float()).clamp(0, 15)
    codes = torch.round(blocks / scales.float()[..., None] + zeros[..., None]).clamp(0, 15)
    back = ((codes - zeros[..., None]) * scales.float()[..., None]).view(rows, columns)
    whole, points = codes.view(rows, columns).int().numpy(), zeros.int().numpy()
    if method == "awq":
        mixed = (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            "qweight": nibbles(whole.T, mixed),
            "qzeros": nibbles(points.T, mixed),
            "scales": scales.t().contiguous(),
        }, back
    words = stream(points.T.copy(), 4).numpy().astype(np.int64) - 0x11111111
    return {
        "qweight": stream(whole, 4).t().contiguous(),
        "qzeros": torch.from_numpy((words % (1 << 32)).astype(np.uint32).view(np.int32)),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(columns) // GROUP).int(),
    }, back


def pack(folder: Path, other: Path, method: str) -> int:
    """Pack the text of a folder; ``other`` gets the values. Returns how many matrices there are."""
    shutil.copytree(folder, other)
    tensors, found, plain = load_file(folder / "model.safetensors"), {}, {}
    count = 0
    for name, values in tensors.items():
        found[name] = plain[name] = values
        if _OF_TEXT.fullmatch(name):
            count += 1
            parts, back = packed(values, method)
            del found[name]
            stem = name.removesuffix("weight")
            found |= {stem + ending: part for ending, part in parts.items()}
            plain[name] = back
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, other / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = SETTINGS[method]
    (folder / "config.json").write_text(json.dumps(config))
    return count


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("family", [QWEN_4, GEMMA_56], ids=lambda family: family.model_type)
def test_answers_are_those_of_transformers_with_the_packed_values(
    family: Family, method: str, tmp_path: Path
) -> None:
    folder, other = tmp_path / "packed", tmp_path / "values"
    write_model(family, folder)
    assert pack(folder, other, method) == 14  # of 2 layers
    pictures = [picture(40, 61, 1), picture(97, 30, 2)]
    exact: Any = {"dtype": "float32", "kv_cache_dtype": "float32", "compute": "exact"}
    with LLM(str(folder), max_model_len=512, num_threads=1, **exact) as llm:
        report = llm.quant_report()
        [output] = llm.chat(with_images(SEVERAL, pictures), GREEDY)
    assert any("w4" in str(one) or "4 bits" in str(one) for one in str(report).splitlines())
    ids, chances = zip(*answer(output), strict=True)
    wanted, numbers = zip(*expected(family, other, SEVERAL, pictures), strict=True)
    assert ids == wanted
    assert max(abs(one - two) for one, two in zip(chances, numbers, strict=True)) < 3e-4
