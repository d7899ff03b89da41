"""Online quantization: float matrices are quantized while the model is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sdk.kernels.weights.layouts import Dense
from sdk.quant.checkpoint import VISION_ROOT, Checkpoint, TensorEntry
from sdk.quant.errors import QuantizationError, UnsupportedError
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint
from sdk.quant.weight import PackedWeight, Weight, weight_of

if TYPE_CHECKING:
    from sdk.quant.scheme import Scheme

#: Names of the embedding in safetensors folders and in GGUF files.
EMBEDDINGS = ("embed_tokens", "token_embd")
#: Names of the table with the inputs of all layers, which is looked up by row.
LAYER_TABLES = ("embed_tokens_per_layer", "per_layer_token_embd")
_ENDS = (*EMBEDDINGS, "lm_head", "output")
#: Tensors of a model's numbered blocks, whatever the blocks are called.
_IN_BLOCK = re.compile(r"\.\d+\.")
#: Routers of experts: few rows, but everything after them depends on them.
_OF_HEADS = re.compile(
    r"\.linear_attn\.(in_proj_(a|b|ba)|[ab]_proj)(\.|$)|\.ssm_(alpha|beta|ba|[fg]_[ab])\."
    r"|\.self_attn\.(b|[fg]_[ab])_proj(\.|$)"
)
_ROUTER = re.compile(
    r"\.(mlp|block_sparse_moe)\.(gate|router|shared_expert_gate|gate\.wg|router\.(gate|layer))"
    r"(\.weight)?$|\.ffn_gate_inp(_shexp)?\."
)
#: What makes time steps, b and c of Mamba-1, which are few rows or columns, and its decays; what
#: makes the rates of RWKV-7, and its vectors that files store as matrices.
_OF_STEPS = re.compile(
    r"\.(mamba|mixer)\.((x|dt)_proj(\.weight)?|A_log)$|\.ssm_((x|dt)\.weight|a)$"
    r"|\.attn\.([wavg]_lora\.lora\.[02](\.weight)?|x_x|r_k)$"
    r"|\.rwkv\.([wavg]_(in|out)(\.weight)?|shift|key_read)$|\.time_mix_[wavg][12]\."
)
#: Model types whose files store matrices as [in, out].
_TURNED = ("openai-gpt",)
FLOATS = ("F32", "F16", "BF16")


def online_scheme(name: str) -> Scheme:
    """The scheme called ``name``, if it can be applied while loading.

    :raises QuantizationError: unknown, or a scheme that needs calibration text or writes GGUF.
    """
    from sdk.quant.scheme import Scheme

    scheme = Scheme.parse(name)
    if scheme.needs_data or scheme.container == "gguf":
        raise QuantizationError(
            f"quantization={name!r}: expected a scheme that needs no calibration text (int4, int8, "
            "fp8, or like hqq-w4g64, rtn-w4g64); for other schemes, write a quantized file with "
            "`embedlm quantize`. A checkpoint that is already quantized needs no quantization="
        )
    return scheme


def is_in_block(entry: TensorEntry) -> bool:
    """Whether a tensor of a file is a matrix that online quantization packs."""
    in_block = _IN_BLOCK.search(entry.name) is not None
    if entry.name.startswith(VISION_ROOT):
        return False  # towers stay as they are, as in most published files
    return len(entry.shape) == 2 and in_block and not stays_float(entry.name)


def is_embedding_or_head(name: str) -> bool:
    """Whether a tensor is the embedding or the head (GGUF's blk.N.attn_output is neither)."""
    return not _IN_BLOCK.search(name) and name.removesuffix(".weight").endswith(_ENDS)


def is_router(name: str) -> bool:
    """Whether a matrix is a router of experts. Routers stay in float, as in all published files."""
    return _ROUTER.search(name) is not None


def stays_float(name: str) -> bool:
    """Whether a matrix of a layer stays in float: a router, or what makes Mamba-1's time steps or
    RWKV-7's rates, as in published files."""
    return is_router(name) or _OF_STEPS.search(name) is not None


def stays_plain(name: str) -> bool:
    """Whether a matrix of a layer stays in float in files that are written: as while loading, and
    what makes the strengths and decays of a delta net, one number for each head, as in published
    files."""
    return stays_float(name) or _OF_HEADS.search(name) is not None


def online_quantized(checkpoint: Checkpoint, name: str | None) -> Checkpoint:
    """``checkpoint``, its weights packed by scheme ``name`` as they are pulled; unchanged for None.

    :raises UnsupportedError: the matrices are stored as [in, out], or are already packed.
    """
    if name is None:
        return checkpoint
    if checkpoint.config.get("model_type") in _TURNED:
        raise UnsupportedError(
            f"{checkpoint.path}: quantization={name!r} is not supported for "
            f"{checkpoint.config['model_type']}, which stores its matrices transposed as "
            "[in, out]; leave quantization unset"
        )
    scheme = online_scheme(name)
    entries = checkpoint.entries()
    if not any(is_in_block(entry) and entry.format in FLOATS for entry in entries):
        found = ", ".join(sorted({entry.format for entry in entries if is_in_block(entry)}))
        raise UnsupportedError(
            f"{checkpoint.path}: quantization={name!r}: expected float matrices to pack, found "
            f"{found}; leave quantization unset"
        )
    return OnlineQuantizedCheckpoint(checkpoint, scheme)


class OnlineQuantizedCheckpoint(RewrittenCheckpoint):
    """``inner`` with the float matrices of its blocks packed; packed ones stay as they are."""

    def __init__(self, inner: Checkpoint, scheme: Scheme) -> None:
        super().__init__(inner, self._packed)
        self._scheme = scheme

    def _packed(self, name: str, weight: Weight) -> Weight:
        if not isinstance(weight, PackedWeight) or not isinstance(weight.layout, Dense):
            return weight
        if stays_float(name) or name.startswith(VISION_ROOT):
            return weight
        from sdk.quant.quantize import quantize_rows, quantize_without_data

        if _IN_BLOCK.search(name):
            return weight_of(quantize_without_data(name, weight.dequantize(), self._scheme))
        if self._scheme.head is not None and is_embedding_or_head(name):
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
        if self._scheme.head is not None and is_embedding_or_head(entry.name):
            return replace(entry, held=self._scheme.head_bytes(rows, columns))
        return entry
