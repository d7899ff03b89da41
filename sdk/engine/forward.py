"""The model over a step's inputs, in each of the ways a step is run."""

from __future__ import annotations

import torch
from torch import Tensor

from sdk.engine.inputs import StepInputs
from sdk.engine.kv_cache import KVCache
from sdk.engine.run_ahead import Decoded
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.graph import Cut, Graph
from sdk.kernels.ops import Ops
from sdk.models.decoder import CausalLM
from sdk.models.parallel import Mesh


class ForwardPasses:
    """One rank's."""

    def __init__(
        self, model: CausalLM, kv: KVCache, inputs: StepInputs, ops: Ops, mesh: Mesh
    ) -> None:
        self._model = model
        self._kv = kv
        self._inputs = inputs
        self._ops = ops
        self._samples = mesh.rank == 0

    def hidden(self, batch: AttentionBatch) -> Tensor:
        """Hidden states of the first tokens of the inputs."""
        self._ops.find_places(batch)
        return self._model(self._inputs.token_ids[: batch.num_tokens], batch, self._kv.layers)

    def logits(self, hidden: Tensor, outputs: int) -> Tensor:
        """Of the first ``outputs`` rows wanted, from which tokens are drawn as the inputs say."""
        if not outputs:
            return hidden[:0]
        inputs = self._inputs
        logits = self._model.logits(self._ops.select_rows(hidden, inputs.output_rows[:outputs]))
        if self._samples:
            self._ops.sample_into(logits, inputs.sampling)
        return logits

    def record(self) -> Graph[tuple[Tensor, Tensor]]:
        """A step as large as the largest there will be; smaller ones use its first rows.

        :raises CaptureError: where it cannot be recorded.
        """
        inputs = self._inputs
        tokens, outputs = len(inputs.token_ids), len(inputs.output_rows)

        def forward() -> tuple[Tensor, Tensor]:
            hidden = self.hidden(inputs.batch)
            return hidden, self.logits(hidden, outputs)

        with torch.inference_mode():
            return self._ops.capture(forward, tokens=tokens, outputs=outputs, requests=outputs)

    def decode(self, size: int, shared: bool) -> Decoded:
        """The decode step of ``size`` rows, as :class:`~sdk.engine.run_ahead.RunAhead` wants it."""
        inputs = self._inputs
        with torch.inference_mode():
            hidden = self.hidden(inputs.decoding(size, shared))
            rows = self._ops.select_rows(hidden, inputs.output_rows[:size])
            logits = self._model.logits(rows)
            return hidden, logits, self._ops.sample_rows(logits, inputs.draws[:size])

    def pieces(self, size: int, cut: Cut) -> Tensor:
        """The first ``size`` tokens, as :class:`~sdk.kernels.gpu.graphs.PieceGraphs` wants them."""
        with torch.inference_mode(), self._ops.cut_at_attention(cut):
            return self.hidden(self._inputs.in_pieces(size))
