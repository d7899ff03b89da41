"""What kernels ask for beside their inputs and results, as a plan counts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight ``[n, k]``, of ``experts`` alike where that is not 0, of which a token has
    ``per_token``. ``plain``, ``packed``: whether some layers have it as plain floats, and some not.
    """

    n: int
    k: int
    plain: bool
    packed: bool
    experts: int = 0
    per_token: int = 1


@dataclass(frozen=True, slots=True)
class Products:
    """What one model multiplies, and how it asks for it.

    ``head``: the matrix that only rows with logits are multiplied with. ``copied``: bytes of a
    number of x as a library for plain floats takes it, 0 where it takes the activations themselves.
    ``rounds``: the file may ask for rounded inputs. ``exact``, ``fixed``: as ``compute="exact"``
    and ``deterministic=True`` ask.
    """

    matrices: tuple[Matrix, ...]
    head: Matrix
    heads: int
    head_dim: int
    copied: int
    rounds: bool
    exact: bool
    fixed: bool


class Scratch(Protocol):
    """Of one model on one device."""

    def nbytes(self, tokens: int, requests: int, context: int) -> int:
        """The most an operator asks for in a step of so many ``tokens``, ``requests`` of which have
        logits, of contexts up to ``context`` tokens."""

    def kept(self, requests: int) -> int:
        """What stays from step to step."""
