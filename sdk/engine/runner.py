"""One rank: a plan becomes tensors, the model runs, logits become tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdk.engine.kv_cache import KVCache, kv_spec
from sdk.engine.plan import RequestStart, Sampled, StepPlan, StepResult
from sdk.errors import RequestError
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.ops import Compute, Ops
from sdk.loaders.open import open_checkpoint
from sdk.memory import release_free_memory
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quant.checkpoint import Checkpoint
from sdk.sampling.guidance import guided
from sdk.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What a rank needs to build itself, in plain values: the same object goes to every process."""

    model: str
    num_pages: int
    page_size: int
    kv_dtype: str
    max_model_len: int
    num_threads: int
    device: str = "cpu"
    compute: Compute = "auto"
    revision: str | None = None
    local_files_only: bool = False
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)


class _Running:
    """What a rank remembers of a request between steps."""

    __slots__ = ("num_computed", "num_prompt", "pages", "start", "token_ids")

    def __init__(self, start: RequestStart) -> None:
        self.start = start
        self.token_ids = list(start.token_ids)
        self.num_prompt = start.num_prompt_tokens
        self.num_computed = start.num_computed
        self.pages = list(start.pages)


class ModelRunner:
    """Builds and runs the model of one rank. Everything that touches tensors happens here.

    Close it to give back weights, pages and threads.
    """

    def __init__(
        self, config: RunnerConfig, mesh: Mesh, checkpoint: Checkpoint | None = None
    ) -> None:
        self._mesh = mesh
        self._requests: dict[str, _Running] = {}
        self.unused_tensors: list[str] = []
        with contextlib.ExitStack() as undo:
            if checkpoint is None:
                checkpoint = open_checkpoint(
                    config.model,
                    revision=config.revision,
                    local_files_only=config.local_files_only,
                )
            undo.callback(checkpoint.close)
            self.ops = Ops(config.device, compute=config.compute, num_threads=config.num_threads)
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
            heads = mesh.heads(facts.num_heads, facts.num_kv_heads).kv_count
            self.kv = KVCache(
                kv_spec(facts, heads, config.page_size, config.kv_dtype), config.num_pages
            )
            self.sampler = Sampler(facts.vocab_size, self.ops)
            undo.pop_all()
        checkpoint.close()
        release_free_memory()

    def close(self) -> None:
        """Give everything back. Idempotent; the runner must not be used afterwards."""
        self._requests.clear()
        self.kv.close()
        self.ops.close()
        self.__dict__.pop("model", None)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; see :class:`sdk.engine.plan.StepResult` for what comes back."""
        self._update(plan)
        if not plan.num_tokens:
            return StepResult(plan.step_id)
        with torch.inference_mode():
            tokens, batch = self._batch(plan)
            hidden = self.model(tokens, batch, self.kv.layers)
            return self._finish(plan, hidden, batch)

    def _update(self, plan: StepPlan) -> None:
        for request_id in plan.dropped:
            if self._requests.pop(request_id, None) is not None:
                self.sampler.drop(request_id)
        for start in plan.started:
            self._requests[start.request_id] = _Running(start)
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
        for request_id, pages in plan.new_pages:
            self._requests[request_id].pages.extend(pages)

    def _batch(self, plan: StepPlan) -> tuple[Tensor, AttentionBatch]:
        """The step's tokens, int64 ``[T]``, and where each one stands."""
        page_size = self.kv.spec.page_size
        rows = [(self._requests[request_id], count) for request_id, count in plan.num_tokens]
        tokens: list[int] = []
        starts = [0]
        for request, count in rows:
            tokens += request.token_ids[request.num_computed : request.num_computed + count]
            starts.append(starts[-1] + count)
        table = np.zeros((len(rows), max(len(request.pages) for request, _ in rows)), np.int32)
        positions = np.empty(len(tokens), np.int64)
        slots = np.empty(len(tokens), np.int64)
        for row, (request, count) in enumerate(rows):
            table[row, : len(request.pages)] = request.pages
            at = np.arange(request.num_computed, request.num_computed + count)
            positions[starts[row] : starts[row + 1]] = at
            slots[starts[row] : starts[row + 1]] = (
                table[row, at // page_size].astype(np.int64) * page_size + at % page_size
            )
        lengths = [request.num_computed + count for request, count in rows]
        batch = AttentionBatch(
            positions=torch.from_numpy(positions),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_len=torch.tensor(lengths, dtype=torch.int32),
            page_table=torch.from_numpy(table),
            slots=torch.from_numpy(slots),
            page_size=page_size,
            max_query_len=max(count for _, count in rows),
            max_context_len=max(lengths),
        )
        return torch.tensor(tokens, dtype=torch.int64), batch

    def _finish(self, plan: StepPlan, hidden: Tensor, batch: AttentionBatch) -> StepResult:
        """Advance the counters, score what was asked for and sample where a request's end ran."""
        sampling: list[str] = []
        last_rows: list[int] = []
        guide_rows: dict[str, int] = {}  # by the request that is guided
        prompt_logprobs: dict[str, tuple[Sampled, ...]] = {}
        embeddings: dict[str, list[float]] = {}
        errors: dict[str, str] = {}
        begin = 0
        for request_id, count in plan.num_tokens:
            request = self._requests[request_id]
            end = begin + count
            if request.start.params.prompt_logprobs is not None:
                try:
                    scored = self._score_prompt(request, hidden[begin:end])
                except RequestError as error:  # its logits are not finite
                    errors[request_id] = str(error)
                    scored = ()
                if scored:
                    prompt_logprobs[request_id] = scored
            request.num_computed += count
            if request.num_computed == len(request.token_ids):
                if request.start.kind == "embed":
                    if bool(hidden[end - 1].isfinite().all()):
                        vector = torch.nn.functional.normalize(hidden[end - 1], dim=0)
                        embeddings[request_id] = vector.tolist()
                    else:
                        errors[request_id] = "the model's hidden state is not finite"
                elif request.start.guides is not None:
                    guide_rows[request.start.guides] = end - 1
                else:
                    sampling.append(request_id)
                    last_rows.append(end - 1)
            begin = end
        sampled: dict[str, Sampled] = {}
        if sampling:
            logits = self.model.logits(hidden[torch.tensor([*last_rows, *guide_rows.values()])])
            if self._mesh.rank == 0:
                logits, negative = logits.tensor_split([len(sampling)])
                for row, request_id in zip(negative, guide_rows, strict=True):
                    own = logits[sampling.index(request_id)]
                    scale = self._requests[request_id].start.params.guidance_scale
                    own.copy_(guided(own, row, scale))
                outcomes = self.sampler.sample(logits, sampling)
                for request_id, outcome in zip(sampling, outcomes, strict=True):
                    if isinstance(outcome, str):
                        errors.setdefault(request_id, outcome)
                    else:
                        sampled[request_id] = outcome
        return StepResult(plan.step_id, sampled, prompt_logprobs, embeddings, errors)

    def _score_prompt(self, request: _Running, hidden: Tensor) -> tuple[Sampled, ...]:
        """Log-probabilities of the prompt tokens that follow the rows just run.

        The head runs on 128 rows at a time: with 262,144 tokens that is 134 MB of logits.
        """
        first = request.num_computed
        following = request.token_ids[first + 1 : min(first + 1 + len(hidden), request.num_prompt)]
        count = request.start.params.prompt_logprobs
        assert count is not None
        scored: list[Sampled] = []
        for begin in range(0, len(following), 128):
            part = following[begin : begin + 128]
            logits = self.model.logits(hidden[begin : begin + len(part)])
            scored += self.sampler.score(
                logits, part, count, request.start.params.logprob_token_ids or ()
            )
        return tuple(scored)
