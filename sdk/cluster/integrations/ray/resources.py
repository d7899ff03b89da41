"""What Ray gave this actor, as options of an LLM."""

from __future__ import annotations

from typing import Any

import ray

from sdk.api.errors import RequestError

#: Of an actor's memory, what is not the LLM's. With Python, torch, Ray Data and a model of 3 MB an
#: actor has 400 MiB, of which 32 are planned for the LLM (docs/cluster/ray.md).
_OUTSIDE = 2**29


def with_resources(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with ``num_threads`` and ``memory`` from the actor's CPUs and memory.

    Options that are given stay, and outside of an actor all of them. Without memory reserved for
    the actor the budget is the LLM's default.

    :raises RequestError: the actor's memory is too small for any model.
    """
    found = dict(options)
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return found
    given = ray.get_runtime_context().get_assigned_resources()
    if found.get("num_threads") is None and given.get("CPU", 0) >= 1:
        found["num_threads"] = int(given["CPU"])
    if found.get("memory") is None and "memory" in given:
        if given["memory"] <= _OUTSIDE:
            raise RequestError(
                f"memory={given['memory']:.0f} of the actor: expected more than {_OUTSIDE} bytes, "
                "which Python, torch and Ray take without a model"
            )
        found["memory"] = int(given["memory"]) - _OUTSIDE
    return found
