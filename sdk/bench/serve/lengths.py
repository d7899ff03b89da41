"""Distributions of prompt and answer lengths."""

from __future__ import annotations

import argparse
import math
import random
import re
from dataclasses import dataclass

_FORMS = "N, LOW-HIGH, normal:MEAN:SD, lognormal:MEDIAN:SIGMA or exp:MEAN"
_MOST = 2**20


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, at least 1 each. ``text``: as the user wrote it."""

    kind: str
    a: float
    b: float
    text: str

    def draw(self, source: random.Random) -> int:
        if self.kind == "uniform":
            return source.randint(int(self.a), int(self.b))
        if self.kind == "normal":
            value = source.gauss(self.a, self.b)
        elif self.kind == "lognormal":
            value = source.lognormvariate(math.log(self.a), self.b)
        else:
            value = source.expovariate(1 / self.a)
        return max(1, min(round(value), _MOST))

    def __str__(self) -> str:
        return self.text


def parse_lengths(text: str) -> Lengths:
    """``"128"``, ``"64-256"`` (uniform), ``"normal:128:32"``, ``"lognormal:128:0.5"`` or
    ``"exp:128"``."""
    number = r"(\d+(?:\.\d+)?)"
    if found := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
        kind, a, b = "uniform", float(found[1]), float(found[2] or found[1])
    elif found := re.fullmatch(rf"(normal|lognormal):{number}:{number}", text):
        kind, a, b = found[1], float(found[2]), float(found[3])
    elif found := re.fullmatch(rf"exp:{number}", text):
        kind, a, b = "exp", float(found[1]), 0.0
    else:
        raise argparse.ArgumentTypeError(f"expected {_FORMS}; found {text!r}")
    fine = 1 <= a <= _MOST and (kind != "uniform" or a <= b <= _MOST)
    if not fine or (kind == "lognormal" and b > 5):
        raise argparse.ArgumentTypeError(
            f"expected {_FORMS} with lengths in 1..{_MOST}; found {text!r}"
        )
    return Lengths(kind, a, b, text)
