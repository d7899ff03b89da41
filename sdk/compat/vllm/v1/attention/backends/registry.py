"""The names of vLLM's kernels of attention. Choosing one has no effect here."""

from enum import Enum


class AttentionBackendEnum(Enum):
    """The values are the names."""

    FLASH_ATTN = "FLASH_ATTN"
    FLASHINFER = "FLASHINFER"
    FLEX_ATTENTION = "FLEX_ATTENTION"
    TORCH_SDPA = "TORCH_SDPA"
    TRITON_ATTN = "TRITON_ATTN"
    ROCM_ATTN = "ROCM_ATTN"
    CPU_ATTN = "CPU_ATTN"
