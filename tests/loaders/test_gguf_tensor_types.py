"""Tensor types of GGUF files that are more than blocks of integers, through whole files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk.loaders.formats.gguf_types import GGUF_TYPES
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import AffineWeight, concat

Save = Callable[..., Path]
NUMBERS = {kind.name: number for number, kind in GGUF_TYPES.items()}
ATTENTION = "model.layers.0.self_attn."


def blocks(name: str, rows: int, columns: int, seed: int = 1) -> bytes:
    kind = GGUF_TYPES[NUMBERS[name]]
    shape = (rows * columns // kind.elements, kind.nbytes)
    data = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    # Bytes of exponents: below those that are NaN.
    data[:, {"NVFP4": slice(4), "MXFP4": 0, "IQ1_M": 55}.get(name, slice(0))] &= 0x3F
    for offset in kind.halves:
        data[:, offset : offset + 2] = np.array([0.01], "<f2").view(np.uint8)
    return data.tobytes()


def wide_llama(files: Any, name: str) -> Any:
    """The small llama with v of 256 columns: a whole block of every type."""
    model = files.llama()
    heads = 8
    for key, value in (("embedding_length", 256), ("attention.head_count", 4 * heads)):
        model.metadata[f"llama.{key}"] = (4, value)
    model.metadata["llama.attention.head_count_kv"] = (4, heads)
    kv = 256 // 4
    for tensor, dims in {
        "token_embd.weight": (256, 8),
        "output_norm.weight": (256,),
        "output.weight": (256, 8),
        "blk.0.attn_norm.weight": (256,),
        "blk.0.attn_q.weight": (256, 256),
        "blk.0.attn_k.weight": (256, kv),
        "blk.0.attn_v.weight": (256, kv),
        "blk.0.attn_output.weight": (256, 256),
        "blk.0.ffn_norm.weight": (256,),
        "blk.0.ffn_gate.weight": (256, 64),
        "blk.0.ffn_up.weight": (256, 64),
        "blk.0.ffn_down.weight": (64, 256),
    }.items():
        if tensor in model.tensors:
            model.tensors[tensor] = (dims, 0, bytes(4 * int(np.prod(dims))))
    model.tensors["blk.0.attn_v.weight"] = ((256, kv), NUMBERS[name], blocks(name, kv, 256))
    return model


@pytest.mark.parametrize(
    "name", [k.name for k in GGUF_TYPES.values() if k.elements > 1 and not k.tail]
)
def test_a_matrix_of_every_type_becomes_a_weight_of_the_size_announced(
    name: str, files: Any, save: Save
) -> None:
    checkpoint = open_checkpoint(save(wide_llama(files, name).build()))
    weight = checkpoint.weight(ATTENTION + "v_proj")
    assert weight.shape == (64, 256) and str(weight.spec) == name.lower()
    entry = next(entry for entry in checkpoint.entries() if entry.name == "blk.0.attn_v.weight")
    assert weight.nbytes == (entry.nbytes if entry.held is None else entry.held)
    assert (entry.held is None) == (weight.nbytes == entry.nbytes)


def nvfp4_llama(files: Any, scale: Any = (1,), kind: int = 0, data: bytes | None = None) -> Any:
    model = wide_llama(files, "NVFP4")
    if data is None:
        data = np.full(scale, 0.37, "<f4").tobytes()
    model.tensors["blk.0.attn_v.scale"] = (scale, kind, data)
    model.tensors["blk.0.attn_v.input_scale"] = ((1,), 0, np.float32(2).tobytes())
    return model


def test_the_number_beside_an_nvfp4_matrix_multiplies_it(files: Any, save: Save) -> None:
    plain = open_checkpoint(save(wide_llama(files, "NVFP4").build(), "plain.gguf"))
    scaled = open_checkpoint(save(nvfp4_llama(files).build(), "scaled.gguf"))
    one, other = (found.weight(ATTENTION + "v_proj") for found in (plain, scaled))
    expected = one.dequantize() * np.float32(0.37)
    torch.testing.assert_close(other.dequantize(), expected, rtol=1e-6, atol=0)
    assert str(other.spec) == "nvfp4"
    assert other.nbytes == one.nbytes + 64 * 4
    assert not [name for name in scaled.unused() if "attn_v" in name]
    joined = concat([other, other])  # q, k and v have numbers of their own
    assert isinstance(joined, AffineWeight)
    assert torch.equal(joined.dequantize(), torch.cat([other.dequantize()] * 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (2,)}, r"'blk.0.attn_v.scale': expected F32 \[1\], found F32 \[2\]"),
        ({"kind": 1, "data": bytes(2)}, r"'blk.0.attn_v.scale': expected F32 \[1\], found F16"),
        (
            {"data": np.float32("nan").tobytes()},
            "'blk.0.attn_v.scale': expected a finite number, found nan",
        ),
    ],
)
def test_a_number_beside_a_matrix_that_is_none_is_refused(
    options: dict[str, Any], message: str, files: Any, save: Save
) -> None:
    checkpoint = open_checkpoint(save(nvfp4_llama(files, **options).build()))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.weight(ATTENTION + "v_proj")


def test_a_number_beside_another_type_is_refused(files: Any, save: Save) -> None:
    model = nvfp4_llama(files)
    model.tensors["blk.0.attn_v.weight"] = ((256, 64), NUMBERS["Q8_0"], blocks("Q8_0", 64, 256))
    checkpoint = open_checkpoint(save(model.build()))
    with pytest.raises(CheckpointError, match=r"attn_v.weight': expected NVFP4 .* found Q8_0"):
        checkpoint.weight(ATTENTION + "v_proj")


def test_plain_numbers_are_read_as_float32(files: Any, save: Save) -> None:
    model = files.llama()
    values = np.arange(32, dtype="<f8") / 3
    model.tensors["output_norm.weight"] = ((32,), NUMBERS["F64"], values.tobytes())
    model.tensors["blk.0.attn_norm.weight"] = (
        (32,), NUMBERS["I16"], np.arange(32, dtype="<i2").tobytes(),
    )  # fmt: skip
    checkpoint = open_checkpoint(save(model.build()))
    found = checkpoint.tensor("model.norm.weight")
    assert found.dtype == torch.float32 and np.array_equal(found.numpy(), values.astype("<f4"))
    found = checkpoint.tensor("model.layers.0.input_layernorm.weight")
    assert found.tolist() == list(range(32))


@pytest.mark.parametrize("name", ["Q4_K", "IQ4_XS", "MXFP4", "TQ1_0"])
def test_a_big_endian_matrix_has_the_values_of_its_twin(name: str, files: Any, save: Save) -> None:
    little = wide_llama(files, name)
    big = wide_llama(files, name)
    big.order = ">"
    kind = GGUF_TYPES[NUMBERS[name]]
    data = np.frombuffer(blocks(name, 64, 256), np.uint8).reshape(-1, kind.nbytes).copy()
    for at in (*kind.halves, *((2,) if name == "IQ4_XS" else ())):
        data[:, [at, at + 1]] = data[:, [at + 1, at]]
    big.tensors["blk.0.attn_v.weight"] = ((256, 64), NUMBERS[name], data.tobytes())
    values = [
        open_checkpoint(save(model.build(), f"{model.order == '>'}.gguf"))
        .weight(ATTENTION + "v_proj")
        .dequantize()
        for model in (little, big)
    ]
    assert torch.equal(*values)


def test_a_big_endian_type_without_a_definition_is_refused(files: Any, save: Save) -> None:
    model = wide_llama(files, "Q5_1")
    model.order = ">"
    checkpoint = open_checkpoint(save(model.build()))
    with pytest.raises(UnsupportedError, match=r"attn_v\.weight': the byte order of Q5_1 is not"):
        checkpoint.weight(ATTENTION + "v_proj")
