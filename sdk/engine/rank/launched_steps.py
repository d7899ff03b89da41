"""Steps that a rank has launched: their results, and how the last one is run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sdk.engine.plan import StepPlan, StepResult
from sdk.engine.rank.step_batch import StepBatch
from sdk.engine.rank.strategy import LaunchedBatch, Repeater
from sdk.structured.library import GrammarError

if TYPE_CHECKING:
    from sdk.engine.rank.drafting_model import DraftingModel
    from sdk.engine.rank.images import Encoded

#: Requests get deferred tokens at the next page boundary after this many repeated steps.
_MAX_DEFERRED = 64


class StepRunner(Protocol):
    """What these steps need of the rank that launches them (``ModelRunner``)."""

    max_drafts: int
    drafting: DraftingModel | None

    def finish(self, step: LaunchedStep) -> StepResult:
        """Wait for a step and append the sampled tokens to its requests."""

    def add_pages(self, plan: StepPlan, batch: StepBatch) -> None:
        """Add a plan's new pages and frames to requests whose rows stay the same."""

    def take_mask_seconds(self) -> float:
        """How long the last step waited for masks."""

    def set_mask_tasks(self, batch: StepBatch) -> None:
        """Have the masks of a batch's structured answers computed in its next step."""


class LaunchedStep:
    """A step that was launched."""

    __slots__ = ("_result", "_runner", "encoded", "launched", "plan", "unwritten")

    def __init__(
        self,
        runner: StepRunner,
        plan: StepPlan,
        launched: Sequence[LaunchedBatch],
        unwritten: dict[int, str],
        encoded: Encoded | None = None,
    ) -> None:
        self._runner = runner
        self._result: StepResult | None = None
        self.plan = plan
        self.launched = launched
        self.unwritten = unwritten
        self.encoded = encoded

    def result(self) -> StepResult:
        """Wait for the step."""
        if self._result is None:
            self._result = self._runner.finish(self)
            self.launched = ()
        return self._result

    def read_results(self, dropped: Sequence[str]) -> None:
        """Read hidden states and logits before the next launch overwrites them.

        If all requests are ``dropped``, the step was given up and is not read.
        """
        if all(launched.batch.plain for launched in self.launched):
            return
        if not all(row.request_id in dropped for row in self.plan.rows):
            self.result()


class RepeatedSteps:
    """Runs the rows of the last step again, as long as plans have the same rows.

    Tokens are deferred: requests get them when a plan has other rows, or at a page boundary after
    ``_MAX_DEFERRED`` steps. Sampling states whose next draw depends on a token get it at once.
    """

    __slots__ = (
        "_batch",
        "_deferred",
        "_dependent",
        "_drafting",
        "_ones",
        "_repeater",
        "_runner",
        "_structured",
        "_tokens",
        "plan",
    )

    def __init__(
        self,
        runner: StepRunner,
        plan: StepPlan,
        batch: StepBatch,
        repeater: Repeater,
        tokens: list[int],
    ) -> None:
        #: The last plan that was launched. Launched again, it brings nothing new.
        self.plan = plan
        self._runner = runner
        self._batch = batch
        self._repeater = repeater
        self._tokens = tokens  # of the last step
        self._deferred: list[list[int]] = []  # by step: tokens that the requests do not have yet
        self._dependent = [
            (row, request.state)
            for row, request in enumerate(batch.requests)
            if not request.state.foreseeable
        ]
        self._structured = [
            (row, request.spec.request_id, request.structured)
            for row, request in enumerate(batch.requests)
            if request.structured is not None
        ]
        #: What reads hidden states, and that each row counts.
        drafting = runner.drafting
        self._drafting = drafting if drafting is not None and drafting.reads_hidden else None
        self._ones = [1] * len(plan.rows)

    @property
    def ready(self) -> bool:
        """Whether the next step can be launched now."""
        drafting = self._drafting
        return self._repeater.ready and (drafting is None or not drafting.must_run)

    def launch(self, plan: StepPlan) -> RepeatedSteps:
        """Launch the same rows, some of which may have new pages."""
        if plan is not self.plan:
            if plan.new_pages or plan.new_frames:
                self._runner.add_pages(plan, self._batch)
                if len(self._deferred) >= _MAX_DEFERRED:
                    self.apply_deferred()
            self.plan = plan
        self._repeater.launch(self._tokens, len(self._deferred))
        return self

    def result(self) -> StepResult:
        """Wait for the step: a token for each row, or the reason why there is none."""
        tokens = self._repeater.tokens()
        if tokens is None:
            self.apply_deferred()
            for request in self._batch.requests:
                request.num_computed += 1
            step = LaunchedStep(self._runner, self.plan, [self._repeater.launched()], {})
            return self._runner.finish(step)
        results: dict[str, Any] = self._follow_structures(tokens) if self._structured else {}
        if self._drafting is not None:
            self._drafting.keep(self._repeater.launched(), self._ones)
        self._tokens = tokens
        self._deferred.append(tokens)
        for row, state in self._dependent:
            state.append((tokens[row],))
        return StepResult(self.plan.step_id, [(token,) for token in tokens], **results)

    def _follow_structures(self, tokens: list[int]) -> dict[str, Any]:
        """Put the tokens of structured answers in the place of those that were drawn.

        Their mask tasks are the same in every step, except where reasoning begins or ends. Returns
        fields of the step's result.
        """
        complete, forced, errors = {}, {}, {}
        most, changed = self._runner.max_drafts, False
        for row, request_id, structured in self._structured:
            phase = structured.phase
            try:
                tokens[row] = structured.accept(tokens[row])
            except GrammarError as error:
                errors[request_id] = f"structured_outputs: {error}"
                continue
            changed |= structured.phase is not phase
            if structured.complete:
                complete[request_id] = structured.closed
            elif most:
                forced[request_id] = structured.forced(most)
        if changed:
            self._runner.set_mask_tasks(self._batch)
        waited = self._runner.take_mask_seconds()
        return {"complete": complete, "forced": forced, "errors": errors, "mask_seconds": waited}

    def apply_deferred(self) -> None:
        """Append the deferred tokens to the requests."""
        deferred, self._deferred = self._deferred, []
        if not deferred:
            return
        dependent = {row for row, _ in self._dependent}
        for row, request in enumerate(self._batch.requests):
            tokens = [step[row] for step in deferred]
            request.token_ids += tokens
            request.num_computed += len(tokens)
            if row not in dependent:
                request.state.append(tokens)
