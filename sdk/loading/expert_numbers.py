"""What experts that are not all in memory have cost, for ``get_metrics()``."""

from __future__ import annotations

from collections.abc import Callable

from sdk.engine.rank.runner import ModelRunner


def expert_numbers(runner: Callable[[], ModelRunner]) -> dict[str, float]:
    """What the experts that are not all in memory have cost, for ``get_metrics()``."""
    store = runner().weights.weight_store
    if store is None or store.experts is None:
        return {}
    use = store.experts.use()
    return {
        "expert_hits": use.hits,
        "expert_guesses": use.guessed,
        "expert_misses": use.missed,
        "expert_reads": use.reads,
        "expert_read_bytes": use.read_bytes,
        "expert_wait_seconds": use.waited_seconds,
    }
