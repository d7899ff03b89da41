"""The page tensors of all layers."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from sdk.kernels.layouts import KVPages
from sdk.models.config import ModelConfig
from sdk.quant.spec import KVSpec

_LINE = 64  # bytes of a cache line


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

    ``keys_transposed``: how a page's keys lie, as the backend wants them (see ``KVPages``).
    One zeroed allocation of ``num_pages * spec.page_bytes`` bytes, which the operating system backs
    with memory only where a page has been written; ``close`` returns all of it at once. All layers
    of a page lie together, so that few pages in use touch little memory: spread over the layers,
    one token of a 30-layer model would touch 60 huge pages of 2 MiB. Within a page a layer has its
    keys, its values, and for int8 the scales of both.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        device: torch.device | str = "cpu",
        *,
        keys_transposed: bool = True,
    ) -> None:
        self.spec = spec
        self.num_pages = num_pages
        size = num_pages * spec.page_bytes
        if torch.device(device).type == "cpu":
            memory = torch.from_numpy(np.zeros(size + _LINE, dtype=np.uint8))
        else:
            memory = torch.zeros(size + _LINE, dtype=torch.uint8, device=device)
        begin = -memory.data_ptr() % _LINE  # a vector that crosses cache lines loads twice
        memory = memory[begin : begin + size]
        self.layers = [
            _layer(memory, spec, num_pages, layer, keys_transposed)
            for layer in range(spec.num_layers)
        ]

    def close(self) -> None:
        """Drop the tensors. Idempotent."""
        self.layers = []


def _layer(
    memory: Tensor, spec: KVSpec, num_pages: int, layer: int, keys_transposed: bool
) -> KVPages:
    """One layer's views of the cache's bytes."""
    dtype = getattr(torch, spec.dtype)
    heads, slots, width = spec.kv_heads, spec.page_size, spec.head_dim
    begin = layer * spec.layer_bytes
    count = heads * slots * width

    def view(dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
        """``[num_pages, *shape]``, contiguous within a page, ``offset`` bytes into the layer."""
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        strides.insert(0, spec.page_bytes // dtype.itemsize)
        values = memory.view(dtype)
        at = values.storage_offset() + (begin + offset) // dtype.itemsize
        return values.as_strided((num_pages, *shape), strides, at)

    if keys_transposed:
        k = view(dtype, 0, (heads, width, slots)).transpose(2, 3)
    else:
        k = view(dtype, 0, (heads, slots, width))
    v = view(dtype, count * dtype.itemsize, (heads, slots, width))
    if dtype != torch.int8:
        return KVPages(k, v)
    scales = (
        view(torch.float16, 2 * count + i * heads * slots * 2, (heads, slots)) for i in (0, 1)
    )
    return KVPages(k, v, *scales)
