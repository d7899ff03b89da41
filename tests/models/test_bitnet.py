"""BitNet's two files of ternary weights: packed folders, and GGUF files with I2_S."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.bitnet import pack_weights

from sdk.kernels.operators.ops import Ops
from sdk.loaders.formats.gguf_types import GGUF_TYPES
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import LAYER, gguf_of
from tests.models.conftest import Paged, expected_logits, prompt, tiny

Load = Callable[..., Any]
NUMBERS = {kind.name: number for number, kind in GGUF_TYPES.items()}
VALUE = "model.layers.0.self_attn.v_proj"
#: Widths of whole blocks of 128 weights.
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}


def ternary(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))


def is_packed(name: str) -> bool:
    return name.endswith("_proj.weight")


def packed_folder(folder: Path, kind: str, **settings: Any) -> None:
    """A model of ternary weights with scales around 0.1, packed by transformers."""
    tiny("bitnet", **WIDE).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for seed, name in enumerate(sorted(tensors)):
        if is_packed(name):
            values = tensors[name]
            tensors[name] = pack_weights(ternary(values.shape, seed))
            scale = 0.05 + seed / 400
            tensors[name + "_scale"] = torch.tensor([1 / scale if kind == "bitlinear" else scale])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitnet", "linear_class": kind, **settings}
    (folder / "config.json").write_text(json.dumps(config))


def with_plain_layers(model: Any) -> Any:
    """transformers' model with plain layers of the same weights."""
    plain = tiny("bitnet", **WIDE)
    with torch.no_grad():
        for name, layer in plain.named_modules():
            if is_packed(f"{name}.weight"):
                packed = model.get_submodule(name)
                layer.weight.copy_(packed(torch.eye(layer.in_features)).T)
            elif getattr(layer, "weight", None) is not None:
                layer.weight.copy_(model.get_submodule(name).weight)
    return plain.eval()


@pytest.fixture
def eager() -> Iterator[None]:
    """transformers' layers would compile themselves, which takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_a_packed_folder_computes_what_transformers_does(
    kind: str, tmp_path: Path, load: Load
) -> None:
    packed_folder(tmp_path, kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    checkpoint, ids = open_checkpoint(tmp_path), prompt(41, 1)
    inputs = torch.Generator().manual_seed(1)
    with closing(Ops(num_threads=1)) as ops, torch.no_grad():
        for name in [name for name, _ in theirs.named_modules() if is_packed(f"{name}.weight")]:
            weight = checkpoint.weight(name)
            x = torch.randn(5, weight.shape[1], generator=inputs)
            assert (str(weight.spec), weight.inputs) == ("w2a8s", "int8 per token")
            product = ops.linear(weight.layout).matmul(x)
            torch.testing.assert_close(product, theirs.get_submodule(name)(x), atol=1e-5, rtol=1e-5)
    # Whole models, where one activation between two codes changes all that follow, are compared
    # without the rounding of activations.
    exact = with_plain_layers(theirs)
    found = Paged(load(open_checkpoint(tmp_path))).run("a", ids, [7, 30])
    assert (found - expected_logits(exact, ids)).abs().max() < 1e-4


def i2_s(values: Tensor, factor: float) -> bytes:
    """As BitNet's converter packs a ternary matrix: 128 codes of a row in 32 bytes."""
    codes = (values.numpy() + 1).astype(np.uint8).reshape(-1, 4, 32)
    blocks = codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]
    return blocks.tobytes() + np.float32(factor).tobytes() + bytes(28)


def i2_s_file(path: Path, folder: Path) -> Any:
    """A file of the same weights as the packed folder; returns its parts."""
    tensors = load_file(folder / "model.safetensors")
    model = tiny("bitnet", **WIDE)
    packed = [name for name in tensors if is_packed(name)]
    model.load_state_dict({k: v for k, v in tensors.items() if k not in packed}, strict=False)
    file = gguf_of(model)
    for seed, name in enumerate(sorted(set(tensors) - {f"{one}_scale" for one in packed})):
        if name in packed:
            values = ternary((4 * tensors[name].shape[0], tensors[name].shape[1]), seed)
            assert torch.equal(pack_weights(values.clone()), tensors[name])
            _, _, layer, part, own, _ = name.split(".")
            theirs = f"blk.{layer}.{LAYER[f'{part}.{own}']}.weight"
            assert theirs in file.tensors
            scale = float(tensors[f"{name}_scale"])
            dims = tuple(reversed(values.shape))
            file.tensors[theirs] = (dims, NUMBERS["I2_S"], i2_s(values, scale))
    path.write_bytes(file.build())
    return file


def test_a_file_with_i2_s_computes_what_the_folder_does(tmp_path: Path, load: Load) -> None:
    packed_folder(tmp_path / "folder", "autobitlinear")
    i2_s_file(tmp_path / "model.gguf", tmp_path / "folder")
    folder, file = (open_checkpoint(tmp_path / name) for name in ("folder", "model.gguf"))
    one, other = folder.weight(VALUE), file.weight(VALUE)
    assert torch.equal(one.dequantize(), other.dequantize())
    assert other.inputs == "int8 per token" and "i2_s" in str(other.spec)
    entry = next(entry for entry in file.entries() if entry.name == "blk.0.attn_v.weight")
    assert other.nbytes == entry.held
    ids = prompt(41, 1)
    expected, found = (Paged(load(each)).run("a", ids, [7, 30]) for each in (folder, file))
    assert torch.equal(found, expected)
    assert file.unused() == []


def test_a_code_that_is_none_is_refused(tmp_path: Path) -> None:
    packed_folder(tmp_path / "folder", "autobitlinear")
    file = i2_s_file(tmp_path / "model.gguf", tmp_path / "folder")
    name = "blk.0.attn_v.weight"
    dims, kind, data = file.tensors[name]
    for bad, message in (
        (b"\xff" + data[1:], "a code of I2_S is 3, expected 0 to 2"),
        (
            data[:-32] + np.float32("nan").tobytes() + data[-28:],
            "finite factor behind it, found nan",
        ),
    ):
        file.tensors[name] = (dims, kind, bad)
        (tmp_path / "bad.gguf").write_bytes(file.build())
        with pytest.raises(CheckpointError, match=f"'{name}': .*{message}"):
            open_checkpoint(tmp_path / "bad.gguf").weight(VALUE)


def test_the_removed_type_of_the_same_number_is_told_apart(tmp_path: Path) -> None:
    packed_folder(tmp_path / "folder", "autobitlinear")
    file = i2_s_file(tmp_path / "model.gguf", tmp_path / "folder")
    dims, kind, _ = file.tensors["blk.0.attn_v.weight"]
    file.tensors["blk.0.attn_v.weight"] = (dims, kind, bytes(dims[0] * dims[1] // 32 * 18))
    (tmp_path / "old.gguf").write_bytes(file.build())
    with pytest.raises(UnsupportedError, match="IQ4_NL_4_4, which was removed from the format"):
        open_checkpoint(tmp_path / "old.gguf")


def test_two_matrices_that_differ_in_the_factor_alone_are_not_alike(tmp_path: Path) -> None:
    packed_folder(tmp_path / "folder", "autobitlinear")
    file = i2_s_file(tmp_path / "model.gguf", tmp_path / "folder")
    dims, kind, data = file.tensors["blk.0.attn_v.weight"]
    file.tensors["blk.0.attn_k.weight"] = (dims, kind, data)
    for factor, expected in ((None, True), (7.0, False)):
        if factor is not None:
            changed = data[:-32] + np.float32(factor).tobytes() + data[-28:]
            file.tensors["blk.0.attn_k.weight"] = (dims, kind, changed)
        (tmp_path / "alike.gguf").write_bytes(file.build())
        checkpoint = open_checkpoint(tmp_path / "alike.gguf")
        assert (
            checkpoint.alike(f"{VALUE}.weight", f"{VALUE.replace('v_', 'k_')}.weight") == expected
        )


def test_a_bitnet_file_of_llama_cpp_with_fewer_key_heads_does_not_say_its_activation(
    tmp_path: Path,
) -> None:
    file = gguf_of(tiny("bitnet", hidden_act="silu"), arch="bitnet")
    (tmp_path / "model.gguf").write_bytes(file.build())
    with pytest.raises(UnsupportedError, match="the file does not say its activation"):
        open_checkpoint(tmp_path / "model.gguf")
