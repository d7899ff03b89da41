"""Scheduling policies: which request runs first.

A policy is a function from a request to a number. Requests with smaller numbers are admitted first
and preempted last; requests with the same number keep the order of their arrival. To add a policy,
write the function and add its name here: options, checks and help texts follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sdk.engine.scheduling.request import Request

PolicyName = Literal["fcfs", "priority"]
Policy = Callable[["Request"], float]


def fcfs(request: Request) -> float:
    """First come, first served."""
    return 0.0


def priority(request: Request) -> float:
    """``SamplingParams.priority``: smaller runs first."""
    return request.priority


#: The values of ``LLM(scheduling_policy=)``.
POLICIES: Mapping[PolicyName, Policy] = {"fcfs": fcfs, "priority": priority}
