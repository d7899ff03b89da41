"""The tensors kernels work on, one frozen dataclass per layout.

One formula covers nearly every weight format (``k`` runs along the input, ``g = k // group``)::

    w[n, k] = scale[n, g] * (code[n, k] - zero[n, g])  or  scale[n, g] * code[n, k] - minus[n, g]

``Affine`` is that formula with the codes packed; ``Blocks`` keeps a GGUF k-quant in the bytes of
its file, whose two-level scales would cost 7 to 11 % more if flattened; ``Dense`` is a plain
matrix. A matrix is always ``[out, in]``, here ``[N, K]``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """``values [N, K]`` in float32, float16 or bfloat16."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True, slots=True)
class Affine:
    """Integer codes in groups along K.

    ``codes`` uint8 ``[N, ceil(K * bits / 8)]``, each row one bit stream, lowest bit first
    (4 bits: byte j holds code 2j in its low and code 2j + 1 in its high nibble).
    ``scale [N, ceil(K / group)]`` in the file's own float type, never rounded again.
    Exactly one of: ``zero`` (one constant for all), ``zeros`` (uint8 per group) or ``minus`` (float
    per group) says what is subtracted. ``signed`` codes are two's complement (8 bits only).
    """

    shape: tuple[int, int]
    bits: int
    group: int
    codes: Tensor
    scale: Tensor
    zero: int = 0
    zeros: Tensor | None = None
    minus: Tensor | None = None
    signed: bool = False

    @property
    def nbytes(self) -> int:
        extra = sum(t.nbytes for t in (self.zeros, self.minus) if t is not None)
        return self.codes.nbytes + self.scale.nbytes + extra


@dataclass(frozen=True, slots=True)
class BlockType:
    """A GGUF block type: ``elements`` weights in ``nbytes`` bytes."""

    name: str
    elements: int
    nbytes: int
    group: int

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.elements


#: The block types kept in their file's bytes: ggml's k-quants, decoded in reference/decode.py.
BLOCK_TYPES = {
    "q4_k": BlockType("q4_k", 256, 144, 32),
    "q5_k": BlockType("q5_k", 256, 176, 32),
    "q6_k": BlockType("q6_k", 256, 210, 16),
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """``data`` uint8 ``[N, K / elements * nbytes]``: rows of blocks as in the GGUF file."""

    shape: tuple[int, int]
    type: str
    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


Layout = Dense | Affine | Blocks


@dataclass(frozen=True, slots=True)
class KVPages:
    """One layer's keys and values: ``k``, ``v`` ``[num_pages, kv_heads, page_size, head_dim]``.

    In memory a page's keys of one head lie transposed, ``[head_dim][page_size]``, so that
    neighbouring keys are the lanes of a vector; its values lie ``[page_size][head_dim]``. int8
    pages have ``k_scale`` and ``v_scale``, float16 ``[num_pages, kv_heads, page_size]``:
    value = scale * code. Their keys and values lie mixed (``reference/rope.py``):
    ``rope_and_cache`` mixes the queries too, and ``attention`` its result back.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.k.shape[2]
