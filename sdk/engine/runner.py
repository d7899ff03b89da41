"""One rank: a plan becomes tensors, the model runs, logits become tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from sdk.engine.inputs import Running, StepInputs
from sdk.engine.key_centres import centre_keys
from sdk.engine.kv_cache import cache_of_rank
from sdk.engine.plan import RequestStart, Sampled, StepPlan, StepResult
from sdk.engine.runner_config import RunnerConfig
from sdk.errors import RequestError
from sdk.kernels.gpu.graphs import StepGraphs
from sdk.kernels.graph import CaptureError, Graph
from sdk.kernels.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.memory import SCORED_BYTES, release_free_memory
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.params import SamplingParams
from sdk.quant.at_load import packed_at_load
from sdk.quant.checkpoint import Checkpoint
from sdk.sampling.guidance import guided
from sdk.sampling.sampler import Sampler
from sdk.sampling.state import RequestState
from sdk.sampling.uniform import TOKEN

#: Steps run again before requests and sampler hear of their tokens, at the next page boundary.
_MAX_AGAIN = 64
#: Rows the head runs on at a time, at most; of a large vocabulary fewer (``SCORED_BYTES``).
_HEAD_ROWS = 128


@dataclass(slots=True)
class _Wanted:
    """What becomes of a step's rows: whose token is sampled from which, who guides whom."""

    sampling: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    #: By the request that is guided.
    guides: dict[str, int] = field(default_factory=dict)
    #: Requests to look at after the run, with their first and last row + 1.
    special: list[tuple[str, Running, int, int]] = field(default_factory=list)


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
                checkpoint = open_checkpoint(
                    config.model,
                    revision=config.revision,
                    local_files_only=config.local_files_only,
                )
                checkpoint = packed_at_load(checkpoint, config.quantization)
            undo.callback(checkpoint.close)
            self.ops = Ops(
                config.device,
                compute=config.compute,
                num_threads=config.num_threads,
                deterministic=config.deterministic,
            )
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
            self._graph: Graph[tuple[Tensor, Tensor]] | None = None
            #: On a GPU: decode steps of so many requests, with what was sampled.
            self._decode_graphs: StepGraphs[tuple[Tensor, Tensor, Tensor]] | None = None
            #: Why steps run operator by operator; ``None`` when they are replayed from a graph.
            self.eager_reason: str | None = "enforce_eager"
            if not config.enforce_eager:
                self._capture()
            undo.pop_all()
        checkpoint.close()
        release_free_memory()

    def close(self) -> None:
        """Give everything back. Idempotent; the runner must not be used afterwards."""
        self._requests.clear()
        self._rows, self._drawing = [], []
        self._inputs.forget()
        self._graph = self._decode_graphs = None
        self.kv.close()
        self.ops.close()
        self.__dict__.pop("model", None)

    def _capture(self) -> None:
        """Record a step as large as the largest there will be; smaller ones use its first rows."""
        inputs = self._inputs
        tokens, requests = inputs.token_ids.shape[0], inputs.output_rows.shape[0]
        if self.ops.device.type == "cuda":
            self._decode_graphs = StepGraphs(self._decode, min(tokens, requests))
            self.eager_reason = None
            return

        def forward() -> tuple[Tensor, Tensor]:
            self.ops.find_places(inputs.batch)
            hidden = self.model(inputs.token_ids, inputs.batch, self.kv.layers)
            logits = self.model.logits(self.ops.select_rows(hidden, inputs.output_rows))
            self.ops.sample_into(logits, inputs.sampling)
            return hidden, logits

        try:
            with torch.inference_mode():
                self._graph = self.ops.capture(
                    forward, tokens=tokens, outputs=requests, requests=requests
                )
            self.eager_reason = None
        except CaptureError as error:
            self.eager_reason = str(error)

    def _decode(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The decode step of ``size`` rows: hidden states, logits and ``Ops.sample_rows``."""
        inputs = self._inputs
        with torch.inference_mode():
            batch = inputs.decoding(size)
            self.ops.find_places(batch)
            hidden = self.model(inputs.token_ids[:size], batch, self.kv.layers)
            rows = self.ops.select_rows(hidden, inputs.output_rows[:size])
            logits = self.model.logits(rows)
            return hidden, logits, self.ops.sample_rows(logits, inputs.draws[:size])

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see :class:`sdk.engine.plan.StepResult` for what comes back."""
        self._update(plan)
        if not plan.num_tokens:
            return StepResult(plan.step_id)
        rows = [(self._requests[request_id], count) for request_id, count in plan.num_tokens]
        wanted = self._wanted(plan, rows)
        outputs = [*wanted.rows, *wanted.guides.values()] if wanted.guides else wanted.rows
        tokens = self._inputs.fill(rows, outputs)
        self.sampler.write_draws(wanted.sampling, self._inputs.sampling)
        begin = perf_counter()
        hidden, logits = self._forward(tokens, len(rows), len(outputs))
        self.native_seconds += perf_counter() - begin
        for request, count in rows:
            request.num_computed += count
        if wanted.guides or wanted.special:  # torch changes or reads what was made in this mode
            with torch.inference_mode():
                return self._finish(plan, wanted, hidden, logits)
        if self._graph is not None and len(wanted.sampling) == len(rows) == tokens:
            drawing = self.sampler.drawing(wanted.sampling)
            if drawing is not None:
                self._rows, self._drawing = [request for request, _ in rows], drawing
        return self._finish(plan, wanted, hidden, logits)

    def execute_again(self, plan: StepPlan, tokens: list[int]) -> StepResult | list[int]:
        """See :meth:`sdk.executors.base.Executor.execute_again`.

        It touches as little as it can: a step leaves the caches full of weights, and each function
        or object not used since costs 1 to 10 us.
        """
        graph, inputs = self._graph, self._inputs
        if graph is None or not self._rows:
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
            wanted = _Wanted([request_id for request_id, _ in plan.num_tokens])
            return self._finish(plan, wanted, *graph.result)
        return sampled

    def _extend_rows(self, plan: StepPlan) -> None:
        self._rearrange(plan)
        for row, request in enumerate(self._rows):
            self._inputs.write_pages(row, request)
        if len(self._again) >= _MAX_AGAIN:
            self._settle()

    def _rearrange(self, plan: StepPlan) -> None:
        """Copy and move pages, and hand out new ones."""
        self.kv.swap(plan.swaps)
        self.kv.move(plan.moves, self.ops)
        self._inputs.follow(self._requests.values(), plan.moves)
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
        inputs = self._inputs
        if self._decode_graphs is not None and tokens == requests == outputs:
            size = self._decode_graphs.size(requests)
            inputs.fill_up(requests, size)
            hidden, logits, sampled = self._decode_graphs.replay(size)
            inputs.sampling.write(sampled[:requests].cpu().numpy())
            return hidden, logits
        with torch.inference_mode():
            batch = inputs.view(tokens, requests)
            self.ops.find_places(batch)
            hidden = self.model(inputs.token_ids[:tokens], batch, self.kv.layers)
            if not outputs:
                return hidden, hidden[:0]
            rows = self.ops.select_rows(hidden, inputs.output_rows[:outputs])
            logits = self.model.logits(rows)
            if self._mesh.rank == 0:
                self.ops.sample_into(logits, inputs.sampling)
            return hidden, logits

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
            )
        for request_id, token_ids in plan.appended:
            request = self._requests[request_id]
            request.token_ids.extend(token_ids)
            if request.start.guides is None:
                self.sampler.append(request_id, token_ids)

    def _wanted(self, plan: StepPlan, rows: list[tuple[Running, int]]) -> _Wanted:
        """Which rows are sampled or looked at: those where the known tokens of a request end."""
        wanted = _Wanted()
        end = 0
        for (request_id, _), (request, count) in zip(plan.num_tokens, rows, strict=True):
            begin, end = end, end + count
            start = request.start
            ends = request.num_computed + count == len(request.token_ids)
            embeds = ends and start.kind == "embed"
            if embeds or start.params.prompt_logprobs is not None:
                wanted.special.append((request_id, request, begin, end))
            if ends and not embeds:
                if start.guides is not None:
                    wanted.guides[start.guides] = end - 1
                else:
                    wanted.sampling.append(request_id)
                    wanted.rows.append(end - 1)
        return wanted

    def _finish(
        self, plan: StepPlan, wanted: _Wanted, hidden: Tensor, logits: Tensor
    ) -> StepResult:
        """Score what was asked for and sample where a request's end ran."""
        sampled: dict[str, Sampled] = {}
        prompt_logprobs: dict[str, tuple[Sampled, ...]] = {}
        embeddings: dict[str, list[float]] = {}
        errors: dict[str, str] = {}
        if wanted.sampling and self._mesh.rank == 0:
            if wanted.guides:  # what was drawn is not guided yet
                outcomes = self.sampler.sample(self._guided(wanted, logits), wanted.sampling)
            else:
                chosen = self._inputs.sampling.read(len(wanted.sampling))
                outcomes = self.sampler.collect(logits, wanted.sampling, chosen)
            for request_id, outcome in zip(wanted.sampling, outcomes, strict=True):
                if isinstance(outcome, str):
                    errors[request_id] = outcome
                else:
                    sampled[request_id] = outcome
        for request_id, request, begin, end in wanted.special:
            if request.start.params.prompt_logprobs is not None:
                try:
                    scored = self._score_prompt(request, hidden[begin:end])
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

    def _guided(self, wanted: _Wanted, logits: Tensor) -> Tensor:
        """The rows to sample, each guided one moved away from what its guide says."""
        outputs = len(wanted.sampling) + len(wanted.guides)
        logits, negative = logits[:outputs].tensor_split([len(wanted.sampling)])
        for row, request_id in zip(negative, wanted.guides, strict=True):
            own = logits[wanted.sampling.index(request_id)]
            own.copy_(guided(own, row, self._requests[request_id].start.params.guidance_scale))
        return logits

    def _score_prompt(self, request: Running, hidden: Tensor) -> tuple[Sampled, ...]:
        """Log-probabilities of the prompt tokens that follow the rows just run."""
        first = request.num_computed - len(hidden)
        following = request.token_ids[first + 1 : min(first + 1 + len(hidden), request.num_prompt)]
        count = request.start.params.prompt_logprobs
        assert count is not None
        also = request.start.params.logprob_token_ids or ()
        scored: list[Sampled] = []
        for logits in self._logits(hidden[: len(following)]):
            part = following[len(scored) : len(scored) + len(logits)]
            scored += self.sampler.score(logits, part, count, also)
            del logits
        return tuple(scored)

    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """The head over all rows, some at a time; each result is valid until the next."""
        rows = min(_HEAD_ROWS, max(SCORED_BYTES // (4 * self.model.config.vocab_size), 1))
        for begin in range(0, len(hidden), rows):
            with torch.inference_mode():
                logits = self.model.logits(hidden[begin : begin + rows])
            yield logits
            del logits  # its memory is the next one's

    def prompt_logits(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """What the model expects behind each token of one prompt, run in steps as a request is.

        Float32 ``[n, vocab]`` for the next ``n <= 128`` tokens, valid until the next is asked for.
        No request may be in the runner; the pages of earlier ones are written over.
        """
        pages = -(-len(token_ids) // self._inputs.batch.page_size)
        request = Running(
            RequestStart(
                "prompt",
                tuple(token_ids),
                num_prompt_tokens=len(token_ids),
                num_computed=0,
                pages=tuple(range(1, pages + 1)),
                params=SamplingParams(),
            )
        )
        for begin in range(0, len(token_ids), len(self._inputs.token_ids)):
            count = min(len(token_ids) - begin, len(self._inputs.token_ids))
            tokens = self._inputs.fill([(request, count)], [])
            hidden, _ = self._forward(tokens, 1, 0)
            request.num_computed += count
            yield from self._logits(hidden[:count])
        self._inputs.forget()
