"""One rank: a plan becomes tensors, the model runs, logits become tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from sdk.engine.forward import ForwardPasses
from sdk.engine.inputs import Running, StepInputs
from sdk.engine.key_centres import centre_keys
from sdk.engine.kv_cache import cache_of_rank
from sdk.engine.ladder import descent
from sdk.engine.plan import RequestStart, Sampled, StepPlan, StepResult
from sdk.engine.run_ahead import Flight, RunAhead
from sdk.engine.runner_config import RunnerConfig
from sdk.engine.wanted import Wanted, guided_rows, score_prompt, sorted_out, wanted_of
from sdk.errors import RequestError
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.gpu.graphs import CardRecorder, PieceGraphs
from sdk.kernels.graph import CaptureError, Graph
from sdk.kernels.sampling import Tokens
from sdk.memory import SCORED_BYTES, SCORED_ROWS, release_free_memory
from sdk.models.auto import build_model
from sdk.models.decoder import Decoder
from sdk.models.parallel import Mesh
from sdk.params import SamplingParams
from sdk.quant.checkpoint import Checkpoint
from sdk.sampling.sampler import Sampler
from sdk.sampling.state import RequestState
from sdk.sampling.uniform import TOKEN

#: Steps run again before requests and sampler hear of their tokens, at the next page boundary.
_MAX_AGAIN = 64
#: Logits nobody looks at: those of requests that want their tokens alone.
_NOTHING = torch.empty(0)


class ModelRunner:
    """Builds and runs the model of one rank. Everything that touches tensors happens here.

    Close it to give back weights, pages and threads.
    """

    def __init__(
        self, config: RunnerConfig, mesh: Mesh, checkpoint: Checkpoint | None = None
    ) -> None:
        self._mesh = mesh
        self._requests: dict[str, Running] = {}
        # The last step, while it can be run again: its rows, those drawn at random, and the tokens
        # of each time it was, of which neither requests nor sampler know yet.
        self._rows: list[Running] = []
        self._drawing: list[tuple[int, RequestState]] = []
        self._again: list[list[int]] = []
        self.unused_tensors: list[str] = []
        #: Spent in native calls so far.
        self.native_seconds = 0.0
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
                config.max_model_len,
                config.page_size,
                self.ops.device,
                find_shared=self.ops.device.type == "cuda" and not config.deterministic,
            )
            self._passes = ForwardPasses(self.model, self.kv, self._inputs, self.ops, mesh)
            self._graph: Graph[tuple[Tensor, Tensor]] | None = None
            #: On a GPU: decode steps, and those with prompts.
            self._ahead: RunAhead | None = None
            self._pieces: PieceGraphs | None = None
            #: Why decode steps, and those with prompts, run operator by operator; ``None`` when
            #: they are replayed from graphs.
            self.eager_reason: str | None = "enforce_eager"
            self.eager_prompts_reason: str | None = "enforce_eager"
            if not config.enforce_eager:
                self.record()
            undo.pop_all()
        checkpoint.close()
        release_free_memory()

    @property
    def most_tokens_in_pieces(self) -> int:
        """Tokens of the largest step that a GPU replays in pieces; 0 where none is."""
        return 0 if self._pieces is None else self._pieces.most_tokens

    @property
    def failed_captures(self) -> list[str]:
        """Why a GPU replays only some sizes: of decode steps, of steps in pieces."""
        graphs = (self._ahead and self._ahead.graphs, self._pieces)
        return [one.captured.failed for one in graphs if one and one.captured.failed]

    @property
    def steps_ahead(self) -> int:
        """How many steps are launched before the tokens of the last one are known."""
        return 0 if self._ahead is None else 1

    def close(self) -> None:
        """Give everything back. Idempotent; the runner must not be used afterwards."""
        self._requests.clear()
        self._rows, self._drawing = [], []
        self._inputs.forget()
        self.forget_graphs()
        self.kv.close()
        self.ops.close()
        self.__dict__.pop("model", None)

    def forget_graphs(self) -> None:
        """Run what is recorded no more, and give back what it holds."""
        self._graph = self._ahead = self._pieces = None

    def record(self) -> None:
        """Have steps recorded, as far as they can be."""
        if self.ops.device.type == "cuda":
            self.use_graphs(CardRecorder())
            return
        try:
            self._graph = self._passes.record()
            self.eager_reason = self.eager_prompts_reason = None
        except CaptureError as error:
            self.eager_reason = self.eager_prompts_reason = str(error)

    def use_graphs(self, recorder: CardRecorder) -> None:
        """Have steps recorded as they are first needed; also to forget those that were."""
        tokens, requests = len(self._inputs.token_ids), len(self._inputs.output_rows)
        most = min(tokens, requests)
        self._ahead = RunAhead(self._passes.decode, self._inputs, most, recorder)
        self.eager_reason = None
        if self.ops.offloaded:
            self.eager_prompts_reason = "the host's weights are copied while attention runs"
        elif isinstance(self.model, Decoder):
            self._pieces = PieceGraphs(self._passes.pieces, tokens, recorder)
            self.eager_prompts_reason = None
        else:
            self.eager_prompts_reason = "transformers' own code runs between the attentions"

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see :class:`sdk.engine.plan.StepResult` for what comes back."""
        result = self._execute(plan)
        if plan.copies and self.kv.has_swap_file:
            result = result._replace(unwritten=self.kv.unwritten())
        return result

    def _execute(self, plan: StepPlan) -> StepResult:
        self._update(plan)
        if not plan.num_tokens:
            return StepResult(plan.step_id)
        flight = None
        if self._ahead is not None:
            flight, landed = self._ahead.landed(plan, self._requests)
        if flight is None:
            return self._run(plan)
        result = StepResult(plan.step_id)
        if rest := tuple(part for part in plan.num_tokens if part[0] not in landed):
            result = self._run(plan._replace(num_tokens=rest), whole=False)
        for request_id in landed:
            self._requests[request_id].num_computed += 1
        tokens, best, shares = flight.read()[list(landed.values())].T.tolist()
        chosen = Tokens([*map(int, tokens)], best, shares)
        outcomes = self.sampler.collect(_NOTHING, list(landed), chosen)
        sampled, errors = sorted_out(list(landed), outcomes)
        sampled, errors = {**result.sampled, **sampled}, {**result.errors, **errors}
        return result._replace(sampled=sampled, errors=errors)

    def _run(self, plan: StepPlan, *, whole: bool = True) -> StepResult:
        """Run the rows of a plan; ``whole``: they are all, so the next step may be these again."""
        rows = [(self._requests[request_id], count) for request_id, count in plan.num_tokens]
        wanted = wanted_of(plan, rows)
        outputs = [*wanted.rows, *wanted.guides.values()] if wanted.guides else wanted.rows
        tokens = self._inputs.fill(rows, outputs)
        self.sampler.write_draws(wanted.sampling, self._inputs.sampling)
        begin = perf_counter()
        flight: Flight | None = None
        decoded = None
        if tokens == len(rows) == len(outputs):
            decoded = self._decode_ahead([request for request, _ in rows])
        if decoded is not None:
            flight, hidden, logits = decoded
        else:
            hidden, logits = self._forward(tokens, len(rows), len(outputs))
        for request, count in rows:
            request.num_computed += count
        # The draws that were captured read no shapes.
        redrawn = flight is not None and bool(self._inputs.sampling.shaped(len(wanted.sampling)))
        alone = whole and not (wanted.guides or wanted.special or redrawn)
        if alone and len(wanted.sampling) == len(rows) == tokens and (self._graph or flight):
            drawing = self.sampler.drawing(wanted.sampling)
            if drawing is not None:
                self._rows, self._drawing = [request for request, _ in rows], drawing
                if self._ahead is not None and flight is not None:
                    self._ahead.go_on(flight, drawing, 1)
        if redrawn:
            self.ops.sample_into(logits[: len(outputs)], self._inputs.sampling)
        elif flight is not None:
            self._inputs.sampling.write(flight.read())
        self.native_seconds += perf_counter() - begin
        if wanted.guides or wanted.special:  # torch changes or reads what was made in this mode
            with torch.inference_mode():
                return self._finish(plan, wanted, hidden, logits)
        return self._finish(plan, wanted, hidden, logits)

    def _decode_ahead(self, rows: list[Running]) -> tuple[Flight, Tensor, Tensor] | None:
        """The decode step just written, where they are captured."""
        if self._ahead is None:
            return None
        try:
            return self._ahead.run(rows)
        except CaptureError as error:
            if not self._ahead.graphs.captured.sizes:
                self._ahead, self.eager_reason = None, str(error)
            return None

    def execute_again(self, plan: StepPlan, tokens: list[int]) -> StepResult | list[int]:
        """See :meth:`sdk.executors.base.Executor.execute_again`.

        It touches as little as it can: a step leaves the caches full of weights, and each function
        or object not used since costs 1 to 10 us.
        """
        graph, inputs = self._graph, self._inputs
        if plan.copies and self.kv.has_swap_file:  # some may fail, and tokens alone do not tell
            return self.execute(plan.going_on(tokens))
        if graph is None or not self._rows:
            if self._rows and self._ahead is not None and self._ahead.flight is not None:
                return self._land(plan, tokens, self._ahead, self._ahead.flight)
            return self.execute(plan.going_on(tokens))
        if plan.new_pages:
            self._extend_rows(plan)
        self._again.append(tokens)
        inputs.advance(tokens)
        for row, state in self._drawing:
            ahead = len(self._again)
            inputs.sampling.set(row, state.draw(ahead), state.uniform(TOKEN, ahead))
        begin = perf_counter()
        graph.replay_again()
        self.native_seconds += perf_counter() - begin
        sampled = inputs.sampled(len(tokens))
        if sampled is None:  # not all are finite
            wanted = Wanted([request_id for request_id, _ in plan.num_tokens])
            return self._finish(plan, wanted, *graph.result)
        return sampled

    def _land(
        self, plan: StepPlan, tokens: list[int], ahead: RunAhead, flight: Flight
    ) -> StepResult | list[int]:
        """:meth:`execute_again` where the step was launched already: launch the one after it."""
        self._inputs.wait()
        if plan.new_pages:
            self._extend_rows(plan)
        self._again.append(tokens)
        begin = perf_counter()
        ahead.go_on(flight, self._drawing, len(self._again) + 1)
        found = flight.read()
        self.native_seconds += perf_counter() - begin
        if np.isfinite(found[:, 1]).all():
            return [int(token) for token in found[:, 0]]
        self._inputs.sampling.write(found)
        wanted = Wanted([request_id for request_id, _ in plan.num_tokens])
        return self._finish(plan, wanted, _NOTHING, _NOTHING)

    def _extend_rows(self, plan: StepPlan) -> None:
        self._rearrange(plan)
        for row, request in enumerate(self._rows):
            self._inputs.write_pages(row, request)
        if len(self._again) >= _MAX_AGAIN:
            self._settle()

    def _rearrange(self, plan: StepPlan) -> None:
        """Copy and move pages, and hand out new ones."""
        self.kv.copy(plan.copies, self.ops)
        self._inputs.follow(self._requests.values(), plan.copies)
        for request_id, pages in plan.new_pages:
            self._requests[request_id].pages.extend(pages)

    def _settle(self) -> None:
        """Tell requests and sampler the tokens of the steps that were run again."""
        again, self._again = self._again, []
        if not again:
            return
        for row, request in enumerate(self._rows):
            tokens = [step[row] for step in again]
            request.token_ids += tokens
            request.num_computed += len(tokens)
            self.sampler.append(request.start.request_id, tokens)

    def _forward(self, tokens: int, requests: int, outputs: int) -> tuple[Tensor, Tensor]:
        """Hidden states and the wanted rows' logits: the first ``tokens`` and ``outputs`` rows."""
        if self._graph is not None:
            self._graph.replay(tokens=tokens, outputs=outputs, requests=requests)
            return self._graph.result
        with torch.inference_mode():
            hidden = self._hidden(self._inputs.view(tokens, requests))
            return hidden, self._passes.logits(hidden, outputs)

    def _hidden(self, batch: AttentionBatch) -> Tensor:
        if self._pieces is not None and batch.num_tokens <= self._pieces.most_tokens:
            try:
                return self._pieces.replay(batch)
            except CaptureError as error:
                if not self._pieces.captured.sizes:
                    self._pieces, self.eager_prompts_reason = None, str(error)
        return self._passes.hidden(batch)

    def _update(self, plan: StepPlan) -> None:
        self._settle()
        self._rows, self._drawing = [], []
        self._rearrange(plan)
        if plan.dropped:
            self._inputs.forget()
        for request_id in plan.dropped:
            if self._requests.pop(request_id, None) is not None:
                self.sampler.drop(request_id)
        for start in plan.started:
            self._requests[start.request_id] = Running(start)
            if start.guides is not None:
                continue  # the sampler knows its request
            self.sampler.add(
                start.request_id,
                start.params,
                start.token_ids[: start.num_prompt_tokens],
                start.token_ids[start.num_prompt_tokens :],
                start.resolved,
                start.mirostat_mu,
            )
        for request_id, token_ids in plan.appended:
            request = self._requests[request_id]
            request.token_ids.extend(token_ids)
            if request.start.guides is None:
                self.sampler.append(request_id, token_ids)

    def _finish(self, plan: StepPlan, wanted: Wanted, hidden: Tensor, logits: Tensor) -> StepResult:
        """Score what was asked for and sample where a request's end ran."""
        sampled: dict[str, Sampled] = {}
        prompt_logprobs: dict[str, tuple[Sampled, ...]] = {}
        embeddings: dict[str, list[float]] = {}
        errors: dict[str, str] = {}
        if wanted.sampling and self._mesh.rank == 0:
            if wanted.guides:  # what was drawn is not guided yet
                rows = guided_rows(wanted, self._requests, logits)
                outcomes = self.sampler.sample(rows, wanted.sampling)
            else:
                chosen = self._inputs.sampling.read(len(wanted.sampling))
                outcomes = self.sampler.collect(logits, wanted.sampling, chosen)
            sampled, errors = sorted_out(wanted.sampling, outcomes)
        for request_id, request, begin, end in wanted.special:
            if request.start.params.prompt_logprobs is not None:
                try:
                    scored = score_prompt(self.sampler, request, hidden[begin:end], self._logits)
                except RequestError as error:  # its logits are not finite
                    errors[request_id] = str(error)
                    scored = ()
                if scored:
                    prompt_logprobs[request_id] = scored
            if request.start.kind == "embed" and request.num_computed == len(request.token_ids):
                if bool(hidden[end - 1].isfinite().all()):
                    vector = torch.nn.functional.normalize(hidden[end - 1], dim=0)
                    embeddings[request_id] = vector.tolist()
                else:
                    errors[request_id] = "the model's hidden state is not finite"
        return StepResult(plan.step_id, sampled, prompt_logprobs, embeddings, errors)

    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """The head over all rows, some at a time; each result is valid until the next."""
        rows = min(SCORED_ROWS, max(SCORED_BYTES // (4 * self.model.config.vocab_size), 1))
        for begin in range(0, len(hidden), rows):
            with torch.inference_mode():
                logits = self.model.logits(hidden[begin : begin + rows])
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
            moves = descent(request.pages, begin, self.kv.spec, self.kv.keep)
            self.kv.copy(moves, self.ops)
            self._inputs.follow([request], moves)
            count = min(len(token_ids) - begin, len(self._inputs.token_ids))
            tokens = self._inputs.fill([(request, count)], [])
            hidden, _ = self._forward(tokens, 1, 0)
            request.num_computed += count
            yield from self._logits(hidden[:count])
        self._inputs.forget()
