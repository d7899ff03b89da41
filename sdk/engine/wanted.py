"""What becomes of a step's rows: whose token is sampled from which, who guides whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sdk.engine.inputs import Running
from sdk.engine.plan import Sampled, StepPlan


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
