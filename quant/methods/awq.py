"""AWQ: columns with large inputs are scaled up before rounding.

Lin et al., "AWQ: Activation-aware Weight Quantization" (2023). Multiplying column k of a weight by
``s[k]`` and dividing its input by the same changes only the rounding: scaled-up columns are more
precise. ``s`` is a power of the input's mean size over a power of the weight's mean size; the
exponent is searched. Then each group's range is clipped as long as that reduces the error.

Errors are measured at the output: ``tr(D G D^T)`` for a change ``D`` of the weight and the Gram
matrix ``G`` of its inputs. That is the exact mean over the calibration text without rerunning it.
"""

from __future__ import annotations

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import Affine
from sdk.quant.calibration import InputStatistics
from sdk.quant.methods.integers import (
    as_affine,
    fit_steps,
    group_of,
    grouped,
    narrower_steps,
)
from sdk.quant.spec import QuantSpec

_EXPONENTS = [i / 20 for i in range(20)]
#: Clipped ranges to try, as fractions of the whole range.
_CLIPS = [1 - i / 20 for i in range(11)]
#: Rows that determine the exponent: more rows change it by less than a step of the search.
_SAMPLE = 512


def stretch(
    weight: Tensor, inputs: InputStatistics, spec: QuantSpec, of: Tensor | None = None
) -> Tensor:
    """The best ``s``, float32 ``[K]``, for ``weight``, float32 ``[N, K]``.

    ``of``, int64 ``[K]``: columns with the same number get the same ``s``, because one row of the
    previous matrix produces all of them (query heads that share a value head).
    """
    gram = inputs.gram
    rows = weight[:: -(-weight.shape[0] // _SAMPLE)]
    group = group_of(spec, weight.shape[1])
    sizes = grouped(weight.abs(), group)
    w_mean = (sizes / sizes.amax(2, keepdim=True).clamp(min=1e-12)).mean(0).reshape(-1)
    x_mean = inputs.mean_size
    best, least = torch.ones(weight.shape[1]), float("inf")
    for exponent in _EXPONENTS:
        s = (x_mean.pow(exponent) / (w_mean.pow(1 - exponent) + 1e-4)).clamp(min=1e-4)
        if of is not None:
            total = torch.zeros(int(of.max()) + 1).index_add_(0, of, s.log())
            s = (total / torch.bincount(of)).exp()[of]
        s = s / (s.max() * s.min()).sqrt()
        off = _rounded(rows * s, spec) / s - rows
        error = float(((off @ gram) * off).sum())
        if error < least:
            best, least = s, error
    return best


def _rounded(weight: Tensor, spec: QuantSpec) -> Tensor:
    groups = grouped(weight, group_of(spec, weight.shape[1]))
    steps = fit_steps(groups, spec)
    values = steps.values(steps.codes(groups, spec.bits)).reshape(weight.shape[0], -1)
    return values[:, : weight.shape[1]]


def clip_and_round(weight: Tensor, gram: Tensor, spec: QuantSpec) -> Affine:
    """``weight``, float32 ``[N, K]``, rounded to nearest in the ranges with the least output error.

    Each group's error is measured alone, without its correlation with other groups.
    """
    rows, columns = weight.shape
    group = group_of(spec, columns)
    groups = grouped(weight, group)
    own = _block_grams(gram, group)

    def error(change: Tensor) -> Tensor:
        by_group = change.transpose(0, 1)
        return (torch.bmm(by_group, own) * by_group).sum(2).t()

    steps = narrower_steps(groups, spec, _CLIPS, error)
    codes = steps.codes(groups, spec.bits).reshape(rows, -1)[:, :columns]
    return as_affine(codes, steps, spec, columns)


def _block_grams(gram: Tensor, group: int) -> Tensor:
    """The Gram matrices of each group's columns: ``[G, g, g]``."""
    short = -gram.shape[0] % group
    padded = torch.nn.functional.pad(gram, (0, short, 0, short))
    count = padded.shape[0] // group
    blocks = padded.view(count, group, count, group)
    return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
