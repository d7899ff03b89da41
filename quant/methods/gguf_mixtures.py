"""The type of each tensor of a GGUF file: the mixtures behind names like ``q4_k_m``.

A mixture spends more bits where they matter most: on the head and on value and MLP output
projections. ``file_type`` is only the label in the metadata. Source: llama.cpp's
``llama_tensor_get_type`` (src/llama-quant.cpp), for dense models. Of its types for mixtures of
experts only ``mxfp4_moe`` is supported: experts in MXFP4, everything else in Q8_0.
"""

from __future__ import annotations

from sdk.kernels.dataclass import dataclass
from sdk.kernels.weights.layouts import BLOCK_TYPES


@dataclass(frozen=True, slots=True)
class FileType:
    """``base``: the type of most matrices; ``number``: the value of ``general.file_type``."""

    base: str
    number: int


FILE_TYPES = {
    "f16": FileType("f16", 1),
    "q4_0": FileType("q4_0", 2),
    "q4_1": FileType("q4_1", 3),
    "q8_0": FileType("q8_0", 7),
    "q5_0": FileType("q5_0", 8),
    "q5_1": FileType("q5_1", 9),
    "q2_k": FileType("q2_k", 10),
    "q3_k_s": FileType("q3_k", 11),
    "q3_k_m": FileType("q3_k", 12),
    "q4_k_s": FileType("q4_k", 14),
    "q4_k_m": FileType("q4_k", 15),
    "q5_k_s": FileType("q5_k", 16),
    "q5_k_m": FileType("q5_k", 17),
    "q6_k": FileType("q6_k", 18),
    "iq4_nl": FileType("iq4_nl", 25),
    "mxfp4_moe": FileType("mxfp4", 38),
}
#: Types for rows that do not divide into blocks of 256.
_SHORT_ROWS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}


def tensor_type(
    mixture: str, part: str, layer: int, layers: int, columns: int, *, grouped: int = 1
) -> str:
    """The block type of a matrix; ``"f16"`` if no block size divides its rows.

    Args:
        mixture: a key of ``FILE_TYPES``.
        part: GGUF's name inside a layer (``attn_v``, ``ffn_up_exps``); ``output`` for the head and
            for an embedding tied to it; ``token_embd`` for any other embedding.
        layer: the layer's index among ``layers``.
        columns: number of columns of the matrix.
        grouped: number of query heads that share a key head.
    """
    if mixture == "mxfp4_moe":
        kind = "mxfp4" if part.endswith("_exps") else "q8_0"
        return kind if columns % 32 == 0 else "f16"
    kind = _wanted(mixture, part.removesuffix("_exps"), layer, layers, grouped)
    if kind != "f16" and columns % BLOCK_TYPES[kind].elements:
        kind = _SHORT_ROWS.get(kind, "f16")
    if kind != "f16" and columns % BLOCK_TYPES[kind].elements:
        return "f16"
    return kind


def _wanted(mixture: str, part: str, layer: int, layers: int, grouped: int) -> str:
    base = FILE_TYPES[mixture].base
    if part == "output":
        return base if base in ("f16", "q8_0") else "q6_k"
    if mixture == "q2_k":
        if part == "attn_v":
            return "q4_k" if grouped >= 4 else "q3_k"
        return "q3_k" if part in ("ffn_down", "attn_output") else base
    if mixture == "q3_k_m":
        if part == "attn_v":
            return "q5_k" if layer < 2 else "q4_k"
        if part == "ffn_down":
            return "q5_k" if layer < layers // 16 else "q4_k"
        return "q4_k" if part == "attn_output" else base
    if mixture in ("q4_k_m", "q5_k_m") and part in ("attn_v", "ffn_down"):
        return "q6_k" if _deserves_more(layer, layers) else base
    if mixture == "q4_k_s" and part in ("attn_v", "ffn_down"):
        early = layer < (4 if part == "attn_v" else layers // 8)
        return "q5_k" if early else base
    return base


def _deserves_more(layer: int, layers: int) -> bool:
    """Whether a layer is in the first or last eighth, or every third one in between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
