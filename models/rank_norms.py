"""Norms over a width that tensor parallel ranks divide.

A rank has some of the features, and the mean square is that of all: ranks sum theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.kernels.operators.norm import Norm
from sdk.quant.errors import AlignmentError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.models.source import Source


class SubNorm:
    """The norm of what the last projection of a block reads (``LayerRules.sub_norms``).

    ``start``, ``count``: this rank's features of ``width``.

    :raises AlignmentError: a LayerNorm would need the mean over all ranks, too.
    """

    def __init__(self, source: Source, path: str, width: int, start: int, count: int) -> None:
        self.ops, self.group, self.width = source.ops, source.mesh.group, width
        self.norm = _own(_divisible(source, path, width), start, count)

    def __call__(self, x: Tensor) -> Tensor:
        """float32 ``[T, count]``; the same shape."""
        if self.group is None:
            return self.ops.norm(x, self.norm)
        assert self.norm.weight is not None
        squares = (x * x).sum(dim=1, keepdim=True) / self.width
        shrink = (self.ops.all_reduce(squares, self.group) + self.norm.eps).rsqrt()
        return x * shrink * self.norm.weight


class WidthNorms:
    """Norms over the whole width of queries and of keys (OLMo 2).

    :raises AlignmentError: see :class:`SubNorm`.
    """

    def __init__(self, source: Source, path: str) -> None:
        c, heads, d = source.config, source.heads, source.config.head_dim
        self.ops = source.ops
        self.mesh = source.mesh
        self.q_width, self.k_width = c.num_heads * d, c.num_kv_heads * d
        self.kv_copies = heads.kv_copies
        q_norm = _divisible(source, f"{path}.q_norm", self.q_width)
        k_norm = _divisible(source, f"{path}.k_norm", self.k_width)
        self.q_norm = _own(q_norm, heads.start * d, heads.count * d)
        self.k_norm = _own(k_norm, heads.kv_start * d, heads.kv_count * d)

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Of q ``[T, heads, head_dim]`` and k ``[T, kv_heads, head_dim]``."""
        wide_q, wide_k = q.flatten(1), k.flatten(1)
        if self.mesh.group is None:
            wide_q = self.ops.norm(wide_q, self.q_norm)
            wide_k = self.ops.norm(wide_k, self.k_norm)
        else:
            squares = wide_q.new_empty(len(wide_q), 2)
            squares[:, 0] = (wide_q * wide_q).sum(dim=1) / self.q_width
            squares[:, 1] = (wide_k * wide_k).sum(dim=1) / (self.k_width * self.kv_copies)
            shrink = (self.ops.all_reduce(squares, self.mesh.group) + self.q_norm.eps).rsqrt()
            assert self.q_norm.weight is not None and self.k_norm.weight is not None
            wide_q = wide_q * shrink[:, :1] * self.q_norm.weight
            wide_k = wide_k * shrink[:, 1:] * self.k_norm.weight
        return wide_q.view(q.shape), wide_k.view(k.shape)


def _divisible(source: Source, path: str, width: int) -> Norm:
    norm, mesh = source.norm(path, width), source.mesh
    if mesh.group is not None and norm.centred:
        raise AlignmentError(
            f"{path}: cannot split a LayerNorm over {width} features over {mesh.size} ranks: "
            "expected a tensor parallel size of 1"
        )
    return norm


def _own(norm: Norm, start: int, count: int) -> Norm:
    """What a rank has of a norm; if it has only some of the features, an RMSNorm."""
    assert norm.weight is not None
    if len(norm.weight) == count:
        return norm
    return Norm(norm.weight[start : start + count].contiguous(), norm.eps)
