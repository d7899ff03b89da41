"""Parts around the library that an option of ``LLM`` starts.

They import the library, and most programs need none of them. So the library names them and imports
them only when they are asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sdk.api.errors import UnsupportedError
from sdk.kernels.packages import check_installed
from sdk.kernels.system import SYSTEM

#: Module, name in it, and the options that ask for it.
_PARTS = {
    "ranks": (
        "sdk.cluster.executors.start",
        "make_ranks",
        "several ranks (tensor_parallel_size, pipeline_parallel_size, remote_workers)",
    ),
    "replicas": (
        "sdk.cluster.replicas.served",
        "ServedReplicas",
        "several replicas (data_parallel_size)",
    ),
}


def part_around(name: str) -> Any:
    """The class or function that starts the part ``name``, whose processes exchange tensors of
    torch.

    :raises UnsupportedError: this system cannot start such processes.
    :raises MissingPackageError: torch is not installed. No weights have been read yet.
    """
    module, attribute, options = _PARTS[name]
    if not (SYSTEM.can_fork if name == "replicas" else SYSTEM.can_pass_sockets):
        where = "Linux" if name == "replicas" else "Linux or macOS"
        raise UnsupportedError(
            f"{options} need {where}, this is {SYSTEM.name}: use one engine, or a server on {where}"
        )
    check_installed("torch", f"{options} need")
    return getattr(import_module(module), attribute)
