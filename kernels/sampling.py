"""What decides the token of one row of logits: the numbers every sampling kernel takes.

The steps, in this order (vLLM's, with typical where llama.cpp has it): temperature, ``min_p``,
``top_k``, ``typical_p``, ``top_p``, XTC, the draw; or mirostat in place of the truncations. Each
counts what the earlier ones left. A token's *gap* is ``(best - logit) / temperature``, its weight
``e^-gap``, or 0 beyond a gap of 87.3 (e^-87.3 is 1e-38). A token is likelier than another when its
gap is smaller or, where they are equal, its id. The draw takes the first token, in order of ids,
with which the running sum of the weights exceeds ``uniform`` times their total.

Arithmetic: gaps are float32 (one rounding for the difference, one for the quotient), sums float64.
Two kernels may round weights differently by some 1e-7 and choose other tokens only where
``uniform``, or the mass of a truncation, lies that near to a boundary.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

#: One row, as ``Draw`` of cpu/native/abi.hpp. Temperature 0 is the argmax, below 1e-30 it is 1e-30;
#: ``min_p`` 0, ``typical_p`` 1, ``top_p`` 1, ``top_k`` 0, a negative ``xtc_threshold`` and a NaN
#: ``mirostat_mu`` (bits of surprise) are off. ``uniform`` is in [0, 1).
DRAW = np.dtype(
    [
        *((name, np.float64) for name in ("temperature", "min_p", "typical_p", "top_p")),
        *((name, np.float64) for name in ("xtc_threshold", "mirostat_mu")),
        ("top_k", np.int64),
        ("uniform", np.float64),
    ]
)

#: The largest gap with a weight.
FAR = float(np.float32(87.3))

Draws = NDArray[np.void]

_RECORD = struct.Struct("=6dqd")


def pack_draw(
    temperature: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    top_p: float = 1.0,
    xtc_threshold: float = -1.0,
    mirostat_mu: float = float("nan"),
    top_k: int = 0,
) -> bytes:
    """One ``DRAW`` as bytes: what does not change from token to token is packed once."""
    return _RECORD.pack(
        temperature, min_p, typical_p, top_p, xtc_threshold, mirostat_mu, top_k, 0.0
    )


def join_draws(packed: Sequence[bytes], uniforms: Sequence[float]) -> Draws:
    """``DRAW [R]`` of R packed ones and their numbers in [0, 1)."""
    draws = np.frombuffer(bytearray().join(packed), DRAW)
    draws["uniform"] = uniforms
    return draws


#: The draw of a row whose token is the argmax.
GREEDY = pack_draw(temperature=0.0)
_UNIFORM = struct.Struct("=d")


class Penalties(NamedTuple):
    """What tokens that were there already cost, E of them in R rows, each once in its row.

    ``rows`` and ``ids`` int64 ``[E]``; ``counts`` float32 ``[E]``, how often the token is in the
    output (0: in the prompt only); ``factors`` float32 ``[R, 3]``: repetition (Keskar et al. 2019:
    divides a positive logit, multiplies another), frequency (subtracted for each time) and presence
    (subtracted once).
    """

    rows: Tensor
    ids: Tensor
    counts: Tensor
    factors: Tensor


class Tokens(NamedTuple):
    """What became of R rows.

    ``tokens``; ``best``, the rows' maxima (NaN where there is a NaN: unless it is finite the row's
    token is that of the maximum, or the first NaN's); ``probabilities``, the tokens' shares of what
    could be drawn (1 where nothing was drawn).
    """

    tokens: list[int]
    best: list[float]
    probabilities: list[float]


class SampleBuffers:
    """Memory that stays: draws of up to ``rows`` rows, all greedy at first, and their outcome.

    ``records``: where the draws are to lie, ``rows * DRAW.itemsize`` bytes; else memory of its own.
    """

    def __init__(self, rows: int, records: memoryview | None = None) -> None:
        self._records = memoryview(bytearray(len(GREEDY) * rows))
        if records is not None:
            self._records = records.cast("B")
        self._records[:] = GREEDY * rows
        self._written = [GREEDY] * rows
        self.draws: Draws = np.frombuffer(self._records, DRAW)
        self.tokens = np.zeros(rows, np.int64)
        self.best = np.zeros(rows, np.float32)
        self.probabilities = np.ones(rows, np.float64)
        # Read in the few instructions of a memoryview: after a step the caches hold weights.
        self._views: list[Any] = [x.data for x in (self.tokens, self.best, self.probabilities)]

    def set(self, row: int, packed: bytes, uniform: float) -> None:
        """The draw of one row; writing what already stands there costs nothing."""
        at = row * _RECORD.size
        if self._written[row] is not packed:
            self._records[at : at + _RECORD.size] = packed
            self._written[row] = packed
        if packed is not GREEDY:
            _UNIFORM.pack_into(self._records, at + _RECORD.size - _UNIFORM.size, uniform)

    def write(self, outcome: NDArray[np.float64]) -> None:
        """The outcome of as many rows as ``outcome [R, 3]`` has: token, best, probability."""
        rows = len(outcome)
        self.tokens[:rows], self.best[:rows], self.probabilities[:rows] = outcome.T

    def read(self, rows: int) -> Tokens:
        """The outcome of the first ``rows`` rows."""
        tokens, best, probabilities = (view[:rows].tolist() for view in self._views)
        return Tokens(tokens, best, probabilities)
