"""Model files written byte by byte, so that a test can make any single field lie.

``files`` hands the writers to the tests of this folder.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from sdk.loaders.open import open_checkpoint

#: struct codes of the metadata types a GGUF file numbers 0 to 12 (8 is a string, 9 an array).
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass
class GgufBytes:
    """A GGUF file. ``build`` notes where each field lies in ``fields``: name -> (start, code)."""

    metadata: dict[str, tuple[int, Any]] = field(default_factory=dict)
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]] = field(default_factory=dict)
    order: str = "<"
    version: int = 3
    alignment: int = 32
    fields: dict[str, tuple[int, str]] = field(default_factory=dict)

    def build(self) -> bytes:
        self.fields.clear()
        self._out = bytearray(b"GGUF")
        self._put("version", "I", self.version)
        self._put("n_tensors", "Q", len(self.tensors))
        self._put("n_kv", "Q", len(self.metadata))
        for key, (kind, value) in self.metadata.items():
            self._text(f"{key}.name", key)
            self._put(f"{key}.type", "I", kind)
            self._value(key, kind, value)
        offset = 0
        for name, (dims, kind, data) in self.tensors.items():
            self._text(f"{name}.name", name)
            self._put(f"{name}.n_dims", "I", len(dims))
            for index, dim in enumerate(dims):
                self._put(f"{name}.dim{index}", "Q", dim)
            self._put(f"{name}.type", "I", kind)
            self._put(f"{name}.offset", "Q", offset)
            offset += self._padded(len(data))
        self.header_size = len(self._out)
        self._out += bytes(self._padded(len(self._out)) - len(self._out))
        for _, _, data in self.tensors.values():
            self._out += data + bytes(self._padded(len(data)) - len(data))
        return bytes(self._out)

    def lie(self, name: str, value: int) -> bytes:
        """The file with one number replaced."""
        raw = bytearray(self.build())
        start, code = self.fields[name]
        raw[start : start + struct.calcsize(code)] = struct.pack(self.order + code, value)
        return bytes(raw)

    def _padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def _put(self, name: str, code: str, value: Any) -> None:
        self.fields[name] = (len(self._out), code)
        self._out += struct.pack(self.order + code, value)

    def _text(self, name: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self._put(f"{name}.length", "Q", len(raw))
        self._out += raw

    def _value(self, name: str, kind: int, value: Any) -> None:
        if kind == 8:
            self._text(f"{name}.value", value)
        elif kind == 9:
            inner, values = value
            self._put(f"{name}.inner", "I", inner)
            self._put(f"{name}.count", "Q", len(values))
            for index, item in enumerate(values):
                self._value(f"{name}[{index}]", inner, item)
        else:
            self._put(f"{name}.value", CODES[kind], value)


def f32(*shape: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).standard_normal(shape).astype("<f4").tobytes()


HIDDEN, INNER, VOCAB, HEADS, KV_HEADS = 32, 64, 8, 4, 2


def llama_gguf() -> GgufBytes:
    """A llama of one layer in float32 with a vocabulary of eight tokens."""
    metadata: dict[str, tuple[int, Any]] = {
        "general.architecture": (8, "llama"),
        "llama.block_count": (4, 1),
        "llama.context_length": (4, 64),
        "llama.embedding_length": (4, HIDDEN),
        "llama.feed_forward_length": (4, INNER),
        "llama.attention.head_count": (4, HEADS),
        "llama.attention.head_count_kv": (4, KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": (6, 1e-5),
        "tokenizer.ggml.model": (8, "gpt2"),
        "tokenizer.ggml.tokens": (9, (8, [f"t{i}" for i in range(VOCAB)])),
        "tokenizer.ggml.token_type": (9, (5, [1] * VOCAB)),
        "tokenizer.ggml.eos_token_id": (4, 2),
    }
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (kv, HIDDEN),
        "blk.0.attn_v.weight": (kv, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    tensors = {
        name: (tuple(reversed(shape)), 0, f32(*shape, seed=seed))
        for seed, (name, shape) in enumerate(shapes.items())
    }
    return GgufBytes(metadata, tensors)


def safetensors_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file; ``header`` is JSON text or what becomes it, ``length`` a lie about it."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def hf_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        **changes,
    }


def write_folder(
    folder: Path,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    config: dict[str, Any] | None = None,
    name: str = "model.safetensors",
) -> Path:
    """A folder with a config and one safetensors file of float32 tensors."""
    if tensors is None:
        tensors = {"model.embed_tokens.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config() if config is None else config))
    header, data = {}, b""
    for key, values in tensors.items():
        raw = np.ascontiguousarray(values, "<f4").tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[key] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    (folder / name).write_bytes(safetensors_bytes(header, data))
    return folder


MATRICES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
VECTORS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm",
)  # fmt: skip


def pull_all(checkpoint: Any) -> None:
    """What a model's constructors do, without knowing the model."""
    checkpoint.weight("model.embed_tokens")
    checkpoint.tensor("model.norm.weight")
    if checkpoint.has("lm_head"):
        checkpoint.weight("lm_head")
    for layer in range(checkpoint.config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in (*MATRICES, "self_attn.qkv_proj", "mlp.gate_up_proj"):
            if checkpoint.has(prefix + name):
                checkpoint.weight(prefix + name)
            if checkpoint.has(f"{prefix}{name}.bias"):
                checkpoint.tensor(f"{prefix}{name}.bias")
        for name in VECTORS:
            if checkpoint.has(f"{prefix}{name}.weight"):
                checkpoint.tensor(f"{prefix}{name}.weight")


LAYER = "model.layers.0.mlp.down_proj"


@dataclass
class LayerFolder:
    """Writes folders whose one quantized matrix is ``LAYER`` of the shape asked for."""

    path: Path

    def open(
        self,
        settings: dict[str, Any] | None,
        tensors: dict[str, Any],
        shape: tuple[int, int] = (32, 64),
        metadata: dict[str, str] | None = None,
    ) -> Any:
        """The checkpoint; ``tensors`` are torch tensors, named by what follows the layer's name."""
        rows, columns = shape
        config = hf_config(hidden_size=rows, intermediate_size=columns, head_dim=8)
        if settings is not None:
            config["quantization_config"] = settings
        write_folder(self.path, config=config)
        stored = {LAYER + ending: tensor.contiguous() for ending, tensor in tensors.items()}
        save_file(stored, self.path / "model.safetensors", metadata)
        return self.reopen()

    def reopen(self) -> Any:
        return open_checkpoint(self.path)

    def weight(self, *args: Any, **kwargs: Any) -> Any:
        """The matrix; every tensor must have counted as used."""
        checkpoint = self.open(*args, **kwargs)
        weight = checkpoint.weight(LAYER)
        assert checkpoint.unused() == []
        return weight


@pytest.fixture
def layers(tmp_path: Path) -> LayerFolder:
    return LayerFolder(tmp_path / "model")


@pytest.fixture
def llama() -> GgufBytes:
    return llama_gguf()


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Writes bytes to a file and returns its path."""

    def write(raw: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return write


@pytest.fixture
def files() -> Any:
    """The writers of this module, which tests cannot import by name."""
    from types import SimpleNamespace

    return SimpleNamespace(
        Gguf=GgufBytes,
        llama=llama_gguf,
        f32=f32,
        safetensors=safetensors_bytes,
        config=hf_config,
        folder=write_folder,
        pull_all=pull_all,
    )
