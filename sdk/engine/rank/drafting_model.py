"""Weights that draft: the model's own in fewer bits, or a smaller model.

The model's own weights use its keys and values. A draft writes those of its token where the model
will write its own: the step that verifies drafts runs every position from the first drafted one on,
and each layer writes before it reads. So they need no pages, and after a prefix hit, a swap or a
preemption there is nothing to restore. A smaller model has keys and values of its own
(:class:`~sdk.engine.rank.drafting_pages.DraftingPages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from sdk.engine.plan import StepPlan, StepRow
from sdk.engine.rank.drafting_pages import DraftingPages
from sdk.engine.rank.eager import Eager
from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.key_centres import centre_keys
from sdk.engine.rank.kv_cache import KVCache, cache_of_drafts
from sdk.engine.rank.recorded import Recorded
from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.runner_config import DraftingWeights, RunnerConfig
from sdk.engine.rank.step_batch import StepBatch
from sdk.engine.rank.strategy import Strategy
from sdk.kernels.graph import CaptureError
from sdk.kernels.ops import Ops
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh

#: Known tokens that the step of the first draft may run: the last one, and the one before it, whose
#: draft was the last of a step and was accepted without having been run.
_WITH_DRAFT = 2


class _Part(NamedTuple):
    """Tokens ``begin`` to ``end`` of a request."""

    request_id: str
    request: RankRequest
    begin: int
    end: int


class DraftingModel:
    """The drafting weights of an engine, all of them on rank 0."""

    def __init__(
        self, weights: DraftingWeights, config: RunnerConfig, ops: Ops, shared: KVCache
    ) -> None:
        checkpoint, mesh = weights.open(), Mesh()
        try:
            self.model = build_model(
                checkpoint,
                mesh,
                ops,
                max_model_len=weights.max_model_len,
                config={**checkpoint.config, **weights.hf_overrides},
            )
        finally:
            checkpoint.close()
        rows = config.max_num_seqs
        self._most, kv = _WITH_DRAFT * rows, shared
        self._pages: DraftingPages | None = None
        if weights.has_pages:
            kv = cache_of_drafts(config, self.model.config, ops)
            centre_keys(kv, self.model)
            self._pages = DraftingPages(kv, config.page_size)
            self._most = max(self._most, config.max_num_batched_tokens)
        self._longest = weights.max_model_len
        self._ops = ops
        self._inputs = StepInputs(self._most, rows, rows, config.max_model_len, config.page_size)
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

    def close(self) -> None:
        """Free the pages. Idempotent."""
        if self._pages is not None:
            self._pages.kv.close()

    def update(self, plan: StepPlan) -> None:
        """Apply the moves of a plan, and forget the requests that it drops or starts."""
        if self._pages is not None:
            self._pages.move(plan.copies, self._ops)
            self._pages.forget(plan.dropped)
            self._pages.forget(start.request_id for start in plan.started)

    def vacate(self, pages: Sequence[int]) -> None:
        """Return the memory of pages that are not in use."""
        if self._pages is not None:
            self._pages.vacate(pages)

    def run_prompts(self, rows: Sequence[StepRow], requests: Sequence[RankRequest]) -> None:
        """Run the parts of prompts that are in a plan, so that the first drafts need not wait for
        the whole prompt; and in front of drafts the tokens that were missed.

        Tokens are missed after a prefix hit, a swap, or steps without drafts.
        """
        if self._pages is None:
            return
        parts = []
        for row, request in zip(rows, requests, strict=True):
            end = request.num_computed + row.num_scheduled_tokens - len(row.drafts)
            if row.drafts:
                end -= _WITH_DRAFT  # the first draft's step runs the last ones
            elif row.num_scheduled_tokens == 1 or not _drafts(request):
                continue
            if end <= self._longest:
                begin = self._pages.num_held(row.request_id, request)
                parts.append(_Part(row.request_id, request, begin, end))
        while parts := [part for part in parts if part.begin < part.end]:
            left, now, later = self._most, [], []
            for part in parts:
                middle = min(part.end, part.begin + left)
                left -= middle - part.begin
                now.append(part._replace(end=middle))
                later.append(part._replace(begin=middle))
            self._run([part for part in now if part.begin < part.end], self._pages)
            parts = later

    def _run(self, parts: Sequence[_Part], pages: DraftingPages) -> None:
        """Write keys and values."""
        for part in parts:
            pages.begin_to_write(part.request_id, part.request, part.end)
        known = [part.request.num_computed for part in parts]
        for part in parts:
            part.request.num_computed = part.begin
        rows = [StepRow(part.request_id, part.end - part.begin) for part in parts]
        batch = StepBatch(rows, [part.request for part in parts], range(len(parts)))
        for launched in self._strategy.launch(batch):
            launched.read_tokens()
        for part, num_computed in zip(parts, known, strict=True):
            part.request.num_computed = num_computed
            pages.hold(part.request_id, part.end)

    def draft(self, rows: Sequence[StepRow], requests: Sequence[RankRequest]) -> list[StepRow]:
        """The rows of a plan with the tokens of their drafts, of which it has only the number.

        The requests must have the pages of their drafts.
        """
        drafting = [index for index, row in enumerate(rows) if row.drafts]
        drafted: list[list[int]] = [[] for _ in rows]
        begins = {index: self._first_to_run(rows[index], requests[index]) for index in drafting}
        step = 0
        while current := [index for index in drafting if len(rows[index].drafts) > step]:
            parts = []
            for index in current:
                request, end = requests[index], len(requests[index].token_ids)
                parts.append(_Part(rows[index].request_id, request, begins[index], end))
                begins[index] = end
            tokens = self._step(parts, [drafted[index] for index in current])
            for index, token in zip(current, tokens, strict=True):
                drafted[index].append(token)
                requests[index].token_ids.append(token)
            step += 1
        for index in drafting:
            request, tokens = requests[index], drafted[index]
            del request.token_ids[-len(tokens) :]
            request.num_computed = len(request.token_ids) - 1
            if self._pages is not None:
                self._pages.hold(rows[index].request_id, len(request.token_ids), tokens[:-1])
        self._inputs.forget()
        return [row._replace(drafts=tuple(x)) for row, x in zip(rows, drafted, strict=True)]

    def _first_to_run(self, row: StepRow, request: RankRequest) -> int:
        """The first token that the first draft's step runs."""
        if self._pages is None:
            return request.num_computed
        begin = self._pages.num_held(row.request_id, request)
        end = len(request.token_ids) + len(row.drafts) - 1
        self._pages.begin_to_write(row.request_id, request, end)
        return begin

    def _step(self, parts: Sequence[_Part], drafted: Sequence[Sequence[int]]) -> list[int]:
        """The next draft of each request: drawn like its own token at that position."""
        for part in parts:
            part.request.num_computed = part.begin
        rows = [StepRow(part.request_id, part.end - part.begin, 1) for part in parts]
        batch = StepBatch(rows, [part.request for part in parts], range(len(parts)))
        batch.draw_behind(drafted)
        (launched,) = self._strategy.launch(batch)
        found = launched.read_tokens()
        # a token of logits that are not finite is not accepted, but it must be one
        return [
            token if isfinite(best) else 0
            for token, best in zip(found.tokens, found.best, strict=True)
        ]


def _drafts(request: RankRequest) -> bool:
    """Whether it may get drafts when its prompt has run."""
    return request.start.kind == "generate" and request.start.negative_of is None
