"""Which values options of an engine may have."""

from __future__ import annotations

from sdk.api.scheduling_policy import POLICIES

#: vLLM's other spellings of types.
SHORT_FOR: dict[str, str] = {"half": "float16", "float": "float32"}
#: The words that an option may be.
CHOICES: dict[str, tuple[str | None, ...]] = {
    "distributed_executor_backend": (None, "mp", "uni", "ray"),
    "tokenizer_mode": ("auto",),
    "dtype": ("auto", "float32", "float16", "bfloat16", "float", "half"),
    "device": ("auto", "cpu", "cuda"),
    "load_format": ("auto", "gguf", "safetensors"),
    "scheduling_policy": POLICIES,
    "prefix_eviction": ("lru", "cost"),
    "state_snapshot_dtype": ("auto", "float16"),
    "replica_routing": ("state", "requests", "round_robin"),
    "lora_dtype": ("auto", "int8"),
    "compute": ("auto", "exact"),
}
#: The least and the largest value of a number.
COUNTS: dict[str, tuple[int, int]] = {
    "tensor_parallel_size": (1, 64),
    "pipeline_parallel_size": (1, 64),
    "data_parallel_size": (1, 64),
    "prefill_replicas": (0, 63),
    "num_redundant_experts": (0, 2**16),
    "seed": (0, 2**64 - 1),
    "num_threads": (1, 1024),
    "max_model_len": (1, 2**31 - 1),
    "max_num_seqs": (1, 4096),
    "max_num_batched_tokens": (1, 2**20),
    "max_waiting": (0, 2**31 - 1),
    "block_size": (1, 1024),
    "max_loras": (1, 4096),
    "max_lora_rank": (1, 4096),
    "max_cpu_loras": (1, 4096),
}
