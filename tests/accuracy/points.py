"""What is measured of the two real models: weights in every format, and keys and values.

The base is the model's own file, whose values are the best weights at hand; ``base.gguf`` holds the
same in float16, for schemes that pack floats. SmolLM2's lie on a Q4_1 grid and Gemma's on Q4_K_M's:
4- and 5-bit grids of 32 with a minimum, and those of q4_k_m (0.0000 lost), would prove nothing
and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["full", "short"]


@dataclass(frozen=True)
class Point:
    """One model as it is run. ``text``: GGUF types whose errors are weighed by what text showed.

    Written ``int4 k8v4 auto``: weights, ``kv_cache_dtype``, ``compute``.
    """

    #: A scheme, or ``base``; ``q4_0+text`` with calibration text.
    weights: str
    kv: str = "float32"
    compute: str = "exact"

    def __str__(self) -> str:
        return f"{self.weights} {self.kv} {self.compute}"

    @classmethod
    def parse(cls, text: str) -> Point:
        return cls(*text.split(" "))

    @property
    def scheme(self) -> str:
        return self.weights.removesuffix("+text")


@dataclass(frozen=True)
class Text:
    """How much both models read."""

    windows: int
    tokens: int


@dataclass(frozen=True)
class Base:
    """``name`` in tables and baselines, and where its weights come from."""

    name: str
    file: str
    full: Text
    #: Made from it in the full tier, besides what is packed at load.
    points: tuple[Point, ...]
    short: tuple[Point, ...]

    def tier(self, name: Tier) -> tuple[Text, tuple[Point, ...]]:
        return (self.full, self.points) if name == "full" else (SHORT, self.short)


#: Of calibration text.
SEQUENCES = {"gptq-w4g64-mix-h5": 48}
FEWEST_SEQUENCES = 16
CALIBRATION_TOKENS = 512
SHORT = Text(windows=1, tokens=256)

AT_LOAD = (
    *("int8", "rtn-w8s", "fp8-channel", "fp8-tensor", "fp8-block"),
    *("int4", "hqq-w4g64", "rtn-w4g64", "nvfp4", "mxfp4", "hqq-w3g64"),
)
FILES = (
    *("q8_0", "q5_0", "q4_0", "q4_0+text", "iq4_nl", "gptq-q4_0", "gptq-iq4_nl"),
    *("gptq-w4g64", "gptq-w4g64-act", "gptq-w4g64-mix-h5", "awq-w4g64"),
)
KV_TYPES = ("float16", "int16", "int8", "fp8", "fp8_e5m2", "k8v4", "int4")
#: Tokens whose keys and values count as memory of what is served.
CONTEXT = 4096
#: As served: activations rounded where kernels do it.
SERVED = tuple(
    Point(weights, kv, "auto")
    for weights in ("base", "int8", "int4", "gptq-w4g64-mix-h5")
    for kv in ("float16", "int8", "int4")
)
_ALONE = tuple(Point("base", kv) for kv in KV_TYPES)

SMOLLM2 = Base(
    "smollm2-135m",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    Text(windows=4, tokens=512),
    (*(Point(name) for name in (*AT_LOAD, *FILES)), *_ALONE, *SERVED),
    (
        Point("base", "float16", "auto"),
        *(Point("base", kv) for kv in ("int8", "k8v4", "int4")),
        *(Point(name) for name in ("int8", "rtn-w4g64")),
    ),
)
GEMMA3 = Base(
    "gemma-3-270m",
    "gemma-3-270m-q4_k_m.gguf",
    Text(windows=2, tokens=512),
    (*(Point(name) for name in (*AT_LOAD, *FILES)), *_ALONE, *SERVED),
    (Point("base", "float16", "auto"), Point("base", "int4")),
)
BASES = {base.name: base for base in (SMOLLM2, GEMMA3)}
