"""Self-speculation: the model's own weights in fewer bits draft tokens for the model.

Both use the same keys and values. A draft writes those of its token where the model will write its
own: the step that verifies drafts runs every position from the first drafted one on, and each layer
writes before it reads. So the drafting weights need no pages of their own and no prompt is run
twice, and after a prefix hit, a swap or a preemption there is nothing to restore.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from sdk.engine.plan import StepRow
from sdk.engine.rank.eager import Eager
from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.kv_cache import KVCache
from sdk.engine.rank.recorded import Recorded
from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.engine.rank.step_batch import StepBatch
from sdk.engine.rank.strategy import Strategy
from sdk.kernels.graph import CaptureError
from sdk.kernels.ops import Ops
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh


class SelfDrafts:
    """The drafting weights of one rank."""

    def __init__(self, config: RunnerConfig, mesh: Mesh, ops: Ops, kv: KVCache) -> None:
        checkpoint = config.open_drafting_model()
        try:
            self.model = build_model(
                checkpoint,
                mesh,
                ops,
                max_model_len=config.max_model_len,
                config={**checkpoint.config, **config.hf_overrides},
            )
        finally:
            checkpoint.close()
        rows = config.max_num_seqs
        self._inputs = StepInputs(rows, rows, rows, config.max_model_len, config.page_size)
        self._passes = passes = ForwardPasses(self.model, kv, self._inputs, ops, mesh)
        self._strategy: Strategy = Eager(passes, self._inputs, "enforce_eager")
        if not config.enforce_eager:
            try:
                self._strategy = Recorded(passes, self._inputs)
            except CaptureError as error:
                self._strategy = Eager(passes, self._inputs, str(error))

    @property
    def native_seconds(self) -> float:
        """Seconds spent in native calls so far."""
        return self._passes.native_seconds

    def fill_in(self, rows: Sequence[StepRow], requests: Sequence[RankRequest]) -> list[StepRow]:
        """The rows of a plan with the tokens of their drafts, of which it has only the number.

        The requests must have the pages of their drafts.
        """
        drafted: list[list[int]] = [[] for _ in rows]
        step = 0
        while current := [index for index, row in enumerate(rows) if len(row.drafts) > step]:
            tokens = self._step(
                [rows[index].request_id for index in current],
                [requests[index] for index in current],
                [drafted[index] for index in current],
            )
            for index, token in zip(current, tokens, strict=True):
                drafted[index].append(token)
                requests[index].token_ids.append(token)
                requests[index].num_computed += 1
            step += 1
        for request, tokens in zip(requests, drafted, strict=True):
            if tokens:
                del request.token_ids[-len(tokens) :]
                request.num_computed -= len(tokens)
        self._inputs.forget()
        return [row._replace(drafts=tuple(x)) for row, x in zip(rows, drafted, strict=True)]

    def _step(
        self, names: list[str], requests: list[RankRequest], drafted: list[list[int]]
    ) -> list[int]:
        """The next draft of each request: drawn like its own token at that position."""
        batch = StepBatch([StepRow(name, 1, 1) for name in names], requests, range(len(names)))
        batch.draw_behind(drafted)
        (launched,) = self._strategy.launch(batch)
        found = launched.read_tokens()
        # a token of logits that are not finite is not accepted, but it must be one
        return [
            token if isfinite(best) else 0
            for token, best in zip(found.tokens, found.best, strict=True)
        ]
