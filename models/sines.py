"""Tables of sines and cosines by position (Vaswani et al. 2017, arXiv 1706.03762).

Files may hold a table that is computed here. It is compared, because a model with another one would
be another model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import Dense
from sdk.models.parts import Matrix
from sdk.models.source import ACCURATE
from sdk.quant.errors import CheckpointError
from sdk.quant.weight import Weight, weight_of

if TYPE_CHECKING:
    from sdk.models.rope import Rope
    from sdk.models.source import Source


def position_table(first: int, rows: int, width: int) -> Tensor:
    """What is added to embeddings, float32 ``[rows, width]`` from position ``first`` on:
    tensor2tensor's sines of all frequencies, then their cosines, and 0 for an odd last feature.

    In float32 and in transformers' order: angles of thousands of radians are rounded.
    """
    half = width // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(first, first + rows).float()[:, None] * frequencies
    table = torch.zeros(rows, width)
    table[:, : 2 * half] = torch.cat([angles.sin(), angles.cos()], dim=1)
    return table


def sines_of(source: Source, first: int) -> Weight:
    """The table that a model adds to embeddings, from row ``first`` on, which is position 0.

    :raises CheckpointError: its file has another one.
    """
    config, path = source.config, "model.embed_positions"
    if config.hidden_size < 4:
        raise CheckpointError(f"hidden_size: expected at least 4, found {config.hidden_size}")

    def pull() -> Matrix:
        table = position_table(first, config.max_position, config.hidden_size)
        for name in (f"{path}.weights", f"{path}.weight"):
            if source.has(name):
                check_table(source, name, table, before=first)
        return Matrix(weight_of(Dense(table)), None)

    return source.matrix_of(path, pull, ACCURATE).weight


def check_rotations(source: Source, rope: Rope, rows: int) -> None:
    """Compare a table of ``rows`` rotations with the angles of ``rope``: :func:`check_table`."""
    angles = torch.arange(rows).double()[:, None] * rope.inv_freq.cpu().double()
    table = torch.cat([angles.sin(), angles.cos()], dim=1)
    check_table(source, "model.embed_rotations.weight", table)


def check_table(source: Source, path: str, expected: Tensor, before: int = 0) -> None:
    """Compare a table of sines in a file, without the rows ``before`` the first one.

    Each number may differ by its rounding in the file, and by that of angles in float32, which
    grows with the position.

    :raises CheckpointError: it is another one.
    """
    found = source.stored(path)
    name, shape = source.name_of(path), [before + len(expected), expected.shape[1]]
    if list(found.shape) != shape:
        raise CheckpointError(f"{name}: expected shape {shape}, found {list(found.shape)}")
    found = found[before:]
    limit = _rounding(found) + len(expected) * torch.finfo(torch.float32).eps
    off = (found.double() - expected.double()).abs()
    if not off.max() <= limit:  # NaN too
        row, column = divmod(int(off.nan_to_num(math.inf).argmax()), shape[1])
        is_found, wanted = float(found[row, column]), float(expected[row, column])
        raise CheckpointError(
            f"{name}: expected the sines and cosines that are computed for a "
            f"{source.config.model_type}, found {is_found:.6g} in row {before + row}, column "
            f"{column}, not {wanted:.6g}: tables that were trained are not supported"
        )


def _rounding(table: Tensor) -> float:
    """The relative rounding of the narrowest type that has all numbers of a table: checkpoints give
    tables in float32, whatever files hold."""
    for kind in (torch.bfloat16, torch.float16):
        if torch.equal(table.to(kind).to(table.dtype), table):
            return torch.finfo(kind).eps
    return torch.finfo(torch.float32).eps
