"""Rotary position embedding: one angle per position and pair of dimensions, for every scaling.

Dimension pair i of a head turns by ``position * inv_freq[i]``, ``inv_freq[i] = theta^(-2i/d)``.
Models that were extended to longer contexts change ``inv_freq`` ("scaling"); some also multiply cos
and sin by ``attention_factor``. The arithmetic is float32 in transformers' order
(modeling_rope_utils.py), but powers are rounded once: transformers' frequencies have an error of up
to one more unit of the last place.

Two scalings depend on the length of the context. A request's result would then depend on its
current length, or on the other requests of a batch. Here the engine's ``max_model_len`` decides
once, as in vLLM:

* ``dynamic`` (NTK): the base for a context of ``max_model_len`` tokens; unscaled while that is
  within ``max_position_embeddings``.
* ``longrope`` (Phi-3): the long factors when ``max_model_len`` exceeds the original context.

transformers decides by the longest position of each forward pass instead.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.ops import Ops

ROPE_TYPES = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "proportional",
    "freq_factors",
    "none",
)


_Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The parameters of one rotary embedding. A scaling uses only its own fields.

    ``rotary_dim`` of the head's dimensions turn, the rest pass through. ``factor``: how much longer
    the context is than ``original_max_position``; ``max_position`` is the model's
    ``max_position_embeddings``. ``long_factors``, ``short_factors`` and ``freq_factors`` divide
    ``inv_freq`` element by element (``[rotary_dim / 2]``).
    """

    theta: float
    rotary_dim: int
    max_position: int
    type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    turning_dim: int = 0
    long_factors: tuple[float, ...] = ()
    short_factors: tuple[float, ...] = ()
    freq_factors: tuple[float, ...] = ()

    @property
    def rotates(self) -> bool:
        """Whether it is one: layers without a rotation have the type ``none``."""
        return self.type != "none"


class Rope:
    """The angles of one :class:`RopeSpec` in an engine of at most ``max_model_len`` tokens."""

    def __init__(self, spec: RopeSpec, max_model_len: int, device: torch.device) -> None:
        inv_freq, self.attention_factor = inverse_frequencies(spec, max_model_len)
        self.inv_freq = inv_freq.to(device)

    def cos_sin(
        self,
        positions: Tensor,
        ops: Ops,
        axes: Tensor | None = None,
        shifts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Positions int64 ``[T]`` -> cos and sin, float32 ``[T, rotary_dim / 2]``, or ``[T, 0]`` if
        nothing turns. ``axes``, ``shifts``: see
        :meth:`sdk.kernels.operators.ops.Ops.rope_angles`."""
        return ops.rope_angles(positions, self.inv_freq, self.attention_factor, axes, shifts)


def inverse_frequencies(spec: RopeSpec, max_model_len: int) -> tuple[Tensor, float]:
    """``(inv_freq [rotary_dim / 2], attention_factor)``, float32; of ``none`` ``[0]``."""
    with np.errstate(all="ignore"):  # of absurd values in a config
        found, attention_factor = _frequencies(spec, max_model_len)
    return torch.from_numpy(found), attention_factor


def _frequencies(spec: RopeSpec, max_model_len: int) -> tuple[_Array, float]:
    match spec.type:
        case "none":  # of layers that do not rotate: there are no angles
            return np.zeros(0, np.float32), 1.0
        case "default":
            return _plain(spec, spec.theta), 1.0
        case "linear":
            return _plain(spec, spec.theta) / np.float32(spec.factor), 1.0
        case "dynamic":
            return _dynamic(spec, max_model_len), 1.0
        case "yarn":
            return _yarn(spec)
        case "longrope":
            return _longrope(spec, max_model_len)
        case "llama3":
            return _llama3(spec), 1.0
        case "proportional":
            return _proportional(spec), 1.0
        case "freq_factors":
            factors: _Array = np.array(spec.freq_factors, np.float32)
            found = (_plain(spec, spec.theta) / factors).astype(np.float32)
            return found, spec.attention_factor or 1.0
    raise ValueError(f"rope type: expected one of {ROPE_TYPES}, found {spec.type!r}")


def _powers(spec: RopeSpec, base: float) -> _Array:
    """``base^(2i/d)``, rounded once: libraries differ in the last bit of float32 powers."""
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    powers: NDArray[np.float64] = base ** exponents.astype(np.float64)
    return powers.astype(np.float32)


def _plain(spec: RopeSpec, base: float) -> _Array:
    found: _Array = np.float32(1) / _powers(spec, base)
    return found


def _dynamic(spec: RopeSpec, max_model_len: int) -> _Array:
    """NTK-aware: the base grows so that the slowest pair spans the longer context."""
    length = max(max_model_len, spec.max_position)
    stretch = spec.factor * length / spec.max_position - (spec.factor - 1)
    power = spec.rotary_dim / (spec.rotary_dim - 2)
    return _plain(spec, spec.theta * float(stretch**power))


def _proportional(spec: RopeSpec) -> _Array:
    """Only ``turning_dim`` dimensions turn, with the frequencies of the whole head."""
    turning = spec.turning_dim // 2
    inv_freq = _plain(spec, spec.theta)
    inv_freq[turning:] = 0.0
    inv_freq /= np.float32(spec.factor)
    return inv_freq


def _yarn(spec: RopeSpec) -> tuple[_Array, float]:
    """Fast pairs keep their frequency, slow ones are interpolated, with a ramp between them.

    Peng et al., "YaRN" (2023), equations 17 to 22.
    """

    def mscale(weight: float) -> float:
        return 1.0 if spec.factor <= 1 else 0.1 * weight * math.log(spec.factor) + 1.0

    attention_factor = spec.attention_factor
    if attention_factor is None:
        if spec.mscale and spec.mscale_all_dim:
            attention_factor = mscale(spec.mscale) / mscale(spec.mscale_all_dim)
        else:
            attention_factor = mscale(1.0)

    def dimension(rotations: float) -> float:
        """The pair that turns ``rotations`` times over the original context."""
        turns = spec.original_max_position / (rotations * 2 * math.pi)
        return (spec.rotary_dim * math.log(turns)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        high += 0.001
    one, pairs = np.float32(1), np.arange(spec.rotary_dim // 2, dtype=np.float32)
    keep = one - np.clip((pairs - np.float32(low)) / np.float32(high - low), 0, one)
    powers = _powers(spec, spec.theta)
    inv_freq = one / (np.float32(spec.factor) * powers) * (one - keep) + one / powers * keep
    return inv_freq, float(attention_factor)


def _longrope(spec: RopeSpec, max_model_len: int) -> tuple[_Array, float]:
    """Each pair has its own divisor: one set for short, one for long contexts."""
    attention_factor = spec.attention_factor
    if attention_factor is None:
        attention_factor = 1.0
        if spec.factor > 1.0:
            ratio = math.log(spec.factor) / math.log(spec.original_max_position)
            attention_factor = math.sqrt(1 + ratio)
    long = max_model_len > spec.original_max_position
    factors = np.array(spec.long_factors if long else spec.short_factors, np.float32)
    return np.float32(1) / (factors * _powers(spec, spec.theta)), attention_factor


def _llama3(spec: RopeSpec) -> _Array:
    """Long waves are slowed by ``factor``, short ones kept, those between interpolated."""
    inv_freq = _plain(spec, spec.theta)
    context = spec.original_max_position
    wavelength = np.float32(2 * math.pi) / inv_freq
    longest, shortest = context / spec.low_freq_factor, context / spec.high_freq_factor
    factor, one = np.float32(spec.factor), np.float32(1)
    scaled = np.where(wavelength > np.float32(longest), inv_freq / factor, inv_freq)
    width = spec.high_freq_factor - spec.low_freq_factor
    smooth = np.float32(context) / wavelength - np.float32(spec.low_freq_factor)
    smooth /= np.float32(width)
    between = (one - smooth) * scaled / factor + smooth * scaled
    is_between = (wavelength >= np.float32(shortest)) & (wavelength <= np.float32(longest))
    return np.where(is_between, between, scaled)
