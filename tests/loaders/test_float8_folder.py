"""FP8 folders: 8-bit matrices with a scale per tensor, row or block."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sdk.kernels.weights.layouts import Float8
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import Float8Weight

DOWN = "model.layers.0.mlp.down_proj"
Write = Callable[..., Path]


@pytest.fixture
def write(files: Any, tmp_path: Path) -> Write:
    """A folder with one 8-bit matrix ``[32, 64]``; the arguments become tensors beside it."""

    def folder(settings: dict[str, Any] | None = None, **beside: Tensor) -> Path:
        path = tmp_path / "model"
        config = files.config(quantization_config={"quant_method": "fp8", **(settings or {})})
        files.folder(path, config=config)
        tensors = {f"{DOWN}.{name}": tensor for name, tensor in beside.items()}
        tensors["model.embed_tokens.weight"] = torch.ones(8, 32)
        if "weight" not in beside:
            tensors[f"{DOWN}.weight"] = values()
        save_file(tensors, path / "model.safetensors")
        return path

    return folder


def values(dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("weight_scale", torch.tensor(0.25)),
        ("weight_scale_inv", torch.tensor([0.3])),
        ("weight_scale", torch.rand(32)),
        ("weight_scale", torch.rand(32, 1)),
        ("weight_scale", torch.rand(32, 1).bfloat16()),
    ],
)
def test_one_scale_or_one_per_row_multiplies(
    write: Write, dtype: torch.dtype, name: str, scale: Tensor
) -> None:
    weight = values(dtype)
    checkpoint = open_checkpoint(write(None, weight=weight, **{name: scale}))
    found = checkpoint.weight(DOWN)
    assert isinstance(found, Float8Weight)
    expected = weight.float() * scale.float().reshape(-1, 1)
    assert torch.equal(found.dequantize(), expected)


def test_blocks_are_cut_at_the_edges(write: Write) -> None:
    scale = torch.rand(2, 3)
    path = write({"weight_block_size": [20, 24]}, weight_scale_inv=scale)
    weight = open_checkpoint(path).weight(DOWN)
    assert isinstance(weight.layout, Float8) and weight.layout.block == (20, 24)  # type: ignore[attr-defined]
    spread = scale.repeat_interleave(20, 0)[:32].repeat_interleave(24, 1)[:, :64]
    assert torch.equal(weight.dequantize(), values().float() * spread)


def test_scales_count_as_read_and_those_of_activations_are_not_needed(write: Write) -> None:
    path = write(None, weight_scale=torch.tensor(0.5), input_scale=torch.tensor(2.0))
    checkpoint = open_checkpoint(path)
    seen: list[tuple[int, int]] = []
    checkpoint.on_bytes = lambda done, total: seen.append((done, total))
    checkpoint.weight("model.embed_tokens")
    checkpoint.weight(DOWN)
    assert checkpoint.unused() == []
    assert seen[-1] == (1024 + 32 * 64 + 8, 1024 + 32 * 64 + 8)


def test_matrices_that_were_left_in_floats_stay_so(write: Write) -> None:
    checkpoint = open_checkpoint(write(None, weight=torch.ones(32, 64)))
    assert str(checkpoint.weight(DOWN).spec) == "f32"


def test_a_scale_may_lie_in_another_shard(write: Write) -> None:
    path = write(None, weight_scale=torch.tensor(0.5))
    (path / "model.safetensors").unlink()
    shards = {
        "a.safetensors": {f"{DOWN}.weight": values()},
        "b.safetensors": {f"{DOWN}.weight_scale": torch.tensor(0.5)},
    }
    for name, tensors in shards.items():
        save_file(tensors, path / name)
    places = {key: name for name, tensors in shards.items() for key in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert torch.equal(open_checkpoint(path).weight(DOWN).dequantize(), values().float() * 0.5)


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({}, r"weight' is F8_E4M3, which is not supported for a plain tensor"),
        (
            {"weight_scale": torch.ones(1), "weight_scale_inv": torch.ones(1)},
            r"expected one tensor of scales, found .weight_scale_inv and .weight_scale$",
        ),
        ({"weight_scale": torch.ones(31)}, r"shape \[31, 1\], expected \[32, 1\] for \[32, 64\]"),
        ({"weight_scale": torch.ones(32, 2)}, r"shape \[32, 2\], expected \[32, 1\]"),
        ({"weight_scale": torch.tensor(float("nan"))}, r"weight_scale': a scale is not a finite"),
        ({"weight_scale": torch.full((32,), float("inf"))}, "a scale is not a finite number"),
        ({"weight_scale": torch.tensor(1)}, r"weight_scale': I64, expected F32 or F16 or BF16"),
        (
            {"weight": values()[:, :32], "weight_scale": torch.tensor(1.0)},
            r"shape \[32, 32\], the config asks for \[32, 64\]",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    write: Write, beside: dict[str, Tensor], message: str
) -> None:
    beside = {name: tensor.contiguous() for name, tensor in beside.items()}
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(None, **beside)).weight(DOWN)


def test_a_grid_that_is_off_by_one_is_refused(write: Write) -> None:
    path = write({"weight_block_size": [16, 16]}, weight_scale_inv=torch.ones(2, 5))
    with pytest.raises(CheckpointError, match=r"shape \[2, 5\], expected \[2, 4\] .*of \[16, 16\]"):
        open_checkpoint(path).weight(DOWN)


@pytest.mark.parametrize("size", [[128], [0, 128], [128, "128"], 128, [1, 2, 3], [True, True]])
def test_an_impossible_block_size_is_refused(write: Write, size: Any) -> None:
    with pytest.raises(CheckpointError, match=r"weight_block_size is .*expected \[rows, columns\]"):
        open_checkpoint(write({"weight_block_size": size}))


@pytest.mark.parametrize(("method", "scale"), [("tensor", ()), ("row", (32,)), ("block", (2, 4))])
def test_scales_with_a_method_divide(write: Write, method: str, scale: tuple[int, ...]) -> None:
    settings = {"weight_scale_method": method, "weight_scale_semantics": "inverse"}
    if method == "block":
        settings["weight_block_size"] = [16, 16]
    factor = torch.rand(scale) + 0.5
    weight = open_checkpoint(write(settings, weight_scale_inv=factor)).weight(DOWN)
    high, wide = (16, 16) if method == "block" else (1, 64)
    grid = factor.reshape(1, 1) if method == "tensor" else factor.reshape(len(factor), -1)
    spread = grid.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    torch.testing.assert_close(weight.dequantize(), values().float() / spread, rtol=1e-6, atol=0)


def test_scales_that_divide_are_not_zero_and_of_the_known_meaning(write: Write) -> None:
    settings = {"weight_scale_method": "row"}
    with pytest.raises(CheckpointError, match=r"weight_scale_inv': a scale is 0, but"):
        open_checkpoint(write(settings, weight_scale_inv=torch.zeros(32))).weight(DOWN)
    with pytest.raises(UnsupportedError, match="weight_scale_semantics is direct, which is not su"):
        open_checkpoint(write({**settings, "weight_scale_semantics": "direct"}))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("block", [[128, 128], [8, 32], [1, 32]])
def test_scales_may_be_powers_of_two_in_bytes(
    write: Write, dtype: torch.dtype, block: list[int]
) -> None:
    grid = (-(-32 // block[0]), -(-64 // block[1]))
    powers = torch.randint(110, 140, grid, dtype=torch.uint8)
    settings = {"weight_block_size": block, "scale_fmt": "ue8m0"}
    weight = open_checkpoint(write(settings, weight_scale_inv=powers.view(dtype))).weight(DOWN)
    spread = powers.int().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1) - 127
    assert torch.equal(weight.dequantize(), torch.ldexp(values().float(), spread[:32, :64]))


def test_names_of_mistral_are_read_too(write: Write) -> None:
    path = write(None, qscale_weight=torch.tensor(0.5), qscale_act=torch.tensor(3.0))
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.weight(DOWN).dequantize(), values().float() * 0.5)
    assert "model.layers.0.mlp.down_proj.qscale_act" not in checkpoint.unused()


def test_an_8_bit_matrix_is_one_entry_with_its_scales(write: Write) -> None:
    path = write(None, weight_scale=torch.tensor(0.5), input_scale=torch.tensor(2.0))
    entries = {entry.name: entry for entry in open_checkpoint(path).entries()}
    assert sorted(entries) == ["model.embed_tokens.weight", DOWN]
    found = entries[DOWN]
    assert (found.shape, found.format, found.nbytes) == ((32, 64), "fp8", 32 * 64 + 8)


def test_a_scaled_matrix_of_another_type_is_refused(write: Write) -> None:
    path = write(None, weight=torch.ones(32, 64), weight_scale=torch.tensor(0.5))
    with pytest.raises(CheckpointError, match=r"weight': F32 .*expected a matrix in F8_E4M3 or"):
        open_checkpoint(path).entries()


EXPERTS = "model.layers.0.mlp.experts"


def joined(scales: tuple[int, int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """Three experts' gates above their ups, ``[3, 48, 32]``, with scales; and their values."""
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(3, 48, 32, generator=random).to(torch.float8_e4m3fn)
    scale = torch.rand(scales, generator=random)
    high = 48 // scales[1] if 48 % scales[1] == 0 else 20
    spread = scale.repeat_interleave(high, 1)[:, :48]
    spread = spread.repeat_interleave(32 // scales[2], 2)
    tensors = {"gate_up_proj": weight, "gate_up_proj_scale_inv": scale}
    return tensors, weight.float() * spread


@pytest.mark.parametrize(
    ("block", "scales"),
    [
        ([8, 16], (3, 6, 2)),  # gate and up are whole blocks
        ([16, 16], (3, 3, 2)),  # a block has rows of both
        ([20, 16], (3, 3, 2)),  # and the last block of an expert is cut
        (None, (3, 2, 1)),  # one scale for the gate, one for the up
        (None, (3, 1, 1)),
        ([64, 32], (3, 2, 1)),  # a block would have both: transformers keeps two
    ],
)
def test_joined_experts_are_packed_matrices_of_their_own(
    files: Any, tmp_path: Path, block: list[int] | None, scales: tuple[int, int, int]
) -> None:
    tensors, values = joined(scales)
    if block == [20, 16]:
        scale = tensors["gate_up_proj_scale_inv"]
        spread = scale.repeat_interleave(20, 1)[:, :48].repeat_interleave(16, 2)
        values = tensors["gate_up_proj"].float() * spread
    settings = {"quant_method": "fp8", "weight_block_size": block}
    experts = {"model_type": "mixtral", "num_local_experts": 3, "intermediate_size": 24}
    config = files.config(**experts, hidden_size=32, quantization_config=settings)
    path = tmp_path / "model"
    files.folder(path, config=config)
    save_file({f"{EXPERTS}.{k}": v for k, v in tensors.items()}, path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    for expert in range(3):
        for part, rows in {"gate": slice(0, 24), "up": slice(24, 48)}.items():
            weight = checkpoint.weight(f"{EXPERTS}.{expert}.{part}_proj")
            assert isinstance(weight, Float8Weight)
            assert torch.equal(weight.dequantize(), values[expert, rows])
    assert checkpoint.unused() == []
    [entry] = [e for e in checkpoint.entries() if "experts" in e.name]
    assert (entry.shape, entry.format) == ((3, 48, 32), "fp8")


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3, 5, 2), r"scales of shape \[3, 5, 2\] for \[3, 48, 32\] in blocks of"),
        (torch.ones(2, 6, 2), r"scales of shape \[2, 6, 2\]"),
        (torch.ones(6, 2), r"scales of shape \[6, 2\]"),
        (torch.ones(3, 6, 3), r"scales of shape \[3, 6, 3\]"),
        (torch.full((3, 6, 2), float("nan")), "a scale is not a finite number"),
    ],
)
def test_scales_that_do_not_fit_joined_experts_are_refused(
    files: Any, tmp_path: Path, scale: Tensor, message: str
) -> None:
    tensors, _ = joined((3, 6, 2))
    tensors["gate_up_proj_scale_inv"] = scale
    settings = {"quant_method": "fp8", "weight_block_size": [8, 16]}
    experts = {"model_type": "mixtral", "num_local_experts": 3, "intermediate_size": 24}
    config = files.config(**experts, hidden_size=32, quantization_config=settings)
    path = tmp_path / "model"
    files.folder(path, config=config)
    save_file({f"{EXPERTS}.{k}": v for k, v in tensors.items()}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"gate_up_proj_scale_inv': .*{message}"):
        open_checkpoint(path).weight(f"{EXPERTS}.0.up_proj")
