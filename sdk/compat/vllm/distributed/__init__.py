"""What programs call at their end. Here ``close()`` ends ranks and gives memory back."""

from sdk.compat.vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory as cleanup_dist_env_and_memory,
    destroy_distributed_environment as destroy_distributed_environment,
    destroy_model_parallel as destroy_model_parallel,
)
