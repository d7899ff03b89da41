"""The page tensors of all layers."""

from __future__ import annotations

import numpy as np
import torch

from sdk.kernels.layouts import KVPages
from sdk.models.config import ModelConfig
from sdk.quant.spec import KVSpec


def kv_spec(config: ModelConfig, kv_heads: int, page_size: int, dtype: str) -> KVSpec:
    """The KV cache of a model for ``kv_heads`` of its heads: one rank's, or all ranks' together."""
    return KVSpec(
        num_layers=config.num_layers,
        kv_heads=kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
    )


class KVCache:
    """Keys and values of ``num_pages`` pages for every layer of one rank.

    One zeroed allocation of ``num_pages * spec.page_bytes`` bytes, which the operating system backs
    with memory only where a page has been written; ``close`` returns all of it at once. All layers
    of a page lie together, so that few pages in use touch little memory: spread over the layers,
    one token of a 30-layer model would touch 60 huge pages of 2 MiB.
    """

    def __init__(self, spec: KVSpec, num_pages: int) -> None:
        self.spec = spec
        self.num_pages = num_pages
        shape = (num_pages, spec.num_layers, 2, spec.kv_heads, spec.page_size, spec.head_dim)
        if spec.dtype == "bfloat16":  # numpy has no bfloat16; two zero bytes are its zero
            pages = torch.from_numpy(np.zeros(shape, dtype=np.int16)).view(torch.bfloat16)
        else:
            pages = torch.from_numpy(np.zeros(shape, dtype=spec.dtype))
        self.layers = [
            KVPages(pages[:, layer, 0], pages[:, layer, 1]) for layer in range(spec.num_layers)
        ]

    def close(self) -> None:
        """Drop the tensors. Idempotent."""
        self.layers = []
