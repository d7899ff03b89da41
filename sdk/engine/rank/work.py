"""What a rank runs in one step, and which of its tokens are sampled, guided or scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from sdk.engine.plan import Sampled, StepRow
from sdk.engine.rank.running import Running
from sdk.sampling.draws import Draw
from sdk.sampling.guidance import apply_guidance
from sdk.sampling.sampler import Sampler
from sdk.sampling.state import RequestState


class Outputs(NamedTuple):
    """Those of one row that is sampled: its place in the plan, and the first of its outputs."""

    place: int
    row: StepRow
    request: Running
    first: int


class Scored(NamedTuple):
    """A row that is looked at after the run: its tokens ``begin`` to ``end`` of the step, and
    which token of the request is the first of them.
    """

    row: StepRow
    request: Running
    begin: int
    end: int
    first: int

    @property
    def ends(self) -> bool:
        """Whether the request's known tokens end with it."""
        return self.first + self.end - self.begin == len(self.request.token_ids)


class Work:
    """Rows of one plan that are run together; ``places`` are their numbers in the plan."""

    __slots__ = ("draws", "negatives", "outputs", "places", "rows", "running", "sampled", "scored")

    def __init__(
        self, rows: Sequence[StepRow], running: Sequence[Running], places: Sequence[int]
    ) -> None:
        self.rows = rows
        self.running = running
        self.places = places
        #: Tokens of the step whose logits are wanted: those that are sampled, then those of guides.
        self.outputs: list[int] = []
        #: How each of the former is drawn.
        self.draws: list[Draw] = []
        self.sampled: list[Outputs] = []
        #: By the request that is guided, the token of the step that its guide ends with.
        self.negatives: dict[str, int] = {}
        self.scored: list[Scored] = []
        outputs, draws = self.outputs, self.draws
        begin = 0
        for place, row, request in zip(places, rows, running, strict=True):
            _, num_tokens, count, drafts, _ = row
            end = begin + num_tokens
            if request.looked_at and (
                request.start.kind == "embed" or request.num_computed < request.num_prompt - 1
            ):
                self.scored.append(Scored(row, request, begin, end, request.num_computed))
            if count and request.start.negative_of is not None:
                self.negatives[request.start.negative_of] = end - 1
            elif count:
                self.sampled.append(Outputs(place, row, request, len(outputs)))
                outputs += range(end - count, end)
                draws += [Draw.behind(request.state, drafts[:known]) for known in range(count)]
            begin = end
        outputs += self.negatives.values()

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, drafts too."""
        return sum(row.num_tokens for row in self.rows)

    @property
    def decodes(self) -> bool:
        """Whether every row is one token whose logits are wanted."""
        return len(self.outputs) == len(self.rows) == self.num_tokens

    @property
    def plain(self) -> bool:
        """Whether the tokens alone are wanted, as they were drawn."""
        return not (self.negatives or self.scored) and all(draw.state.plain for draw in self.draws)

    @property
    def foreseeable(self) -> bool:
        """Whether the next step's draws are known before this one's tokens."""
        return all(draw.state.foreseeable for draw in self.draws)

    @property
    def drawing(self) -> list[tuple[int, RequestState]]:
        """The outputs that are drawn at random, with what they are drawn by."""
        return [(row, draw.state) for row, draw in enumerate(self.draws) if not draw.state.greedy]

    def part(self, indices: Sequence[int]) -> Work:
        """Some of its rows."""
        return Work(
            [self.rows[i] for i in indices],
            [self.running[i] for i in indices],
            [self.places[i] for i in indices],
        )


def guided_rows(work: Work, logits: Tensor) -> Tensor:
    """The rows to sample, each guided one moved away from what its guide says."""
    logits, negative = logits[: len(work.outputs)].tensor_split([len(work.draws)])
    own = {one.request.start.request_id: one for one in work.sampled}
    for row, request_id in zip(negative, work.negatives, strict=True):
        one = own[request_id]
        apply_guidance(logits[one.first], row, one.request.start.params.guidance_scale)
    return logits


def score_prompt(
    sampler: Sampler, one: Scored, hidden: Tensor, head: Callable[[Tensor, int], Iterator[Tensor]]
) -> tuple[Sampled, ...]:
    """Log-probabilities of the prompt tokens that follow those just run.

    ``head`` gives the logits of rows ``hidden`` of one adapter, some at a time.
    """
    request, first = one.request, one.first
    following = request.token_ids[first + 1 : min(first + 1 + len(hidden), request.num_prompt)]
    count = request.start.params.prompt_logprobs
    assert count is not None
    also = request.state.rules.scored_ids
    scored: list[Sampled] = []
    for logits in head(hidden[: len(following)], one.row.adapter):
        part = following[len(scored) : len(scored) + len(logits)]
        scored += sampler.score(logits, part, count, also)
        del logits  # before the next are made
    return tuple(scored)
