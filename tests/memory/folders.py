"""Random folders of safetensors with the shapes of Llama 3.1 8B, for peaks of memory.

    python tests/memory/folders.py KIND FOLDER [--layers 8] [--shard 5e9]

KIND: one of :data:`KINDS`. Names, types and shapes of tensors are those of published folders of the
kind. Values come from a small bank, so that gigabytes are written at the speed of the disk.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

#: Numbers of a bank; a prime, so that rows differ.
_BANK = 1_048_573
_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "I8": 1, "F8_E4M3": 1}
#: Weights that share a scale where a kind has groups.
GROUP = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama; those of the 8B unless said otherwise."""

    layers: int = 8
    hidden: int = 4096
    mlp: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 128256

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the matrices of a layer, in the order of published shards."""
        keys = self.hidden // self.heads * self.kv_heads
        return {
            "mlp.down_proj": (self.hidden, self.mlp),
            "mlp.gate_proj": (self.mlp, self.hidden),
            "mlp.up_proj": (self.mlp, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
        }


#: A tensor: its type, its shape, and what fills it (see :func:`_bank`).
Stored = tuple[str, tuple[int, ...], str]


def _floats(kind: str) -> Callable[[int, int], dict[str, Stored]]:
    return lambda rows, columns: {"weight": (kind, (rows, columns), "normal")}


def _gptq(rows: int, columns: int) -> dict[str, Stored]:
    groups = columns // GROUP
    return {
        "qweight": ("I32", (columns // 8, rows), "bits"),
        "qzeros": ("I32", (groups, rows // 8), "bits"),
        "scales": ("F16", (groups, rows), "scales"),
        "g_idx": ("I32", (columns,), "groups"),
    }


def _gptq_act(rows: int, columns: int) -> dict[str, Stored]:
    return {**_gptq(rows, columns), "g_idx": ("I32", (columns,), "mixed groups")}


def _awq(rows: int, columns: int) -> dict[str, Stored]:
    groups = columns // GROUP
    return {
        "qweight": ("I32", (columns, rows // 8), "bits"),
        "qzeros": ("I32", (groups, rows // 8), "bits"),
        "scales": ("F16", (groups, rows), "scales"),
    }


def _fp8(rows: int, columns: int) -> dict[str, Stored]:
    return {
        "weight": ("F8_E4M3", (rows, columns), "e4m3"),
        "weight_scale": ("F32", (), "scales"),
        "input_scale": ("F32", (), "scales"),
    }


def _fp8_block(rows: int, columns: int) -> dict[str, Stored]:
    blocks = (rows // GROUP, columns // GROUP)
    return {
        "weight": ("F8_E4M3", (rows, columns), "e4m3"),
        "weight_scale_inv": ("F32", blocks, "scales"),
    }


def _int8(rows: int, columns: int) -> dict[str, Stored]:
    return {
        "weight": ("I8", (rows, columns), "bits"),
        "weight_scale": ("BF16", (rows, 1), "scales"),
    }


def _ct_w4a16(rows: int, columns: int) -> dict[str, Stored]:
    return {
        "weight_packed": ("I32", (rows, columns // 8), "bits"),
        "weight_scale": ("BF16", (rows, columns // GROUP), "scales"),
        "weight_shape": ("I64", (2,), f"shape {rows} {columns}"),
    }


def _compressed(format_: str, inputs: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": format_, "weights": weights}
    group |= {"input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_INT8_INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True}
_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
_GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "group_size": GROUP}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@dataclass(frozen=True, slots=True)
class Kind:
    """How a matrix of a layer is stored, the type of all else, and ``quantization_config``."""

    matrix: Callable[[int, int], dict[str, Stored]]
    floats: str = "BF16"
    config: Mapping[str, Any] | None = None


KINDS: Mapping[str, Kind] = {
    "bf16": Kind(_floats("BF16")),
    "fp16": Kind(_floats("F16"), "F16"),
    "gptq": Kind(_gptq, "F16", {**_GPTQ, "desc_act": False}),
    "gptq-act": Kind(_gptq_act, "F16", {**_GPTQ, "desc_act": True}),
    "awq": Kind(
        _awq,
        "F16",
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "version": "gemm",
            "zero_point": True,
        },
    ),
    "fp8": Kind(_fp8, config={"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-block": Kind(_fp8_block, config=_BLOCKS),
    "int8": Kind(
        _int8,
        config=_compressed("int-quantized", {**_INT8_INPUTS, "strategy": "token"}, **_ROWS),
    ),
    "ct-w4a16": Kind(
        _ct_w4a16, config=_compressed("pack-quantized", None, **_GROUPS, strategy="group")
    ),
}


def _tensors(kind: Kind, shape: Shape) -> Iterator[tuple[str, Stored]]:
    table = (shape.vocab, shape.hidden)
    yield "model.embed_tokens.weight", (kind.floats, table, "normal")
    norm = (kind.floats, (shape.hidden,), "ones")
    for layer in range(shape.layers):
        start = f"model.layers.{layer}"
        yield f"{start}.input_layernorm.weight", norm
        for name, (rows, columns) in shape.matrices.items():
            for ending, stored in kind.matrix(rows, columns).items():
                yield f"{start}.{name}.{ending}", stored
        yield f"{start}.post_attention_layernorm.weight", norm
    yield "model.norm.weight", norm
    yield "lm_head.weight", (kind.floats, table, "normal")


def _bytes(stored: Stored) -> int:
    return math.prod(stored[1]) * _WIDTHS[stored[0]]


def _bank(stored: Stored) -> NDArray[Any]:
    """Values of the tensor's type, as unsigned integers; repeated they fill it."""
    kind, shape, fill = stored
    count = min(math.prod(shape), _BANK)
    draw = np.random.default_rng(count)
    if fill.startswith("shape"):
        return np.array(fill.split()[1:], np.int64)
    if fill in ("groups", "mixed groups"):
        groups = np.arange(count, dtype=np.int32) // GROUP
        return draw.permutation(groups) if fill == "mixed groups" else groups
    if fill == "bits":
        return draw.integers(0, 256, count * _WIDTHS[kind], np.uint8)
    if fill == "e4m3":  # all but the two patterns that are no numbers
        codes = draw.integers(0, 127, count, np.uint8)
        return codes | draw.integers(0, 2, count, np.uint8) << 7
    values = {
        "normal": lambda: draw.standard_normal(count, np.float32) * 0.02,
        "ones": lambda: np.ones(count, np.float32),
        "scales": lambda: draw.uniform(0.001, 0.002, count).astype(np.float32),
    }[fill]()
    if kind == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values if kind == "F32" else values.astype(np.float16)


def _write(file: BinaryIO, stored: Stored) -> None:
    bank, left = _bank(stored).tobytes(), _bytes(stored)
    while left:
        left -= file.write(bank[:left])


def write_folder(folder: Path, kind: str, shape: Shape | None = None, shard: float = 5e9) -> Path:
    """A folder whose files have at most ``shard`` bytes, as published ones are cut."""
    shape = shape or Shape()
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Stored]] = [{}]
    size = 0
    for name, stored in _tensors(KINDS[kind], shape):
        if shards[-1] and size + _bytes(stored) > shard:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += _bytes(stored)
    listed: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        listed |= dict.fromkeys(tensors, name)
        _write_shard(folder / name, tensors)
    index = {"metadata": {}, "weight_map": listed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_config(KINDS[kind], shape)))
    return folder


def _write_shard(path: Path, tensors: Mapping[str, Stored]) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, stored in tensors.items():
        start, end = end, end + _bytes(stored)
        header[name] = {"dtype": stored[0], "shape": stored[1], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for stored in tensors.values():
            _write(file, stored)


def _config(kind: Kind, shape: Shape) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16" if kind.floats == "BF16" else "float16",
    }
    return config if kind.config is None else {**config, "quantization_config": kind.config}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shard", type=float, default=5e9)
    given = parser.parse_args()
    write_folder(given.folder, given.kind, Shape(given.layers), given.shard)


if __name__ == "__main__":
    main()
