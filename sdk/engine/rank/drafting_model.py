"""Weights that draft: the model's own in fewer bits, a smaller model, or a head, which may be the
model's own block of multi-token prediction.

The model's own weights use its keys and values. A draft writes those of its token where the model
will write its own: the step that verifies drafts runs every position from the first drafted one on,
and each layer writes before it reads. So they need no pages, and after a prefix hit, a swap or a
preemption there is nothing to restore. A smaller model and a head have keys and values of their own
(:class:`~sdk.engine.rank.drafting_pages.DraftingPages`). A head also reads hidden states of the
model (:class:`~sdk.engine.rank.head_features.HeadFeatures`). At position i it runs token i + 1, so
it is always one position behind. The last position of a shared prefix was therefore run with the
next token of another request. If the tokens differ there, drafts get a little worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from sdk.engine.plan import StepPlan, StepRow
from sdk.engine.rank.drafting_pages import DraftingPages
from sdk.engine.rank.eager import Eager
from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.head_features import HeadFeatures, drafts_for
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.key_centres import centre_keys
from sdk.engine.rank.kv_cache import KVCache, cache_of_drafts
from sdk.engine.rank.recorded import Recorded
from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.runner_config import DraftingWeights, RunnerConfig
from sdk.engine.rank.step_batch import StepBatch
from sdk.engine.rank.strategy import LaunchedBatch, Strategy
from sdk.kernels.errors import CaptureError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import WorkShape
from sdk.kernels.operators.ops import Ops
from sdk.models.auto import build_model
from sdk.models.decoder import CausalLM, Decoder
from sdk.models.drafting_heads import DraftingHead, HeadConfig, ModelEnds, build_head
from sdk.models.parallel import Mesh
from sdk.models.source import Source
from sdk.quant.checkpoint import Checkpoint
from sdk.sampling.extra_rows import waiting_rows

#: Known tokens that the step of the first draft may run: the last one, and the one before it, whose
#: draft was the last of a step and was accepted without having been run.
_WITH_DRAFT = 2


class _Part(NamedTuple):
    """Positions ``begin`` to ``end`` of a request."""

    request_id: str
    request: RankRequest
    begin: int
    end: int


class DraftingModel:
    """The drafting weights of an engine, all of them on rank 0.

    ``target``: the model that verifies, on this rank of ``mesh``, with its cache ``shared``.
    """

    def __init__(
        self,
        weights: DraftingWeights,
        config: RunnerConfig,
        ops: Ops,
        mesh: Mesh,
        target: CausalLM,
        shared: KVCache,
    ) -> None:
        rows = config.max_num_seqs
        self._most, kv = _WITH_DRAFT * rows, shared
        if weights.has_pages:
            self._most = max(self._most, config.max_num_batched_tokens)
        self._longest = weights.max_model_len
        #: The step of the first draft may run all hidden states that wait, of all requests.
        self._few = min(waiting_rows(rows), self._most)
        self._ops = ops
        self._features: HeadFeatures | None = None
        self._pages: DraftingPages | None = None
        work: WorkShape | None = None
        if weights.head is None:
            models: Sequence[CausalLM] = [_smaller_model(weights, ops)]
        else:
            models = heads = _head(weights, weights.head, self._most, config, ops, mesh, target)
            self._features = HeadFeatures(heads[0], only_last=not weights.has_pages)
        #: How far tokens are ahead of their positions.
        self._shift = 0 if self._features is None else 1
        #: Requests that get no drafts, because what they need is not here, and those of them of
        #: which the scheduler does not know.
        self._left_out: set[str] = set()
        self._not_reported: list[str] = []
        if weights.has_pages:
            facts = models[0].config
            kv = cache_of_drafts(config, facts, ops)
            work = ops.work_shape(rows, facts.num_heads, kv.spec.kv_heads, kv.spec.head_dim)
            centre_keys(kv, models[0])
            self._pages = DraftingPages(kv, config.page_size)
        self._inputs = StepInputs(
            *(self._most, rows, rows, config.max_model_len, config.page_size, ops.device),
            work=work,
            shift=self._shift,
            windows=len(kv.spec.windows),
        )
        self._passes = [ForwardPasses(each, kv, self._inputs, ops, Mesh()) for each in models]
        #: One for each draft; the last one for all that follow.
        self._strategies = self._recorded(config)
        if ops.card is not None:
            for passes in self._passes:
                passes.warm_up()

    def _recorded(self, config: RunnerConfig) -> list[Strategy]:
        """Recorded steps where that is possible."""
        reason = "enforce_eager"
        if len(self._passes) > 1:
            reason = "each head would need buffers for its logits"
        elif not config.enforce_eager:
            try:
                return [Recorded(self._passes[0], self._inputs)]
            except CaptureError as error:
                reason = str(error)
        return [Eager(passes, self._inputs, reason) for passes in self._passes]

    @property
    def native_seconds(self) -> float:
        """Seconds spent in native calls so far."""
        return sum(passes.native_seconds for passes in self._passes)

    def close(self) -> None:
        """Free the pages. Idempotent."""
        if self._pages is not None:
            self._pages.kv.close()

    @property
    def reads_hidden(self) -> bool:
        """Whether :meth:`keep` must be called after every step."""
        return self._features is not None

    def keep(self, launched: LaunchedBatch, counts: Sequence[int]) -> None:
        """Keep hidden states of a step: ``counts`` rows of each request are not rejected drafts."""
        if self._features is not None:
            self._features.keep(launched, counts)

    @property
    def must_run(self) -> bool:
        """Whether this many hidden states wait that :meth:`prepare` is needed before a step."""
        return self._features is not None and self._features.num > self._few

    def prepare(self, plan: StepPlan) -> None:
        """Before a plan is applied: run what waits if it is much, or if requests start or end.

        Those that start may share pages with those that end.
        """
        features, pages = self._features, self._pages
        if features is None:
            return
        features.settle(self._left_out)
        if pages is not None and (plan.started or plan.dropped or self.must_run):
            parts = []
            for request_id, request in features.waiting():
                begin, end = pages.num_held(request_id, request), request.num_computed
                if end > self._longest or features.first(request_id) > begin:
                    self._leave_out(request_id)  # too long, or a step of it was given up
                else:
                    parts.append(_Part(request_id, request, begin, end))
            self._run_missed(parts)
            features.only_last(features.waiting())
        features.compact()

    def update(self, plan: StepPlan) -> None:
        """Apply the moves of a plan, and forget the requests that it drops or starts."""
        gone = [*plan.dropped, *(start.request_id for start in plan.started)]
        self._left_out.difference_update(gone)
        if self._features is not None:
            self._features.forget(gone)
        if self._pages is not None:
            self._pages.move(plan.copies, self._ops)
            self._pages.forget(gone)

    def vacate(self, pages: Sequence[int]) -> None:
        """Return the memory of pages that are not in use."""
        if self._pages is not None:
            self._pages.vacate(pages)

    def newly_left_out(self) -> Sequence[str]:
        """The requests of which it has turned out that they get no drafts, each of them once."""
        found, self._not_reported = self._not_reported, []
        return found

    def run_prompts(self, rows: Sequence[StepRow], requests: Sequence[RankRequest]) -> None:
        """Run the parts of prompts that are in a plan, so that the first drafts need not wait for
        the whole prompt; and in front of drafts the tokens that were missed.

        Tokens are missed after a prefix hit, a swap, or steps without drafts. A head cannot run
        them, because their hidden states are gone: such a request gets no drafts.
        """
        if self._pages is None:
            return
        parts = []
        for row, request in zip(rows, requests, strict=True):
            if not drafts_for(request) or self._leaves_out(row.request_id, request):
                continue
            end = request.num_computed + row.num_scheduled_tokens - len(row.drafts)
            if row.drafts_on_rank:
                end -= _WITH_DRAFT  # the first draft's step runs the last ones
            elif row.drafts or row.num_scheduled_tokens == 1:
                continue
            if end <= self._longest and self._features is None:
                begin = self._pages.num_held(row.request_id, request)
                parts.append(_Part(row.request_id, request, begin, end))
        self._run_missed(parts)

    def _leaves_out(self, request_id: str, request: RankRequest) -> bool:
        """Whether the request gets no drafts."""
        pages = self._pages
        assert pages is not None
        if not pages.knows(request_id):
            held = pages.num_held(request_id, request)
            is_behind = self._features is not None and held < request.num_computed
            if is_behind or request.embeds is not None:  # an embedding has no token id
                self._leave_out(request_id)
        return request_id in self._left_out

    def _leave_out(self, request_id: str) -> None:
        """Draft no more for the request."""
        if request_id not in self._left_out:
            self._left_out.add(request_id)
            self._not_reported.append(request_id)
            if self._features is not None:
                self._features.forget([request_id])

    def _run_missed(self, parts: Sequence[_Part]) -> None:
        while parts := [part for part in parts if part.begin < part.end]:
            left, now, later = self._most, [], []
            for part in parts:
                middle = min(part.end, part.begin + left)
                left -= middle - part.begin
                now.append(part._replace(end=middle))
                later.append(part._replace(begin=middle))
            self._run([part for part in now if part.begin < part.end])
            parts = later

    def _run(self, parts: Sequence[_Part]) -> None:
        """Write keys and values."""
        pages = self._pages
        assert pages is not None
        if self._features is not None:
            self._features.feed([(part.request_id, part.begin, part.end) for part in parts])
        for part in parts:
            pages.begin_to_write(part.request_id, part.request, part.end)
        known = [part.request.num_computed for part in parts]
        launched = self._launch(parts, None, 0)
        launched.read_tokens()
        for part, num_computed in zip(parts, known, strict=True):
            part.request.num_computed = num_computed
            pages.hold(part.request_id, part.request, part.end)
        self._inputs.forget()

    def draft(self, rows: Sequence[StepRow], requests: Sequence[RankRequest]) -> list[StepRow]:
        """The rows of a plan with the tokens of those drafts of which it has only the number.

        The requests must have the pages of their drafts.
        """
        drafted: dict[int, list[int]] = {}
        begins: dict[int, int] = {}
        for index, row in enumerate(rows):
            if not row.drafts_on_rank:
                continue
            begin = self._first_to_run(row, requests[index])
            drafted[index] = [0] * len(row.drafts) if begin is None else []
            if begin is not None:
                begins[index] = begin
        step, hidden = 0, dict[int, Tensor]()
        while current := [index for index in begins if len(rows[index].drafts) > step]:
            parts = []
            for index in current:
                request, end = requests[index], len(requests[index].token_ids) - self._shift
                parts.append(_Part(rows[index].request_id, request, begins[index], end))
                begins[index] = end
            self._feed(parts, [hidden[index] for index in current if index in hidden])
            launched = self._launch(parts, [drafted[index] for index in current], step)
            for index, token in zip(current, _tokens(launched), strict=True):
                drafted[index].append(token)
                requests[index].token_ids.append(token)
            if self._features is not None:
                outputs = launched.hidden[launched.batch.output_rows]
                hidden = dict(zip(current, outputs, strict=True))
            step += 1
        for index in begins:
            self._drafted(rows[index].request_id, requests[index], drafted[index])
        self._inputs.forget()
        return [
            row._replace(drafts=tuple(drafted[index])) if index in drafted else row
            for index, row in enumerate(rows)
        ]

    def _first_to_run(self, row: StepRow, request: RankRequest) -> int | None:
        """The first position that the first draft's step runs; None: there can be no draft."""
        request_id, end = row.request_id, len(request.token_ids) - self._shift
        if request_id in self._left_out:
            return None
        first = 0 if self._features is None else self._features.first(request_id)
        begin = end - 1
        if self._pages is not None:
            begin = min(begin, self._pages.num_held(request_id, request))
            self._pages.begin_to_write(request_id, request, end + len(row.drafts) - 1)
        return begin if first <= begin else None

    def _feed(self, parts: Sequence[_Part], rows: Sequence[Tensor]) -> None:
        """Give a head its inputs: hidden states of the model, or the ``rows`` it has computed."""
        if self._features is None:
            return
        if rows:
            self._features.feed_rows(torch.stack(tuple(rows)))
        else:
            self._features.feed([(part.request_id, part.begin, part.end) for part in parts])

    def _launch(
        self, parts: Sequence[_Part], drafted: Sequence[Sequence[int]] | None, step: int
    ) -> LaunchedBatch:
        """Run parts. With ``drafted``, draw the next draft of each request like its own token at
        that position.
        """
        for part in parts:
            part.request.num_computed = part.begin
        outputs = 0 if drafted is None else 1
        rows = [StepRow(part.request_id, part.end - part.begin, outputs) for part in parts]
        batch = StepBatch(rows, [part.request for part in parts], range(len(parts)))
        batch.embedded.clear()  # what reads embeddings has left such requests out
        if drafted is not None:
            batch.draw_behind(drafted)
        (launched,) = self._strategies[min(step, len(self._strategies) - 1)].launch(batch)
        return launched

    def _drafted(self, request_id: str, request: RankRequest, tokens: Sequence[int]) -> None:
        """Take the drafts off a request again, and note what was run."""
        del request.token_ids[-len(tokens) :]
        known = len(request.token_ids)
        request.num_computed = known - 1
        if self._features is not None:  # drafts were run with hidden states that it guessed
            self._features.only_last([(request_id, request)])
            tokens = ()
        if self._pages is not None:
            self._pages.hold(request_id, request, known - self._shift, tokens[:-1])


def _tokens(launched: LaunchedBatch) -> list[int]:
    """The drafts that were drawn."""
    found = launched.read_tokens()
    # a token of logits that are not finite is not accepted, but it must be one
    return [
        token if isfinite(best) else 0 for token, best in zip(found.tokens, found.best, strict=True)
    ]


def _smaller_model(weights: DraftingWeights, ops: Ops) -> CausalLM:
    checkpoint = weights.open()
    try:
        values = {**checkpoint.config, **weights.hf_overrides}
        longest = weights.max_model_len
        return build_model(checkpoint, Mesh(), ops, max_model_len=longest, config=values)
    finally:
        checkpoint.close()


def _head(
    weights: DraftingWeights,
    head: HeadConfig,
    most: int,
    config: RunnerConfig,
    ops: Ops,
    mesh: Mesh,
    target: CausalLM,
) -> list[DraftingHead]:
    inputs = torch.zeros(most, head.model.hidden_size, device=ops.device)
    checkpoint = weights.open()
    try:
        ends = _ends(checkpoint, head, config, ops, mesh, target)
        heads = build_head(checkpoint, head, ops, inputs, ends, weights.max_model_len)
    finally:
        checkpoint.close()
    if isinstance(target, Decoder):
        target.streamed = head.streams
    return heads


def _ends(
    files: Checkpoint,
    head: HeadConfig,
    config: RunnerConfig,
    ops: Ops,
    mesh: Mesh,
    target: CausalLM,
) -> ModelEnds:
    """The model's embedding and head. Of several ranks each has a part of them, and only rank 0
    drafts, so it loads them again as a whole if the head lacks one of them.
    """
    complete = head.method == "medusa"
    if head.block:
        complete = head.own_embedding and head.own_head
    elif not complete:
        complete = files.has("model.embed_tokens") and files.has("lm_head")
    if mesh.size == 1 or complete:
        return ModelEnds(target.embed, target.logits)
    checkpoint = config.open_model()
    try:
        source = Source(checkpoint, target.config, Mesh(), ops, config.max_model_len)
        embedding = source.embedding()
        return ModelEnds(embedding, source.head(embedding))
    finally:
        checkpoint.close()
