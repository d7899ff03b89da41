"""vLLM's groups of ranks belong to the process; ours belong to their ``LLM``."""

from sdk.kernels.system import SYSTEM


def destroy_model_parallel() -> None:
    """Nothing is left to do: ``LLM.close`` ends an engine's ranks."""


def destroy_distributed_environment() -> None:
    """Nothing is left to do: ``LLM.close`` ends an engine's ranks."""


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Give freed memory back to the system. A cluster of Ray belongs to the host."""
    SYSTEM.trim_heap()
