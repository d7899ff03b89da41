"""The tensor types of GGUF files: values and bytes per block.

A row of K values is K / elements consecutive blocks, so its length in bytes does not depend on the
contents. `gguf_decode` reads the contents.
"""

from __future__ import annotations

from sdk.kernels.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class GgufType:
    """One ggml tensor type: blocks of ``elements`` values in ``nbytes`` bytes.

    ``halves``: byte offsets of float16 scales in a block. ``held``: bytes of a block in memory, if
    different (`gguf_codebooks`, `gguf_repack`). ``tail``: bytes after all blocks of a matrix, which
    begin with a float32, the factor of all its weights.
    """

    name: str
    elements: int
    nbytes: int
    halves: tuple[int, ...] = ()
    held: int = 0
    tail: int = 0


#: By the number in the file. Source: ggml's type traits. 9 (Q8_1) and 15 (Q8_K) are only used
#: inside llama.cpp's computations. 36 is BitNet's (utils/convert-hf-to-gguf-bitnet.py); its blocks
#: are those of x86 and of its converter. In ggml 36 was IQ4_NL_4_4, which takes twice the bytes.
GGUF_TYPES: dict[int, GgufType] = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18, (0,)),
    3: GgufType("Q4_1", 32, 20, (0, 2)),
    6: GgufType("Q5_0", 32, 22, (0,)),
    7: GgufType("Q5_1", 32, 24, (0, 2)),
    8: GgufType("Q8_0", 32, 34, (0,)),
    10: GgufType("Q2_K", 256, 84, (80, 82)),
    11: GgufType("Q3_K", 256, 110, (108,)),
    12: GgufType("Q4_K", 256, 144, (0, 2)),
    13: GgufType("Q5_K", 256, 176, (0, 2)),
    14: GgufType("Q6_K", 256, 210, (208,)),
    16: GgufType("IQ2_XXS", 256, 66, (0,), held=106),
    17: GgufType("IQ2_XS", 256, 74, (0,), held=114),
    18: GgufType("IQ3_XXS", 256, 98, (0,), held=138),
    19: GgufType("IQ1_S", 256, 50, (0,), held=106),
    20: GgufType("IQ4_NL", 32, 18, (0,)),
    21: GgufType("IQ3_S", 256, 110, (0,), held=138),
    22: GgufType("IQ2_S", 256, 82, (0,), held=114),
    23: GgufType("IQ4_XS", 256, 136, (0,)),
    24: GgufType("I8", 1, 1, held=4),
    25: GgufType("I16", 1, 2, held=4),
    26: GgufType("I32", 1, 4, held=4),
    27: GgufType("I64", 1, 8, held=4),
    28: GgufType("F64", 1, 8, held=4),
    29: GgufType("IQ1_M", 256, 56, held=114),
    30: GgufType("BF16", 1, 2),
    34: GgufType("TQ1_0", 256, 54, (52,), held=66),
    35: GgufType("TQ2_0", 256, 66, (64,)),
    36: GgufType("I2_S", 128, 32, tail=32),
    39: GgufType("MXFP4", 32, 17),
    40: GgufType("NVFP4", 64, 36),
    41: GgufType("Q1_0", 128, 18, (0,)),
    42: GgufType("Q2_0", 64, 18, (0,)),
}

#: Types removed from ggml. Files with them must be converted again from the original model.
REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
