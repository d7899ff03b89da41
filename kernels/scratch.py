"""Scratch: temporary memory of kernels in addition to inputs and results, for memory plans."""

from __future__ import annotations

from typing import Protocol

from sdk.kernels.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight ``[n, k]``. If ``experts`` is not 0, there are this many of this shape, and each
    token uses ``per_token``. ``plain``, ``packed``: whether some layers store it as floats, or
    packed.
    """

    n: int
    k: int
    plain: bool
    packed: bool
    experts: int = 0
    per_token: int = 1


@dataclass(frozen=True, slots=True)
class Products:
    """The matrix products of one model.

    ``head``: the matrix that is multiplied only with output rows. ``copied``: bytes per value of
    the copy of x that a library for plain floats needs, 0 if it takes the activations themselves.
    ``rounds``: the file may ask for quantized activations. ``exact``, ``fixed``: the options
    ``compute="exact"`` and ``deterministic=True``. ``layers``: how many there are, each of which
    has all of ``matrices`` at most once. ``blocks``: whether all packed ones are blocks of GGUF
    files.
    """

    matrices: tuple[Matrix, ...]
    head: Matrix
    heads: int
    kv_heads: int
    head_dim: int
    copied: int
    rounds: bool
    exact: bool
    fixed: bool
    layers: int = 1
    blocks: bool = False


class Scratch(Protocol):
    """The scratch of one model on one device."""

    def nbytes(self, tokens: int, requests: int, context: int) -> int:
        """The largest scratch in bytes of any operator in a step of ``tokens`` tokens and
        ``requests`` output rows, with contexts up to ``context`` tokens."""

    def kept(self, requests: int) -> int:
        """Bytes that stay allocated between steps."""
