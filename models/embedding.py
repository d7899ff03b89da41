"""The first matrix of a model, whose rows token ids select."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.norm import Norm
    from sdk.kernels.operators.ops import Ops
    from sdk.models.configs.config import ModelConfig
    from sdk.models.parallel import Mesh
    from sdk.models.parts import Adapters
    from sdk.quant.weight import Weight


class Embedding:
    """Rows of a weight by token id; this rank's range of the vocabulary begins at ``start``."""

    def __init__(
        self, weight: Weight, start: int, config: ModelConfig, mesh: Mesh, ops: Ops
    ) -> None:
        self.ops = ops
        self.weight = weight
        self.start = start
        self.vocab_size = config.vocab_size
        self.scale = config.embedding_scale
        self.norm: Norm | None = None
        self.mesh = mesh
        self.adapters: Adapters | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """ids int64 ``[T]`` -> float32 ``[T, hidden]``, times the model's scale, or its norm."""
        slots = None if self.adapters is None else self.ops.adapter_slots
        group, part = self.mesh.group, None
        if group is not None:
            part = self.start, self.vocab_size
        x = self.weight.rows(ids, part)
        if group is not None:
            self.ops.all_reduce(x, group)  # one rank's row plus zeros: exact
        if self.adapters is not None and slots is not None:
            self.adapters.add(ids, x, slots)  # every rank has adapters of the whole embedding
        x = self.ops.scale(x, self.scale)
        return x if self.norm is None else self.ops.norm(x, self.norm)
