"""One rank: a plan becomes tensors, the model runs, logits become tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from sdk.engine.pages.ladder_pool import moves_to_lowest_tier
from sdk.engine.plan import RequestStart, Sampled, StepPlan, StepResult, StepRow
from sdk.engine.rank.device_graphs import DeviceGraphs
from sdk.engine.rank.eager import Eager
from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.key_centres import centre_keys
from sdk.engine.rank.kv_cache import cache_of_rank
from sdk.engine.rank.recorded import Recorded
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.engine.rank.running import Running
from sdk.engine.rank.strategy import Repeat, Run, Strategy
from sdk.engine.rank.work import Scored, Work, guided_rows, score_prompt
from sdk.errors import RequestError
from sdk.executors.base import Pending
from sdk.kernels.graph import CaptureError
from sdk.memory.demand import scored_rows
from sdk.memory.machine import release_free_memory
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.params import SamplingParams
from sdk.quant.checkpoint import Checkpoint
from sdk.sampling.sampler import Sampler

#: Steps run again before requests hear of their tokens, at the next page boundary.
_MOST_LATE = 64


class ModelRunner:
    """Builds and runs the model of one rank. Everything that touches tensors happens here.

    Close it to give back weights, pages and threads.
    """

    def __init__(
        self, config: RunnerConfig, mesh: Mesh, checkpoint: Checkpoint | None = None
    ) -> None:
        self._mesh = mesh
        self._requests: dict[str, Running] = {}
        #: The step launched last, and the same rows again.
        self._last: _Step | None = None
        self._again: _StepsAgain | None = None
        self.unused_tensors: list[str] = []
        with contextlib.ExitStack() as undo:
            if checkpoint is None:
                checkpoint = config.open_model()
            undo.callback(checkpoint.close)
            self.ops = config.open_ops()
            undo.callback(self.ops.close)
            self.model = build_model(
                checkpoint,
                mesh,
                self.ops,
                max_model_len=config.max_model_len,
                config={**checkpoint.config, **config.hf_overrides},
            )
            self.unused_tensors = checkpoint.unused()
            facts = self.model.config
            self.kv = cache_of_rank(config, facts, mesh, self.ops)
            undo.callback(self.kv.close)
            centre_keys(self.kv, self.model)
            self.sampler = Sampler(facts.vocab_size, self.ops)
            self._inputs = StepInputs(
                config.max_num_batched_tokens,
                config.max_num_seqs,
                config.max_num_seqs * (1 + config.max_draft_tokens),
                config.max_model_len,
                config.page_size,
                self.ops.device,
                find_shared=self.ops.shares_keys,
            )
            self._passes = ForwardPasses(self.model, self.kv, self._inputs, self.ops, mesh)
            self.strategy: Strategy = Eager(self._passes, self._inputs, "enforce_eager")
            #: Whether steps are to be recorded.
            self.records = False
            if not config.enforce_eager:
                self.record()
            undo.pop_all()
        checkpoint.close()
        release_free_memory()

    def close(self) -> None:
        """Give everything back. Idempotent; the runner must not be used afterwards."""
        self._requests.clear()
        self._last = self._again = None
        self._inputs.forget()
        self.forget_graphs()
        self.kv.close()
        self.ops.close()
        self.__dict__.pop("model", None)

    def forget_graphs(self) -> None:
        """Run what is recorded no more, and give back what it holds."""
        self._last = self._again = None
        self.strategy = Eager(self._passes, self._inputs, "enforce_eager")

    def record(self) -> None:
        """Run steps in the fastest way that device and model allow, recorded anew."""
        self.records = True
        self.forget_graphs()
        recorder = self.ops.recording.graph_recorder()
        if recorder is not None:
            self.strategy = DeviceGraphs(self._passes, self._inputs, recorder)
            return
        try:
            self.strategy = Recorded(self._passes, self._inputs)
        except CaptureError as error:
            self.strategy = Eager(self._passes, self._inputs, str(error))

    @property
    def ahead(self) -> tuple[int, int]:
        """Steps launched before the tokens of the last one are known, and batches in flight."""
        return self.strategy.steps_ahead, self.strategy.batches_in_flight

    @property
    def native_seconds(self) -> float:
        """Spent in native calls so far."""
        return self._passes.native_seconds

    def launch(self, plan: StepPlan) -> Pending:
        """Begin one step; see :class:`sdk.engine.plan.StepResult` for what comes of it.

        Results are read in the order of the launches.
        """
        again = self._again
        if again is not None:
            if plan.rows is again.rows and not plan.copies and again.ready:
                return again.launch(plan)
            self._again = None
            again.settle()
        if self._last is not None:
            self._last.release(plan.dropped)
        unwritten = self._update(plan)
        running = [self._requests[row.request_id] for row in plan.rows]
        runs: Sequence[Run] = ()
        if plan.rows:
            work = Work(plan.rows, running, range(len(running)))
            runs = self.strategy.launch(work)
        for row, request in zip(plan.rows, running, strict=True):
            request.num_computed += row.num_tokens - len(row.drafts)
        self._last = _Step(self, plan, runs, unwritten)
        return self._last

    def _update(self, plan: StepPlan) -> dict[int, str]:
        """Learn who came, went and got pages; the slots of the swap file that took no page."""
        for request_id, token_ids in plan.sampled:
            if (request := self._requests.get(request_id)) is not None:
                request.accept(token_ids)
        self.kv.copy(plan.copies, self.ops)
        self._inputs.follow(self._requests.values(), plan.copies)
        for request_id, pages in plan.new_pages:
            self._requests[request_id].pages.extend(pages)
        if plan.dropped:
            self._inputs.forget()
        for request_id in plan.dropped:
            self._requests.pop(request_id, None)
        for start in plan.started:
            request = self._requests[start.request_id] = Running(start)
            if start.negative_of is not None:
                self._requests[start.negative_of].negative = request
        return dict(self.kv.unwritten()) if plan.copies and self.kv.has_swap_file else {}

    def finish(self, step: _Step) -> StepResult:
        """Wait for a step; its requests take what was sampled."""
        plan = step.plan
        result = _Results([()] * len(plan.rows), {}, {}, {}, {})
        for run in step.runs:
            work = run.work
            # torch changes or reads what was made in this mode
            special = work.negatives or work.scored
            with torch.inference_mode() if special else contextlib.nullcontext():
                if work.draws and self._mesh.rank == 0:
                    self._sample(run, result)
                for one in work.scored:
                    self._score(one, run, result)
        if len(step.runs) == 1 and step is self._last and self._mesh.rank == 0:
            self._plan_repeat(plan, step.runs[0].work, result)
        return StepResult(plan.step_id, *result, step.unwritten)

    def _sample(self, run: Run, result: _Results) -> None:
        """Have the requests of a run take their tokens, and drafts as far as they are right."""
        work = run.work
        begin = perf_counter()
        chosen = run.chosen()
        self._passes.native_seconds += perf_counter() - begin
        if work.negatives:  # what was drawn is not guided yet
            outcomes = self.sampler.sample(guided_rows(work, run.logits), work.draws)
        else:
            outcomes = self.sampler.collect(run.logits, work.draws, chosen)
        for place, row, request, first in work.sampled:
            outcome = outcomes[first]
            if isinstance(outcome, str):
                result.errors[row.request_id] = outcome
                continue
            found = [outcome]
            for draft, outcome in zip(row.drafts, outcomes[first + 1 :], strict=False):
                if draft != found[-1].token_id or isinstance(outcome, str):
                    break  # the next step says the same of a row that is not finite
                found.append(outcome)
            if not request.state.plain:
                result.details[row.request_id] = found
            tokens = result.tokens[place] = [one.token_id for one in found]
            request.accept(tokens)

    def _score(self, one: Scored, run: Run, result: _Results) -> None:
        """Log-probabilities of the prompt tokens that follow those just run; an embedding."""
        start, hidden = one.request.start, run.hidden[one.begin : one.end]
        request_id = start.request_id
        if start.params.prompt_logprobs is not None:
            try:
                if scored := score_prompt(self.sampler, one, hidden, self._logits):
                    result.prompt_logprobs[request_id] = scored
            except RequestError as error:  # its logits are not finite
                result.errors[request_id] = str(error)
        if start.kind == "embed" and one.ends:
            if bool(hidden[-1].isfinite().all()):
                vector = torch.nn.functional.normalize(hidden[-1], dim=0)
                result.hidden[request_id] = vector.tolist()
            else:
                result.errors[request_id] = "the model's hidden state is not finite"

    def _plan_repeat(self, plan: StepPlan, work: Work, result: _Results) -> None:
        """Prepare for the same rows once more."""
        if work.plain and work.decodes and not result.errors:
            repeat = self.strategy.repeat(work)
            if repeat is not None:
                tokens = [found[0] for found in result.tokens]
                self._again = _StepsAgain(self, plan.rows, work, repeat, tokens)

    def extend(self, plan: StepPlan, work: Work) -> None:
        """Hand out new pages to requests whose rows stay."""
        for request_id, pages in plan.new_pages:
            self._requests[request_id].pages.extend(pages)
        self._inputs.wait()
        for row, request in enumerate(work.running):
            self._inputs.write_pages(row, request)

    def _logits(self, hidden: Tensor, adapter: int = -1) -> Iterator[Tensor]:
        """The head over rows of one adapter, some at a time; each is valid until the next."""
        rows = scored_rows(self.model.config.vocab_size)
        for begin in range(0, len(hidden), rows):
            part = hidden[begin : begin + rows]
            slots = None
            if adapter >= 0:
                slots = torch.full((len(part),), adapter, dtype=torch.int32, device=part.device)
            with torch.inference_mode():
                self.ops.adapter_slots = slots
                logits = self.model.logits(part)
            yield logits
            del logits  # its memory is the next one's

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """What the model expects behind each token of a prompt, run in steps as a request is.

        Float32 ``[n, vocab]`` for the next ``n <= 128`` tokens, valid until the next is asked for.
        No request may be in the runner; the pages of earlier ones are written over. Those of a
        ladder are as low as they may be when a step begins.
        """
        pages = -(-len(token_ids) // self._inputs.batch.page_size)
        places, count = tuple(range(1, pages + 1)), len(token_ids)
        start = RequestStart("prompt", tuple(token_ids), count, 0, places, SamplingParams())
        request = Running(start)
        for begin in range(0, len(token_ids), len(self._inputs.token_ids)):
            moves = moves_to_lowest_tier(request.pages, begin, self.kv.spec, self.kv.keep)
            self.kv.copy(moves, self.ops)
            self._inputs.follow([request], moves)
            count = min(len(token_ids) - begin, len(self._inputs.token_ids))
            (run,) = self.strategy.launch(Work([StepRow("prompt", count)], [request], [0]))
            request.num_computed += count
            yield from self._logits(run.hidden[:count])
        self._inputs.forget()


class _Results(NamedTuple):
    """What becomes of a step, see :class:`sdk.engine.plan.StepResult`."""

    tokens: list[Sequence[int]]
    details: dict[str, Sequence[Sampled]]
    prompt_logprobs: dict[str, tuple[Sampled, ...]]
    hidden: dict[str, list[float]]
    errors: dict[str, str]


class _Step:
    """A step that was launched."""

    __slots__ = ("_result", "_runner", "plan", "runs", "unwritten")

    def __init__(
        self, runner: ModelRunner, plan: StepPlan, runs: Sequence[Run], unwritten: dict[int, str]
    ) -> None:
        self._runner = runner
        self._result: StepResult | None = None
        self.plan = plan
        self.runs = runs
        self.unwritten = unwritten

    def result(self) -> StepResult:
        """Wait for it."""
        if self._result is None:
            self._result = self._runner.finish(self)
            self.runs = ()
        return self._result

    def release(self, dropped: Sequence[str]) -> None:
        """Read now what the next launch writes over: hidden states and logits. Not of a step that
        was given up: all its requests are ``dropped`` then.
        """
        if all(run.work.plain for run in self.runs):
            return
        if not all(row.request_id in dropped for row in self.plan.rows):
            self.result()


class _StepsAgain:
    """The rows of the last step once more, as often as nothing else happens.

    Their requests hear of the tokens when something does; at once only sampling states whose next
    draw depends on them.
    """

    __slots__ = ("_following", "_late", "_plan", "_repeat", "_runner", "_tokens", "_work", "rows")

    def __init__(
        self,
        runner: ModelRunner,
        rows: Sequence[StepRow],
        work: Work,
        repeat: Repeat,
        tokens: list[int],
    ) -> None:
        self.rows = rows
        self._runner = runner
        self._work = work
        self._repeat = repeat
        self._tokens = tokens  # of the last step
        self._late: list[list[int]] = []  # of steps of which the requests do not know
        self._following = [
            (row, request.state)
            for row, request in enumerate(work.running)
            if not request.state.foreseeable
        ]
        self._plan: StepPlan

    @property
    def ready(self) -> bool:
        """Whether it can be launched now."""
        return self._repeat.ready

    def launch(self, plan: StepPlan) -> _StepsAgain:
        """The same rows, of which some may have new pages."""
        if plan.new_pages:
            self._runner.extend(plan, self._work)
            if len(self._late) >= _MOST_LATE:
                self.settle()
        self._plan = plan
        self._repeat.launch(self._tokens, len(self._late))
        return self

    def result(self) -> StepResult:
        """A token for each row, or why there is none."""
        tokens = self._repeat.tokens()
        if tokens is None:
            self.settle()
            for request in self._work.running:
                request.num_computed += 1
            step = _Step(self._runner, self._plan, [self._repeat.run()], {})
            return self._runner.finish(step)
        self._tokens = tokens
        self._late.append(tokens)
        for row, state in self._following:
            state.append((tokens[row],))
        return StepResult(self._plan.step_id, [(token,) for token in tokens])

    def settle(self) -> None:
        """Tell the requests."""
        late, self._late = self._late, []
        if not late:
            return
        following = {row for row, _ in self._following}
        for row, request in enumerate(self._work.running):
            tokens = [step[row] for step in late]
            request.token_ids += tokens
            request.num_computed += len(tokens)
            if row not in following:
                request.state.append(tokens)
