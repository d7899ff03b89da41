"""Quantizing while a model is loaded: matrices become packed as they are pulled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from sdk.kernels.layouts import Dense
from sdk.quant.checkpoint import Checkpoint, TensorEntry
from sdk.quant.derived import DerivedCheckpoint
from sdk.quant.errors import QuantizationError, UnsupportedError
from sdk.quant.quantize import quantize_rows, quantize_without_data
from sdk.quant.scheme import Scheme
from sdk.quant.weight import PackedWeight, Weight, weight_of

#: Embedding and head, as folders and GGUF files call them.
EMBEDDINGS = ("embed_tokens", "token_embd")
_ENDS = (*EMBEDDINGS, "lm_head", "output")
#: Matrices of the numbered blocks of a model, whatever it calls them.
_IN_BLOCK = re.compile(r"\.\d+\.")
#: What chooses experts: a few rows that decide everything behind them.
_ROUTER = re.compile(r"\.(mlp|block_sparse_moe)\.(gate|router)(\.weight)?$|\.ffn_gate_inp\.")
#: Models of transformers whose matrices are [in, out].
_TURNED = ("gpt2", "openai-gpt")
FLOATS = ("F32", "F16", "BF16")


def scheme_at_load(name: str) -> Scheme:
    """:raises QuantizationError: an unknown scheme, or one that needs text or makes a file."""
    scheme = Scheme.parse(name)
    if scheme.needs_data or scheme.container == "gguf":
        raise QuantizationError(
            f"quantization={name!r}: expected a scheme that needs no text (int4, int8, fp8, "
            "hqq-w4g64, rtn-w4g64-like); make a file of the others with `embedlm quantize`. "
            "A checkpoint that is quantized already needs no quantization="
        )
    return scheme


def is_in_block(entry: TensorEntry) -> bool:
    """Whether an entry of a file is a matrix that is quantized."""
    in_block = _IN_BLOCK.search(entry.name) is not None
    return len(entry.shape) == 2 and in_block and not is_router(entry.name)


def is_end(name: str) -> bool:
    """Whether a tensor is the embedding or the head; GGUF calls a matrix of a block attn_output."""
    return not _IN_BLOCK.search(name) and name.removesuffix(".weight").endswith(_ENDS)


def is_router(name: str) -> bool:
    """Whether a matrix chooses experts; such a one stays as it is, as all makers of files do."""
    return _ROUTER.search(name) is not None


def packed_at_load(checkpoint: Checkpoint, name: str | None) -> Checkpoint:
    """``checkpoint``, packed by scheme ``name`` while it is pulled; as it is where that is None.

    :raises UnsupportedError: a model whose matrices are stored turned, so that they cannot be, or
        are packed already.
    """
    if name is None:
        return checkpoint
    if checkpoint.config.get("model_type") in _TURNED:
        raise UnsupportedError(
            f"{checkpoint.path}: quantization={name!r}: {checkpoint.config['model_type']} stores "
            "its matrices turned, they are not packed"
        )
    scheme = scheme_at_load(name)
    entries = checkpoint.entries()
    if not any(is_in_block(entry) and entry.format in FLOATS for entry in entries):
        found = ", ".join(sorted({entry.format for entry in entries if is_in_block(entry)}))
        raise UnsupportedError(
            f"{checkpoint.path}: quantization={name!r}: expected float matrices to pack, found "
            f"{found}: leave quantization unset"
        )
    return QuantizedAtLoad(checkpoint, scheme)


class QuantizedAtLoad(DerivedCheckpoint):
    """``inner`` with the float matrices of its blocks packed; what is packed already stays so."""

    def __init__(self, inner: Checkpoint, scheme: Scheme) -> None:
        super().__init__(inner, self._packed)
        self._scheme = scheme

    def _packed(self, name: str, weight: Weight) -> Weight:
        if not isinstance(weight, PackedWeight) or not isinstance(weight.layout, Dense):
            return weight
        if is_router(name):
            return weight
        if _IN_BLOCK.search(name):
            return weight_of(quantize_without_data(name, weight.dequantize(), self._scheme))
        if self._scheme.head is not None and is_end(name):
            return weight_of(quantize_rows(name, weight, self._scheme.head))
        return weight

    def entries(self) -> Sequence[TensorEntry]:
        return [self._entry(entry) for entry in self.inner.entries()]

    def _entry(self, entry: TensorEntry) -> TensorEntry:
        if len(entry.shape) != 2 or entry.format not in FLOATS:
            return entry
        rows, columns = entry.shape
        if is_in_block(entry):
            return replace(entry, held=self._scheme.packed_bytes(rows, columns))
        if self._scheme.head is not None and is_end(entry.name):
            return replace(entry, held=self._scheme.head_bytes(rows, columns))
        return entry
