"""Parts around the library that an option of ``LLM`` starts.

They import the library, and most programs need none of them. So the library names them and imports
them only when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PARTS = {
    # tensor_parallel_size, pipeline_parallel_size, remote_workers
    "ranks": ("sdk.cluster.executors.start", "make_ranks"),
    # data_parallel_size
    "replicas": ("sdk.cluster.replicas.served", "ServedReplicas"),
}


def part_around(name: str) -> Any:
    """The class or function that starts the part ``name``."""
    module, attribute = _PARTS[name]
    return getattr(import_module(module), attribute)
