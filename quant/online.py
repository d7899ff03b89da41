"""Online quantization: float matrices are quantized while the model is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from sdk.quant.checkpoint import VISION_ROOT, Checkpoint, TensorEntry
from sdk.quant.errors import QuantizationError, UnsupportedError
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint
from sdk.quant.weight import Weight, weight_of

if TYPE_CHECKING:
    from sdk.kernels.cpu.weight_rounding import RowRounder
    from sdk.quant.scheme import Scheme

#: Names of the embedding in safetensors folders and in GGUF files.
EMBEDDINGS = ("embed_tokens", "token_embd")
#: Names of the table with the inputs of all layers, which is looked up by row.
LAYER_TABLES = ("embed_tokens_per_layer", "per_layer_token_embd")
_ENDS = (*EMBEDDINGS, "lm_head", "output")
#: Tensors of a model's numbered blocks, whatever the blocks are called.
_IN_BLOCK = re.compile(r"\.\d+\.")
#: What makes the strengths and decays of a delta net, one number for each head.
_OF_HEADS = re.compile(
    r"\.linear_attn\.(in_proj_(a|b|ba)|[ab]_proj)(\.|$)|\.ssm_(alpha|beta|ba|[fg]_[ab])\."
    r"|\.self_attn\.(b|[fg]_[ab])_proj(\.|$)"
)
#: Routers of experts: few rows, but everything after them depends on them.
_ROUTER = re.compile(
    r"\.(mlp|block_sparse_moe)\.(gate|router|primary_router|shared_expert_gate|gate\.wg"
    r"|router\.(gate|layer))(\.weight)?$|\.ffn_gate_inp(_shexp)?\."
)
#: What makes time steps, b and c of Mamba-1, which are few rows or columns, and its decays; what
#: makes the rates of RWKV-7, and its vectors that files store as matrices.
_OF_STEPS = re.compile(
    r"\.(mamba|mixer)\.((x|dt)_proj(\.weight)?|A_log)$|\.ssm_((x|dt)\.weight|a)$"
    r"|\.attn\.([wavg]_lora\.lora\.[02](\.weight)?|x_x|r_k)$"
    r"|\.rwkv\.([wavg]_(in|out)(\.weight)?|shift|key_read)$|\.time_mix_[wavg][12]\."
)
#: Tables of biases by buckets of distances, a column for each head, that T5's layers have.
_OF_DISTANCES = re.compile(r"\.distance_biases(\.weight)?$|\.attn_rel_b\.")
#: The last projection of an MLP, as folders of encoders and GGUF files call it.
_LAST_OF_MLP = re.compile(
    r"(?<!attention)\.output\.dense(\.weight)?$|\.ffn_down\.|\.ffn\.lin2(\.weight)?$"
    r"|\.mlp\.(down_proj|down_layer|fc2|wo|Wo)(\.weight)?$"
    r"|\.ffn\.w3(\.weight)?$|\.DenseReluDense\.wo(\.weight)?$"
)
#: Columns per scale of those matrices in 8 bits. Their largest weights are 4.3 to 6.1 times the
#: root mean square of a row in all-mpnet-base-v2, 3.4 to 3.8 in all others: with one scale for a
#: row vectors have a cosine of 0.998 to those in float32, with these 0.9997.
LAST_GROUP = 64
#: Rows of fewer weights stay in float: kernels pack blocks of 32, so nothing would get smaller
#: (the coefficients of AltUp in Gemma 3n have 4 columns).
FEWEST_COLUMNS = 32
#: As many matrices as codes may be in memory that is used again: gate and up, and the ones of
#: attention.
_CODES_KEPT = 3
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
    is_wide = len(entry.shape) == 2 and entry.shape[1] >= FEWEST_COLUMNS
    return is_wide and in_block and not stays_float(entry.name)


def is_last_of_mlp(name: str) -> bool:
    """Whether a matrix of an encoder is the last projection of an MLP."""
    return _LAST_OF_MLP.search(name) is not None


def is_embedding_or_head(name: str) -> bool:
    """Whether a tensor is the embedding or the head (GGUF's blk.N.attn_output is neither)."""
    return not _IN_BLOCK.search(name) and name.removesuffix(".weight").endswith(_ENDS)


def is_router(name: str) -> bool:
    """Whether a matrix is a router of experts. Routers stay in float, as in all published files."""
    return _ROUTER.search(name) is not None


def stays_float(name: str) -> bool:
    """Whether a matrix of a layer stays in float: a router, biases by distance, or what makes
    Mamba-1's time steps or RWKV-7's rates, as in published files."""
    found = _OF_STEPS.search(name) or _OF_DISTANCES.search(name)
    return is_router(name) or found is not None


def stays_plain(name: str) -> bool:
    """Whether a matrix of a layer stays in float in files that are written: as while loading, and
    what makes the strengths and decays of a delta net, one number for each head, as in published
    files."""
    return stays_float(name) or _OF_HEADS.search(name) is not None


def online_quantized(
    checkpoint: Checkpoint, name: str | None, *, encoder: bool = False, threads: int = 1
) -> Checkpoint:
    """``checkpoint``, its weights packed by scheme ``name`` as they are pulled; unchanged for None.

    ``encoder``: the model attends in both directions. ``"int8"`` then means scales for
    ``LAST_GROUP`` columns in the last projections of MLPs, where their width allows it.
    ``threads`` read and round a matrix together.

    :raises UnsupportedError: the matrices are already packed.
    """
    if name is None:
        return checkpoint
    scheme = online_scheme(name)
    entries = checkpoint.entries()
    if not any(is_in_block(entry) and entry.format in FLOATS for entry in entries):
        found = ", ".join(sorted({entry.format for entry in entries if is_in_block(entry)}))
        raise UnsupportedError(
            f"{checkpoint.path}: quantization={name!r}: expected float matrices to pack, found "
            f"{found}; leave quantization unset"
        )
    last = None
    if encoder and name.lower() == "int8":
        last = replace(scheme, spec=replace(scheme.spec, group=LAST_GROUP))
    return OnlineQuantizedCheckpoint(checkpoint, scheme, last, threads)


class OnlineQuantizedCheckpoint(RewrittenCheckpoint):
    """``inner`` with the float matrices of its blocks packed; packed ones stay as they are.

    ``last``: the scheme of the last projections of MLPs, if another one. ``threads`` round a
    matrix.
    """

    def __init__(
        self, inner: Checkpoint, scheme: Scheme, last: Scheme | None = None, threads: int = 1
    ) -> None:
        super().__init__(inner, self._packed)
        self._scheme, self._last, self._threads = scheme, last, threads

    @cached_property
    def _rounder(self) -> RowRounder:
        from sdk.kernels.cpu.weight_rounding import RowRounder

        held = (entry.held for entry in self.entries() if entry.packed and is_in_block(entry))
        largest = max((each for each in held if each is not None), default=0)
        return RowRounder(self._threads, kept=_CODES_KEPT * largest)

    def _scheme_of(self, name: str, columns: int) -> Scheme:
        """The scheme of a matrix of a block."""
        if self._last is None or columns % LAST_GROUP or not is_last_of_mlp(name):
            return self._scheme
        return self._last

    def _packed(self, name: str, weight: Weight) -> Weight:
        if stays_float(name) or name.startswith(VISION_ROOT):
            return weight
        from sdk.quant.quantize import quantize_pieces, quantize_rows
        from sdk.quant.unread import float_pieces

        pieces = float_pieces(weight)
        if pieces is None:
            return weight
        if _IN_BLOCK.search(name):
            columns = weight.shape[1]
            if columns < FEWEST_COLUMNS:
                return weight
            scheme = self._scheme_of(name, columns)
            return weight_of(quantize_pieces(name, pieces, scheme, self._rounder))
        if self._scheme.head is not None and is_embedding_or_head(name):
            return weight_of(quantize_rows(name, weight, self._scheme.head, rounder=self._rounder))
        return weight

    def close(self) -> None:
        super().close()
        if "_rounder" in self.__dict__:  # 170 MiB of an 8B in int8, until the collector finds it
            self._rounder.clear()

    def entries(self) -> Sequence[TensorEntry]:
        return [self._entry(entry) for entry in self.inner.entries()]

    def _entry(self, entry: TensorEntry) -> TensorEntry:
        if len(entry.shape) != 2 or entry.format not in FLOATS:
            return entry
        rows, columns = entry.shape
        if is_in_block(entry):
            scheme = self._scheme_of(entry.name, columns)
            held = scheme.packed_bytes(rows, columns)
            return replace(entry, held=held, packed=str(scheme.spec))
        head = self._scheme.head
        if head is not None and is_embedding_or_head(entry.name):
            return replace(entry, held=self._scheme.head_bytes(rows, columns), packed=str(head))
        return entry
