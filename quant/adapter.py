"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): from loaders to models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sdk.kernels.dataclass import dataclass

if TYPE_CHECKING:
    from torch import Tensor


class LowRank(NamedTuple):
    """The update of one matrix: ``w`` becomes ``w + b @ a``.

    ``a [r, in]``, ``b [out, r]``, both of one float type; the scaling (``alpha / r``) is folded
    into ``b``. ``bias [out]``: the layer's bias with the adapter, in place of its own.
    """

    a: Tensor
    b: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Adapter:
    """The updates of an adapter by path: ``model.layers.0.self_attn.q_proj``, ``lm_head``, ...

    The paths are those of a plain Hugging Face checkpoint. For ``model.embed_tokens``, ``a`` is
    ``[r, hidden]`` and ``b`` is ``[vocab, r]``: the matrix has one row for each token.
    """

    name: str
    matrices: Mapping[str, LowRank]
