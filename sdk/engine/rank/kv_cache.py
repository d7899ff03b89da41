"""The page tensors of all layers."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from sdk.api.errors import OutOfMemoryError, RequestError
from sdk.engine.plan import Copy, Swap
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.engine.rank.swap_storage import SwapStorage
from sdk.kernels.kv_pages import KVPages
from sdk.kernels.kv_tiers import KEPT_PAGES, page_tier
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.ops import Ops
from sdk.models.config import ModelConfig
from sdk.models.parallel import Mesh
from sdk.quant.caches import AttentionCache, Cache
from sdk.quant.spec import KVSpec, KVTypes

_LINE = 64  # bytes of a cache line
#: Address space for more pages than there is memory for: Python names the flag from 3.13 on.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def kv_spec(config: ModelConfig, kv_heads: int, page_size: int, dtype: str) -> KVSpec:
    """The KV cache of a model for ``kv_heads`` of its heads: those of one rank or of all ranks.

    The layers of a model that is not causal share the pages of one: keys and values are read in the
    step that writes them, because a text runs in one step.

    :raises RequestError: a layer to skip does not exist in the model; latents, which are keys and
        values in one, would have two types, or tiers.
    """
    types = None if ">" in dtype else KVTypes.parse(dtype)
    if config.latent is not None and (types is None or types.k != types.v):
        raise RequestError(
            f"kv_cache_dtype: {dtype!r}: expected one type: {config.model_type} keeps one vector "
            "for each token, which is key and value (latent attention)"
        )
    for layer in () if types is None else types.skip_layers:
        if layer >= config.num_layers:
            raise RequestError(
                f"kv_cache_dtype: {dtype!r} skips layer {layer} of {config.num_layers}"
            )
    return KVSpec(
        num_layers=config.num_layers if config.causal else 1,
        kv_heads=kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        caches=() if config.latent is None else _of_heads(config.caches, kv_heads),
    )


def _of_heads(caches: Sequence[Cache], kv_heads: int) -> tuple[AttentionCache, ...]:
    """Caches of keys and values for so many heads."""
    attention = (one for one in caches if isinstance(one, AttentionCache))
    return tuple(one._replace(kv_heads=kv_heads) for one in attention)


def cache_of_rank(config: RunnerConfig, model: ModelConfig, mesh: Mesh, ops: Ops) -> KVCache:
    """The cache of one rank, empty."""
    heads = mesh.heads(model.num_heads, model.num_kv_heads)
    layers = config.layers_of(mesh.stage) or range(model.num_layers)
    spec = kv_spec(model, heads.kv_count, config.page_size, config.kv_dtype)
    return KVCache(
        spec.of_layers(layers) if model.causal else spec,
        config.num_pages,
        ops.device,
        keys_transposed=ops.keys_transposed,
        first_head=heads.kv_start,
        first_layer=layers.start,
        num_swap_pages=config.num_swap_pages,
        swap_path=config.swap_path,
        keep=config.kv_keep,
    )


def cache_of_drafts(config: RunnerConfig, model: ModelConfig, ops: Ops) -> KVCache:
    """The cache of a smaller model that drafts, with a page for each of the model's."""
    return KVCache(
        drafting_kv_spec(model, config.page_size, config.kv_dtype),
        config.num_pages,
        ops.device,
        keys_transposed=ops.keys_transposed,
        keep=config.kv_keep,
    )


def drafting_kv_spec(model: ModelConfig, page_size: int, dtype: str) -> KVSpec:
    """The KV cache of a smaller model that drafts: all of its heads, in the types of the model's.

    Layers that the model skips have no counterpart in it.
    """
    if ">" not in dtype:
        dtype = str(replace(KVTypes.parse(dtype), skip_layers=()))
    return kv_spec(model, model.num_kv_heads, page_size, dtype)


def _map(nbytes: int) -> mmap.mmap:
    """Zeros on huge pages, which numpy asks for too: with small ones a step at a context of 4,096
    tokens misses the TLB all the time."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        mapping = mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        raise OutOfMemoryError(f"{nbytes} bytes for KV pages: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class KVCache:
    """Keys and values of ``num_pages`` pages for every layer of one rank.

    ``keys_transposed``: the memory order of a page's keys that the backend needs (see ``KVPages``).
    The cache is one zeroed allocation of ``num_pages * spec.page_bytes`` bytes. The operating
    system backs it with memory only where a page has been written; ``vacate`` returns the memory of
    single pages, ``close`` all of it. All layers of a page are next to each other, so that a few
    used pages touch little memory: spread over the layers, one token of a 30-layer model would
    touch 60 huge pages of 2 MiB. Within a page a layer has its keys, its values, and the scales of
    both if they are codes.

    ``first_head``, ``first_layer``: the first of the model's key/value heads and layers that this
    rank holds.
    ``num_swap_pages`` more pages are in swap space: see
    :class:`~sdk.engine.rank.swap_storage.SwapStorage`. ``keep``: pages at both ends of a request
    that stay in the first tier.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        device: torch.device | str = "cpu",
        *,
        keys_transposed: bool = True,
        first_head: int = 0,
        first_layer: int = 0,
        num_swap_pages: int = 0,
        swap_path: str | None = None,
        keep: tuple[int, int] = KEPT_PAGES,
    ) -> None:
        self.spec = spec
        self.keep = keep
        self.num_pages = num_pages
        self.first_head, self.first_layer = first_head, first_layer
        self._device = torch.device(device)
        self._keys_transposed = keys_transposed
        self._swap = num_swap_pages, swap_path
        self._mapping: mmap.mmap | None = None
        self._storage: SwapStorage | None = None
        self.allocate()

    def allocate(self) -> None:
        """Allocate empty pages; may be called again after :meth:`close`.

        :raises OutOfMemoryError: there is not enough memory.
        """
        spec, num_pages = self.spec, self.num_pages
        size = num_pages * spec.page_bytes
        if self._device.type == "cpu":
            self._mapping = _map(size)
            memory = torch.from_numpy(np.frombuffer(self._mapping, np.uint8, size))
        else:
            memory = self._on_device(size)
        below: Sequence[KVPages | None] = [None] * spec.num_layers
        for index, tier in reversed(list(enumerate(spec.tiers))):
            self.layers = []
            pages = memory.view(num_pages << index, spec.page_bytes >> index)
            offset = 0
            for layer, lower in enumerate(below):
                own = _layer(pages, tier, layer, offset, self._keys_transposed)
                self.layers.append(replace(own, next_tier=lower))
                offset += tier.layer_bytes(layer)
            below = self.layers
        self._memory = memory
        num_swap_pages, swap_path = self._swap
        self._recode: Callable[[int, int], None] | None = None  # bound when first needed
        if num_swap_pages:
            pages = memory.view(num_pages, spec.page_bytes)
            self._storage = SwapStorage(pages, num_swap_pages, swap_path)

    def _on_device(self, size: int) -> Tensor:
        try:
            memory = torch.zeros(size + _LINE, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(f"{size} bytes for KV pages: {error}") from error
        begin = -memory.data_ptr() % _LINE  # a vector that crosses cache lines loads twice
        return memory[begin : begin + size]

    @property
    def can_vacate(self) -> bool:
        """Whether the memory of single pages can be returned."""
        return self._mapping is not None and hasattr(self._mapping, "madvise")

    def copy(self, copies: Sequence[Copy], ops: Ops) -> None:
        """Copy pages to and from the swap space, move and duplicate pages, in the order given."""
        for one in copies:
            if isinstance(one, Swap):
                assert self._storage is not None
                self._storage.run(one)
            else:
                self._move(one.source, one.target, ops)

    @property
    def has_swap_file(self) -> bool:
        """Whether copies may fail."""
        return self._swap[0] > 0 and self._swap[1] is not None

    def unwritten(self) -> dict[int, str]:
        """The slots that the last copies could not write to the swap file, and why."""
        return {} if self._storage is None else self._storage.unwritten()

    def _move(self, source: int, target: int, ops: Ops) -> None:
        """Copy a page within its tier or recode it for a lower one."""
        (above, index), (below, at) = page_tier(source), page_tier(target)
        if above == below:
            pages = self._memory.view(self.num_pages << above, self.spec.page_bytes >> above)
            if self._mapping is None:
                pages[at] = pages[index]
            else:  # torch would wait for its threads: 6 ms for 360 KiB on a busy machine
                whole = pages.numpy()
                whole[at] = whole[index]
            return
        if self._recode is None:
            self._recode = ops.page_recoder(self.layers)
        self._recode(source, target)

    def vacate(self, pages: Sequence[int]) -> None:
        """Return the memory of these pages to the system: they are zeros until they are written.

        Does nothing unless ``can_vacate``, for example on a GPU.
        """
        if self._mapping is None or not self.can_vacate:
            return
        size, unit = self.spec.page_bytes, mmap.PAGESIZE
        ordered = sorted(pages)
        first = 0
        for i, page in enumerate(ordered):
            if i + 1 < len(ordered) and ordered[i + 1] == page + 1:
                continue
            begin = -(-ordered[first] * size // unit) * unit
            end = (page + 1) * size // unit * unit
            if begin < end:
                self._mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
            first = i + 1

    def close(self) -> None:
        """Drop the tensors. Idempotent."""
        self.layers, self._recode = [], None
        self._memory = torch.empty(0)
        self._mapping = None
        if self._storage is not None:
            self._storage.close()
            self._storage = None


def _layer(pages: Tensor, spec: KVSpec, layer: int, begin: int, keys_transposed: bool) -> KVPages:
    """One layer's views of ``pages [num_pages, bytes]``, from byte ``begin`` of a page on."""
    cache, slots = spec.cache(layer), spec.page_size
    heads = cache.kv_heads

    def view(dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
        """``[num_pages, *shape]``, contiguous within a page, ``offset`` bytes into the layer."""
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        strides.insert(0, pages.shape[1] // dtype.itemsize)
        values = pages.view(-1).view(dtype)
        at = values.storage_offset() + (begin + offset) // dtype.itemsize
        return values.as_strided((pages.shape[0], *shape), strides, at)

    keys, values = spec.parts(layer)
    codes, scales, offset = [], [], 0
    widths = cache.key_dim, 0 if cache.latent else cache.value_dim
    for part, values_per_head in zip((keys, values), widths, strict=True):
        width = values_per_head // part.type.packing
        transposed = keys_transposed and part is keys
        shape = (heads, width, slots) if transposed else (heads, slots, width)
        codes.append(view(part.type.storage_dtype, offset, shape))
        offset += part.code_bytes
    for part in (keys, values):
        rows = heads * part.groups
        scales.append(view(part.type.scale_dtype, offset, (rows, slots)) if rows else None)
        offset += part.scale_bytes
    k = codes[0].transpose(2, 3) if keys_transposed else codes[0]
    return KVPages(k, codes[1], keys.type, values.type, scales[0], scales[1])
