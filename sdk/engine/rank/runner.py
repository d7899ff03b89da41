"""One rank: a plan becomes tensors, the model runs, logits become tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from sdk.api.errors import RequestError
from sdk.api.logprobs import Sampled
from sdk.api.params import SamplingParams
from sdk.engine.executor import Pending
from sdk.engine.pages.tiered_pool import moves_to_lowest_tier
from sdk.engine.plan import RequestStart, SequenceSpec, StepPlan, StepResult, StepRow
from sdk.engine.rank.eager import Eager
from sdk.engine.rank.experts import MovingExperts, all_record
from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.key_centres import centre_keys
from sdk.engine.rank.kv_cache import cache_of_rank
from sdk.engine.rank.launched_steps import LaunchedStep, RepeatedSteps
from sdk.engine.rank.pooling import as_numbers
from sdk.engine.rank.rank_model import RankModel
from sdk.engine.rank.recorded import Recorded
from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.engine.rank.step_batch import (
    Results,
    ScoredRow,
    StepBatch,
    accepted,
    guided_logits,
    num_right,
    score_prompt,
)
from sdk.engine.rank.strategy import LaunchedBatch, Strategy
from sdk.kernels.errors import CaptureError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.system import SYSTEM
from sdk.models.decoder import Decoder
from sdk.models.parallel import Mesh
from sdk.sampling.sampler import Sampler
from sdk.structured.library import GrammarError

if TYPE_CHECKING:
    from sdk.engine.rank.adapters import RankAdapters
    from sdk.engine.rank.drafting_model import DraftingModel
    from sdk.engine.rank.images import ImageCache, ImageInputs


class ModelRunner:
    """The model of one rank. All work with tensors is here. ``close`` frees weights and threads."""

    #: Experts on their way to this rank.
    moving: MovingExperts | None = None

    def __init__(self, config: RunnerConfig, mesh: Mesh, weights: RankModel | None = None) -> None:
        """``weights``: closed with the runner (default: they are read now)."""
        self.config = config
        self.mesh = mesh = config.mesh_of(mesh)
        self._requests: dict[str, RankRequest] = {}
        #: The last step that was launched from a plan, and what repeats it.
        self._last_step: LaunchedStep | None = None
        self._repeated: RepeatedSteps | None = None
        with contextlib.ExitStack() as undo:
            self.weights = weights = weights or RankModel.load(config, mesh)
            self.ops, self.model = weights.ops, weights.model
            #: See :class:`sdk.executors.local.Runner`.
            self.entered = self.ops.entered
            undo.callback(self.ops.close)
            with self.ops.entered():
                self._build(weights, undo)
            undo.pop_all()
        SYSTEM.trim_heap()

    def _build(self, weights: RankModel, undo: contextlib.ExitStack) -> None:
        """Everything around the model; ``undo`` is what frees it."""
        config, mesh, facts = self.config, self.mesh, self.model.config
        #: The slots of adapters, if requests may have any.
        self.adapters = self._make_adapters(config) if config.adapter_slots else None
        #: The classes of the checkpoint, if it has any.
        self.classifier, self._score_head = weights.classifier, weights.score_head
        self.unused_tensors = weights.unused_tensors
        self.kv = cache_of_rank(config, facts, mesh, self.ops)
        undo.callback(self.kv.close)
        centre_keys(self.kv, self.model)
        self.sampler = Sampler(facts.vocab_size, self.ops)
        #: The most draft tokens of a step.
        self.max_drafts = config.max_draft_tokens
        #: The rows of images, on ranks that embed tokens.
        self.images: ImageCache | None = None
        if weights.tower is not None:
            from sdk.engine.rank.images import ImageCache

            self.images = ImageCache(weights.tower, config.image_rows, self.ops)
        heads, spec = mesh.heads(facts.num_heads, facts.num_kv_heads).count, self.kv.spec
        self._inputs = StepInputs(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            config.max_num_seqs + config.max_draft_tokens,
            config.max_model_len,
            config.page_size,
            self.ops.device,
            find_shared=self.ops.shares_keys,
            work=self.ops.work_shape(config.max_num_seqs, heads, spec.kv_heads, spec.head_dim),
            token_types=facts.token_types > 0,
            windows=len(spec.windows),
            states=config.num_states > 0,
            images=self._image_inputs(),
        )
        if self.images is not None and isinstance(self.model, Decoder) and not self.images.dual:
            self.model.images = self.images.rows
        mesh.reserve(4 * config.max_num_batched_tokens * facts.hidden_size)
        self._passes = ForwardPasses(self.model, self.kv, self._inputs, self.ops, mesh)
        self._passes.lockstep = weights.lockstep
        self.strategy: Strategy = Eager(self._passes, self._inputs, "enforce_eager")
        #: The weights that draft, if there are any: on rank 0, which samples.
        self.drafting: DraftingModel | None = None
        self._is_drafted = config.drafting is not None
        if config.drafting is not None and mesh.samples:
            from sdk.engine.rank.drafting_model import DraftingModel

            SYSTEM.trim_heap()  # before more weights, perhaps of the same file, are loaded
            self.drafting = DraftingModel(
                config.drafting, config, self.ops, mesh, self.model, self.kv
            )
            undo.callback(self.drafting.close)
        #: Whether steps should be recorded.
        self.records = False
        if self.ops.card is not None:
            self._passes.compile_and_warm_up(weights.compiling)
        if not config.enforce_eager:
            self.record()
            self.capture_all()

    def _image_inputs(self) -> ImageInputs | None:
        """``None``: this engine reads no images."""
        config, vision = self.config, self.model.config.vision
        if not config.image_rows or vision is None:
            return None
        from sdk.engine.rank.images import ImageInputs

        most, device = config.max_num_batched_tokens, self.ops.device
        return ImageInputs(vision, most, device, self.images)

    def _make_adapters(self, config: RunnerConfig) -> RankAdapters:
        from sdk.engine.rank.adapters import rank_adapters

        return rank_adapters(self.model, self.ops, config)

    def close(self) -> None:
        """Free everything. Idempotent; the runner must not be used afterwards."""
        with self.entered():
            self._requests.clear()
            self._last_step = self._repeated = None
            self._inputs.forget()
            self.forget_graphs()
            self.kv.close()
            self.ops.close()
            for name in ("weights", "model"):
                self.__dict__.pop(name, None)
            self.adapters = None
            if self.drafting is not None:
                self.drafting.close()
                self.drafting = None
            if self.ops.card is not None:  # torch would keep it for this engine's stream
                torch.cuda.empty_cache()

    def forget_graphs(self) -> None:
        """Stop using recorded steps and free their memory."""
        self._last_step = self._repeated = None
        self.strategy = Eager(self._passes, self._inputs, "enforce_eager")
        if self.ops.card is not None:
            self.ops.card.drop_pool()

    def record(self) -> None:
        """Run steps in the fastest way there is, where :meth:`capture_next` captures a GPU's."""
        self.records = True
        self.forget_graphs()
        card = self.ops.recording.card
        if card is not None:
            from sdk.engine.rank.device_graphs import DeviceGraphs

            reads = self.drafting is not None and self.drafting.reads_hidden
            most = self.config.recorded_tokens
            self.strategy = DeviceGraphs(self._passes, self._inputs, card, most, reads_hidden=reads)
            return
        try:
            self.strategy = Recorded(self._passes, self._inputs)
        except CaptureError as error:
            self.strategy = Eager(self._passes, self._inputs, str(error))
        if not all_record(self.mesh, isinstance(self.strategy, Recorded)):
            why = self.strategy.eager_reason or "the experts of another rank cannot be recorded"
            self.strategy = Eager(self._passes, self._inputs, why)

    def capture_next(self) -> bool:
        """Capture one more size of steps; whether one was left. All requests have ended."""
        if self._repeated is not None:
            self._repeated.apply_deferred()
        self._last_step = self._repeated = None
        return self.strategy.capture_next()

    def capture_all(self) -> None:
        """Capture all sizes of steps: at load, so that serving never waits for it."""
        while self.capture_next():
            pass

    @property
    def rank(self) -> int:
        """The number of this rank among those of all stages; rank 0 samples."""
        return self.mesh.number

    @property
    def ahead(self) -> tuple[int, int]:
        """The strategy's ``steps_ahead`` and ``batches_in_flight``, for the scheduler."""
        return self.strategy.steps_ahead, self.strategy.batches_in_flight

    @property
    def native_seconds(self) -> float:
        """Seconds spent in native calls so far."""
        drafting = 0.0 if self.drafting is None else self.drafting.native_seconds
        return self._passes.native_seconds + drafting

    def launch(self, plan: StepPlan) -> Pending:
        """Launch one step; results must be read in the order of the launches."""
        repeated = self._repeated
        if repeated is not None:
            known = repeated.plan
            same = plan is known or (
                plan.rows is known.rows and not (plan.copies or plan.state_saves or plan.vacated)
            )
            if same and repeated.ready:
                return repeated.launch(plan)
            self._repeated = None
            repeated.apply_deferred()
        if self._last_step is not None:
            self._last_step.read_results(plan.dropped)
        if self.drafting is not None:
            self.drafting.prepare(plan)
        unwritten = self._update(plan)
        encoded = None
        if plan.encoding is not None and self.images is not None:
            encoded = self.images.encode(plan.encoding)
        requests = [self._requests[row.request_id] for row in plan.rows]
        launched: Sequence[LaunchedBatch] = ()
        if plan.rows:
            rows: Sequence[StepRow] = plan.rows
            if self._is_drafted:
                rows = self._with_drafts(rows, requests)
            batch = StepBatch(rows, requests, range(len(requests)), plan.state_saves)
            launched = self.strategy.launch(batch)
        for row, request in zip(plan.rows, requests, strict=True):
            request.ran(row.num_scheduled_tokens, len(row.drafts))
        self._last_step = LaunchedStep(self, plan, launched, unwritten, encoded)
        return self._last_step

    def join_step(self, rebalance: bool = False) -> int:
        """Take part, without requests, in a step of the engines in lockstep with this one.

        ``rebalance``: see :meth:`sdk.models.experts.lockstep.Lockstep.begin`. How many experts
        moved then.
        """
        lockstep, strategy = self._passes.lockstep, self.strategy
        assert lockstep is not None
        if lockstep.begin(0, rebalance=rebalance):
            (strategy if isinstance(strategy, Recorded) else self._passes).run_empty()
        return lockstep.num_moved

    def _with_drafts(
        self, rows: Sequence[StepRow], requests: Sequence[RankRequest]
    ) -> Sequence[StepRow]:
        """The rows with the drafts of rank 0."""
        if self.drafting is not None:
            self.drafting.run_prompts(rows, requests)
        if not any(row.drafts_on_rank for row in rows):
            return rows
        if self.drafting is not None:
            rows = self.drafting.draft(rows, requests)
        if self.mesh.group is None:
            return rows
        tokens = torch.tensor([token for row in rows for token in row.drafts])
        drafted = iter(self.mesh.group.all_gather(tokens)[0].tolist())
        return [row._replace(drafts=tuple(next(drafted) for _ in row.drafts)) for row in rows]

    def _update(self, plan: StepPlan) -> dict[int, str]:
        """Apply the plan's updates; returns swap slots whose write failed, with the reason."""
        for request_id, token_ids in plan.sampled:
            if (request := self._requests.get(request_id)) is not None:
                request.accept(token_ids)
        leaving = plan.vacated[self.kv.spec.num_regions - 1] if plan.vacated else ()
        self.kv.copy(plan.copies, self.ops, leaving)
        self._inputs.apply_moves(self._requests.values(), plan.copies)
        for region, places in enumerate(plan.vacated):
            self.kv.vacate(places, region)
        if plan.vacated and plan.vacated[0] and self.drafting is not None:
            self.drafting.vacate(plan.vacated[0])
        self._add_pages(plan)
        if self.drafting is not None:
            self.drafting.update(plan)
        if plan.dropped:
            self._inputs.forget()
        for request_id in plan.dropped:
            self._requests.pop(request_id, None)
        for start in plan.started:
            request = RankRequest(start, len(self.kv.spec.windows))
            self._requests[start.request_id] = request
            if self._inputs.images is not None:
                self._inputs.images.prepare(request)
            if request.spec.negative_of is not None:
                self._requests[request.spec.negative_of].negative = request
        return dict(self.kv.unwritten()) if plan.copies and self.kv.has_swap_file else {}

    def finish(self, step: LaunchedStep) -> StepResult:
        """Wait for a step and append the sampled tokens to its requests."""
        plan = step.plan
        result = Results([()] * len(plan.rows), {}, {}, {}, {}, {}, {})
        for launched in step.launched:
            batch = launched.batch
            # guidance and scores use inference tensors, which torch allows only in this mode
            special = batch.negatives or batch.scored
            with torch.inference_mode() if special else contextlib.nullcontext():
                if batch.draws and self.mesh.samples:
                    self._sample(launched, result)
                for scored_row in batch.scored if self.mesh.is_last else ():
                    self._score(scored_row, launched, result)
            if self.drafting is not None and self.drafting.reads_hidden:
                self.drafting.keep(launched, num_right(batch, result.tokens))
        if len(step.launched) == 1 and step is self._last_step and self.mesh.samples:
            self._prepare_repeat(plan, step.launched[0].batch, result)
        left_out = () if self.drafting is None else self.drafting.newly_left_out()
        waited = self.take_mask_seconds()
        encoded = step.encoded or (0.0, {})
        return StepResult(plan.step_id, *result, step.unwritten, left_out, waited, *encoded)

    def _sample(self, launched: LaunchedBatch, result: Results) -> None:
        """Append the sampled tokens and the accepted drafts to the requests of a batch."""
        batch = launched.batch
        begin = perf_counter()
        tokens_drawn = launched.read_tokens()
        self._passes.native_seconds += perf_counter() - begin
        masks = self._inputs.sampling
        if batch.negatives:  # these tokens were drawn without guidance
            logits = guided_logits(batch, launched.logits)
            outcomes = self.sampler.sample(logits, batch.draws, masks)
        else:
            outcomes = self.sampler.collect(launched.logits, batch.draws, tokens_drawn, masks)
        for plan_index, row, request, first in batch.sampled:
            structured = request.structured
            outcome = outcomes[first]
            if isinstance(outcome, str):
                error = None if structured is None else structured.error
                result.errors[row.request_id] = error or outcome
                continue
            drawn = outcomes[first : first + 1 + len(row.drafts)]
            if structured is not None:
                try:
                    drawn = self._structured(row, request, drawn, launched.logits[first:])
                except GrammarError as error_:
                    result.errors[row.request_id] = f"structured_outputs: {error_}"
                    continue
            found = accepted(row.drafts, drawn)
            if structured is not None and structured.complete:
                result.complete[row.request_id] = structured.closed
            elif structured is not None and self.max_drafts:
                result.forced[row.request_id] = structured.forced(self.max_drafts)
            if not request.state.plain:
                result.details[row.request_id] = found
            tokens = result.tokens[plan_index] = [one.token_id for one in found]
            request.accept(tokens)

    def _structured(
        self, row: StepRow, request: RankRequest, drawn: Sequence[Sampled | str], logits: Tensor
    ) -> list[Sampled | str]:
        """The tokens of a structured answer, of those that were drawn: see ``StructuredAnswer``.

        :raises GrammarError: the answer cannot go on.
        """
        structured = request.structured
        assert structured is not None
        tokens: list[Sampled | str] = []
        for index, outcome in enumerate(drawn):
            if isinstance(outcome, str):
                break
            token = structured.accept(outcome.token_id)
            if token != outcome.token_id:
                outcome = self.sampler.replaced(outcome, token, logits[index], request.state)
            tokens.append(outcome)
            if structured.complete or token not in row.drafts[index : index + 1]:
                break
        return tokens

    def _score(self, scored_row: ScoredRow, launched: LaunchedBatch, result: Results) -> None:
        """Add log-probabilities of prompt tokens that follow those just run, or an embedding."""
        spec = scored_row.request.spec
        hidden = launched.hidden[scored_row.begin : scored_row.end]
        if spec.params.prompt_logprobs is not None:
            try:
                if scored := score_prompt(
                    self.sampler, scored_row, hidden, self._passes.logits_in_parts
                ):
                    result.prompt_logprobs[spec.request_id] = scored
            except RequestError as error:  # its logits are not finite
                result.errors[spec.request_id] = str(error)
        if scored_row.request.pooler is not None:
            self._pool(scored_row, hidden, result)

    def _pool(self, scored_row: ScoredRow, hidden: Tensor, result: Results) -> None:
        """Pool the hidden states just run; at the end of the prompt, add the request's result."""
        spec, pooler = scored_row.request.spec, scored_row.request.pooler
        assert pooler is not None
        if self.images is not None and spec.images and self.images.dual:
            hidden = self.images.vector(spec.images[0].image.key)
        pooler.add(hidden)
        if not scored_row.ends:
            return
        found = pooler.result()
        if not bool(found.isfinite().all()):
            result.errors[spec.request_id] = "the model's hidden state is not finite"
            return
        if pooler.pooling.token_ids:
            [logits] = self._passes.logits_in_parts(found[None], scored_row.row.adapter)
            found = logits[0, list(pooler.pooling.token_ids)]
        elif pooler.pooling.score:
            assert self._score_head is not None
            found = self._score_head @ found.cpu()
        result.hidden[spec.request_id] = as_numbers(found)

    def _prepare_repeat(self, plan: StepPlan, batch: StepBatch, result: Results) -> None:
        """Prepare for plans with the same rows again."""
        if batch.plain and batch.is_decode and not result.errors:
            repeater = self.strategy.repeater(batch)
            if repeater is not None:
                tokens = [found[0] for found in result.tokens]
                self._inputs.set_states(batch.rows, batch.requests)
                self._repeated = RepeatedSteps(self, plan, batch, repeater, tokens)

    def add_pages(self, plan: StepPlan, batch: StepBatch) -> None:
        """Add a plan's new pages and frames to requests whose rows stay the same."""
        self._add_pages(plan)
        self._inputs.wait()
        changed = {request_id for request_id, _ in (*plan.new_pages, *plan.new_frames)}
        for row, request in enumerate(batch.requests):
            if request.spec.request_id in changed:
                self._inputs.write_pages(row, request)

    def _add_pages(self, plan: StepPlan) -> None:
        for request_id, pages in plan.new_pages:
            self._requests[request_id].pages.extend(pages)
        for request_id, frames in plan.new_frames:
            request = self._requests[request_id]
            if request.add_frames(frames):
                self._inputs.rewrite_pages(request)

    def take_mask_seconds(self) -> float:
        """How long the last step waited for masks."""
        masks = self._inputs.sampling.mask_tasks
        return masks.take_waited_seconds() if len(masks) else 0.0

    def set_mask_tasks(self, batch: StepBatch) -> None:
        """Have the masks of a batch's structured answers computed in its next step."""
        self._inputs.set_mask_tasks(batch)

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Yield the logits after each token of a prompt, which runs in steps like a request.

        Each part is float32 ``[n, vocab]`` for the next ``n <= 128`` tokens and is valid until the
        next part. The runner must have no requests; pages of earlier requests are overwritten. With
        tiered KV quantization, pages are in the lowest tier that is possible before each step.
        """
        return self.ops.context.lending(self._prompt_logits(token_ids))

    def _prompt_logits(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        size = self._inputs.attention_batch.page_size
        pages = -(-len(token_ids) // size)
        page_ids, count = tuple(range(1, pages + 1)), len(token_ids)
        spec = SequenceSpec("prompt", SamplingParams())
        start = RequestStart(spec, tuple(token_ids), count, 0, page_ids)
        frames, slots = self.kv.rings(pages), (1,) if self.kv.counts[-1] else ()
        start = start._replace(frames=frames, state_slots=slots)
        request = RankRequest(start, len(frames))
        step = min(len(self._inputs.token_ids), self.kv.most_tokens)
        for begin in range(0, len(token_ids), step):
            moves = moves_to_lowest_tier(request.pages, begin, self.kv.spec, self.kv.keep)
            self.kv.copy(moves, self.ops)
            self._inputs.apply_moves([request], moves)
            count = min(len(token_ids) - begin, step)
            batch = StepBatch([StepRow("prompt", count)], [request], [0])
            (launched,) = self.strategy.launch(batch)
            request.ran(count, 0)
            yield from self._passes.logits_in_parts(launched.hidden[:count])
        self._inputs.forget()
