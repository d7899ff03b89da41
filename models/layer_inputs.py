"""Embeddings that a token has for each layer (Gemma 3n and 4, "per-layer embeddings").

A table has a row of ``layers * features`` numbers for each token. The row and a projection of the
token's embedding, which has a norm over the features of each layer, are averaged; a layer gates its
part by what comes out of it, projects it back and adds it.

torch is imported for type checkers only: see :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sdk.quant.errors import AlignmentError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.models.mixers.attention import Step
    from sdk.models.source import Source


class LayerInputs:
    """Makes the inputs of all layers, float32 ``[T, layers * features]``.

    :raises AlignmentError: with stages: only the first one knows the tokens.
    """

    def __init__(self, source: Source) -> None:
        c = source.config
        if source.mesh.stages > 1:
            raise AlignmentError(
                f"pipeline_parallel_size: expected 1, found {source.mesh.stages}: the layers of "
                f"{c.model_type} have embeddings of their own, which only the first stage knows"
            )
        self.ops = source.ops
        self.features = c.layer_inputs
        width = c.num_layers * c.layer_inputs
        # The tokens after the last row of a shorter table have zeros, which only memory gives.
        self.part = (0, c.vocab_size) if c.layer_rows else None
        rows = c.layer_rows or c.vocab_size
        self.table = source.table("model.embed_tokens_per_layer", rows, width=width)
        path = "model.per_layer_model_projection"
        self.projection = source.matrix(path, width, c.hidden_size)
        self.norm = source.norm("model.per_layer_projection_norm", c.layer_inputs)
        self.scale = c.hidden_size**-0.5

    def __call__(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """ids int64 ``[T]``; embeddings float32 ``[T, hidden]``, times the model's scale. Tokens
        that are given as embeddings have the row of token 0, as images have in llama.cpp."""
        y = self.ops.scale(self.projection(embeddings), self.scale)
        y = self.ops.norm(y.view(-1, self.features), self.norm).view(y.shape)
        if not ids.is_floating_point():
            rows = self.ops.scale(self.table.rows(ids, self.part), math.sqrt(self.features))
            y = self.ops.add(y, rows)
        return self.ops.scale(y, math.sqrt(0.5))


class LayerInput:
    """What one layer does with its part."""

    def __init__(self, source: Source, path: str, index: int) -> None:
        c = source.config
        self.ops, self.activation = source.ops, c.activation
        self.part = slice(index * c.layer_inputs, (index + 1) * c.layer_inputs)
        gate = f"{path}.per_layer_input_gate"
        self.gate = source.matrix(gate, c.layer_inputs, c.hidden_size)
        back = f"{path}.per_layer_projection"
        self.projection = source.matrix(back, c.hidden_size, c.layer_inputs)
        self.norm = source.norm(f"{path}.post_per_layer_input_norm")

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """What is added to x float32 ``[T, hidden]``."""
        assert step.inputs is not None
        gated = self.ops.activation(self.gate(x), self.activation)
        gated = self.ops.gate(gated, step.inputs[:, self.part], "linear")
        return self.ops.norm(self.projection(gated), self.norm)
