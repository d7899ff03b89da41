"""What becomes of a step's rows: whose token is sampled from which, who guides whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sdk.engine.inputs import Running
from sdk.engine.plan import Sampled, StepPlan
from sdk.sampling.guidance import guide
from sdk.sampling.sampler import Sampler


@dataclass(slots=True)
class Wanted:
    """The requests to sample and their rows, in the order of the plan."""

    sampling: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    #: By the request that is guided.
    guides: dict[str, int] = field(default_factory=dict)
    #: Requests to look at after the run, with their first and last row + 1.
    special: list[tuple[str, Running, int, int]] = field(default_factory=list)


def wanted_of(plan: StepPlan, rows: Sequence[tuple[Running, int]]) -> Wanted:
    """The rows that are sampled or looked at: those where the known tokens of a request end."""
    wanted = Wanted()
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


def sorted_out(
    request_ids: Sequence[str], outcomes: Sequence[Sampled | str]
) -> tuple[dict[str, Sampled], dict[str, str]]:
    """What was sampled, and why it was not."""
    pairs = list(zip(request_ids, outcomes, strict=True))
    sampled = {name: outcome for name, outcome in pairs if not isinstance(outcome, str)}
    return sampled, {name: outcome for name, outcome in pairs if isinstance(outcome, str)}


def guided_rows(wanted: Wanted, requests: Mapping[str, Running], logits: Tensor) -> Tensor:
    """The rows to sample, each guided one moved away from what its guide says."""
    outputs = len(wanted.sampling) + len(wanted.guides)
    logits, negative = logits[:outputs].tensor_split([len(wanted.sampling)])
    places = {request_id: place for place, request_id in enumerate(wanted.sampling)}
    for row, request_id in zip(negative, wanted.guides, strict=True):
        scale = requests[request_id].start.params.guidance_scale
        guide(logits[places[request_id]], row, scale)
    return logits


def score_prompt(
    sampler: Sampler,
    request: Running,
    hidden: Tensor,
    head: Callable[[Tensor], Iterator[Tensor]],
) -> tuple[Sampled, ...]:
    """Log-probabilities of the prompt tokens that follow the rows just run.

    ``head`` gives the logits of rows ``hidden``, some at a time.
    """
    first = request.num_computed - len(hidden)
    following = request.token_ids[first + 1 : min(first + 1 + len(hidden), request.num_prompt)]
    count = request.start.params.prompt_logprobs
    assert count is not None
    also = sampler.scored_ids(request.start.request_id)
    scored: list[Sampled] = []
    for logits in head(hidden[: len(following)]):
        part = following[len(scored) : len(scored) + len(logits)]
        scored += sampler.score(logits, part, count, also)
        del logits  # before the next are made
    return tuple(scored)
