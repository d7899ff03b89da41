"""GGUF blocks inside safetensors files (`quant_method: gguf`) are the values gguf-py reads."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from sdk.quant.errors import CheckpointError


def blocks(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of that type, filled up with zeros to whole blocks, and their values."""
    kind_id = gguf.GGMLQuantizationType[kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[kind_id]
    rng = np.random.default_rng(0)
    padded = -(-columns // size) * size
    values = np.zeros((rows, padded), np.float32)
    values[:, :columns] = rng.standard_normal((rows, columns))
    if kind in ("Q4_0", "Q8_0"):
        data = quantize(values, kind_id)
    else:  # gguf-py does not write k-quants: any bytes with finite scales are blocks
        data = rng.integers(0, 256, (rows, padded // size, nbytes), dtype=np.uint8)
        halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
        for offset in halves:
            data[:, :, offset : offset + 2] = np.array([0x00, 0x2C], np.uint8)  # 0.0625
        data = data.reshape(rows, -1)
    found = dequantize(data, kind_id)[:, :columns]
    return torch.from_numpy(data), torch.from_numpy(found.copy())


def settings(bits: Any, form: str | None, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gguf", "bits": bits, "format": form, **more}


@pytest.mark.parametrize(
    ("kind", "bits", "form"),
    [
        ("Q4_0", 4, "q_0"),
        ("Q4_0", "q4_0", None),
        ("Q8_0", 8, "q_0"),
        ("Q8_0", 8, "gguf"),
        ("Q4_K", 4, "q_k_m"),
        ("Q4_K", "q4_k_s", "gguf"),
        ("Q5_K", 5, "q_k"),
        ("Q6_K", 6, "q_k"),
    ],
)
def test_blocks_are_read_bit_for_bit_and_stay_packed(
    kind: str, bits: Any, form: str | None, layers: Any
) -> None:
    data, values = blocks(kind, 32, 256)
    weight = layers.weight(settings(bits, form), {".qweight": data}, (32, 256))
    assert torch.equal(weight.dequantize(), values)
    assert weight.nbytes <= data.numel() * 1.2
    entry = next(e for e in layers.reopen().entries() if "down_proj" in e.name)
    assert (entry.shape, entry.format) == ((32, 256), kind)


def test_rows_filled_up_to_whole_blocks_lose_the_filling(layers: Any) -> None:
    data, values = blocks("Q4_K", 32, 192)
    weight = layers.weight(settings(4, "q_k_m"), {".qweight": data}, (32, 192))
    assert torch.equal(weight.dequantize(), values)


def test_a_rule_for_single_layers_gives_them_another_type(layers: Any) -> None:
    data, values = blocks("Q8_0", 32, 64)
    rules = {r"\+:.*down_proj": {"bits": 8, "format": "q_0"}, "-:.*lm_head": {}}
    weight = layers.weight(settings(4, "q_0", dynamic=rules), {".qweight": data}, (32, 64))
    assert torch.equal(weight.dequantize(), values)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            settings(3, "q_k"),
            "format 'q_k' do not name a GGUF type; expected one of 1 and",
        ),
        (settings(4, "q_0", dynamic=[1]), "dynamic is .*expected an object"),
        (settings(8, "q_0"), "rows of Q8_0, which do not fit 144 bytes per row"),
        (
            settings(4, "q_0", dynamic={"x": {"format": "q_k"}}),
            "rows of Q4_0 or Q4_K, but several fit 144 bytes per row",
        ),
    ],
)
def test_what_does_not_fit_together_is_named(
    given: dict[str, Any], words: str, layers: Any
) -> None:
    data, _ = blocks("Q4_0", 32, 256)
    with pytest.raises(CheckpointError, match=words):
        layers.weight(given, {".qweight": data}, (32, 256))
