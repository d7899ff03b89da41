"""The rows that a rank runs together in one step, and which of their tokens are output rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sdk.api.logprobs import Sampled
from sdk.engine.plan import Pooled, StateSave, StepRow
from sdk.engine.rank.request import RankRequest
from sdk.kernels.lazy_torch import Tensor
from sdk.sampling.draws import Draw
from sdk.sampling.guidance import apply_guidance
from sdk.sampling.sampler import Sampler
from sdk.sampling.state import SamplerState


class SampledRow(NamedTuple):
    """A row that is sampled: its index in the plan, and the first of its output rows."""

    plan_index: int
    row: StepRow
    request: RankRequest
    first_output: int


class ScoredRow(NamedTuple):
    """A row whose hidden states are used after the run, for prompt log-probabilities or for an
    embedding. Its tokens are ``begin`` to ``end`` of the step; the first of them is token
    ``first`` of the request.
    """

    row: StepRow
    request: RankRequest
    begin: int
    end: int
    first: int

    @property
    def ends(self) -> bool:
        """Whether its last token is the last known token of the request."""
        return self.first + self.end - self.begin == len(self.request.token_ids)


class StepBatch:
    """Rows of one plan that run together. ``plan_indices`` are their indices in the plan."""

    __slots__ = (
        "draws",
        "embedded",
        "negatives",
        "output_rows",
        "plan_indices",
        "requests",
        "rows",
        "sampled",
        "scored",
        "state_saves",
    )

    def __init__(
        self,
        rows: Sequence[StepRow],
        requests: Sequence[RankRequest],
        plan_indices: Sequence[int],
        state_saves: Sequence[StateSave] = (),
    ) -> None:
        self.rows = rows
        #: Of the plan, for any rows.
        self.state_saves = state_saves
        self.requests = requests
        self.plan_indices = plan_indices
        #: The tokens of the step that have logits: sampled ones first, then one for each negative
        #: sequence (CFG).
        self.output_rows: list[int] = []
        #: How each of the sampled output rows is drawn.
        self.draws: list[Draw] = []
        self.sampled: list[SampledRow] = []
        #: For each guided request, by id: the last token of its negative sequence in the step.
        self.negatives: dict[str, int] = {}
        self.scored: list[ScoredRow] = []
        #: Embeddings in place of token ids, each with the first of its tokens in the step.
        self.embedded: list[tuple[int, Tensor]] = []
        output_rows, draws = self.output_rows, self.draws
        begin = 0
        for plan_index, row, request in zip(plan_indices, rows, requests, strict=True):
            _, num_tokens, count, drafts, _ = row
            end = begin + num_tokens
            if request.uses_hidden and (
                request.spec.kind == "embed" or request.num_computed < request.num_prompt - 1
            ):
                self.scored.append(ScoredRow(row, request, begin, end, request.num_computed))
            if request.embeds is not None and request.num_computed < request.num_prompt:
                known = request.num_computed
                self.embedded.append((begin, request.embeds[known : known + num_tokens]))
            if count and request.spec.negative_of is not None:
                self.negatives[request.spec.negative_of] = end - 1
            elif count:
                self.sampled.append(SampledRow(plan_index, row, request, len(output_rows)))
                output_rows += range(end - count, end)
                draws += [Draw.behind(request.state, drafts[:known]) for known in range(count)]
            begin = end
        output_rows += self.negatives.values()

    def draw_behind(self, drafts: Sequence[Sequence[int]]) -> None:
        """Draw the token of each sampled row as if ``drafts`` were the last ones of its request."""
        sampled = zip(self.sampled, drafts, strict=True)
        self.draws = [Draw.behind(one.request.state, tokens) for one, tokens in sampled]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, including drafts."""
        return sum(row.num_scheduled_tokens for row in self.rows)

    @property
    def is_decode(self) -> bool:
        """Whether every row is one token with logits."""
        return len(self.output_rows) == len(self.rows) == self.num_tokens

    @property
    def plain(self) -> bool:
        """Whether only the drawn tokens are used, of a step from token ids: no guidance, no
        log-probabilities, no callbacks, no mirostat, no embeddings.
        """
        special = self.negatives or self.scored or self.embedded
        return not special and all(draw.state.plain for draw in self.draws)

    @property
    def foreseeable(self) -> bool:
        """Whether the next step's draws can be set up without this step's tokens."""
        return all(draw.state.foreseeable for draw in self.draws) and all(
            one.request.structured is None for one in self.sampled
        )

    @property
    def random_draws(self) -> list[tuple[int, SamplerState]]:
        """The output rows that are drawn at random, with their sampling states."""
        return [(row, draw.state) for row, draw in enumerate(self.draws) if not draw.state.greedy]

    def subset(self, indices: Sequence[int]) -> StepBatch:
        """A batch of some of the rows."""
        return StepBatch(
            [self.rows[i] for i in indices],
            [self.requests[i] for i in indices],
            [self.plan_indices[i] for i in indices],
            self.state_saves,
        )


def accepted(drafts: Sequence[int], drawn: Sequence[Sampled | str]) -> list[Sampled]:
    """The first drawn token, and one more for each draft that equals the token before it."""
    found: list[Sampled] = []
    for index, outcome in enumerate(drawn):
        # logits that are not finite fail the request in the next step
        if isinstance(outcome, str) or (found and drafts[index - 1] != found[-1].token_id):
            break
        found.append(outcome)
    return found


def guided_logits(batch: StepBatch, logits: Tensor) -> Tensor:
    """The logits of sampled rows, with guidance applied in place to those of guided requests."""
    drawn = len(batch.draws)
    logits, negative = logits[:drawn], logits[drawn : len(batch.output_rows)]
    own = {one.request.spec.request_id: one for one in batch.sampled}
    for row, request_id in zip(negative, batch.negatives, strict=True):
        one = own[request_id]
        apply_guidance(logits[one.first_output], row, one.request.spec.params.guidance_scale)
    return logits


def score_prompt(
    sampler: Sampler,
    scored_row: ScoredRow,
    hidden: Tensor,
    head: Callable[[Tensor, int], Iterator[Tensor]],
) -> tuple[Sampled, ...]:
    """Log-probabilities of the prompt tokens that follow those just run.

    ``head`` yields the logits of ``hidden``, all rows of one adapter, in several parts.
    """
    request, first = scored_row.request, scored_row.first
    following = request.token_ids[first + 1 : min(first + 1 + len(hidden), request.num_prompt)]
    count = request.spec.params.prompt_logprobs
    assert count is not None
    also = request.state.rules.scored_ids
    scored: list[Sampled] = []
    for logits in head(hidden[: len(following)], scored_row.row.adapter):
        part = following[len(scored) : len(scored) + len(logits)]
        scored += sampler.score(logits, part, count, also)
        del logits  # free them before the next part
    return tuple(scored)


def num_right(batch: StepBatch, found: Sequence[Sequence[int]]) -> list[int]:
    """How many rows of each request of a batch are not those of rejected drafts."""
    counts = []
    for index, row in zip(batch.plan_indices, batch.rows, strict=True):
        rejected = len(row.drafts) - max(len(found[index]) - 1, 0)
        counts.append(row.num_scheduled_tokens - rejected)
    return counts


class Results(NamedTuple):
    """Most fields of a :class:`sdk.engine.plan.StepResult`."""

    tokens: list[Sequence[int]]
    details: dict[str, Sequence[Sampled]]
    prompt_logprobs: dict[str, tuple[Sampled, ...]]
    hidden: dict[str, Pooled]
    errors: dict[str, str]
    complete: dict[str, bool]
    forced: dict[str, Sequence[int]]
