"""The tensors of all caches of a rank: keys and values in pages and frames, recurrent states."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sdk.api.errors import RequestError
from sdk.engine.plan import Copy, Duplicate, Frames, StateCopy, Swap
from sdk.engine.rank.cache_memory import CacheMemory
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.engine.rank.swap_storage import SwapStorage
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.kv.recoder import page_recoder
from sdk.kernels.kv.tiers import KEPT_PAGES, page_tier
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.states import LayerState
from sdk.models.configs.config import ModelConfig
from sdk.models.parallel import Mesh
from sdk.quant.caches import AttentionCache, Cache, StateCache, tokens_in_window, window_groups
from sdk.quant.spec import KVSpec, KVTypes

if TYPE_CHECKING:
    from sdk.engine.rank.rounded_states import RoundedStates


def kv_spec(
    config: ModelConfig,
    page_size: int,
    dtype: str,
    heads: Callable[[int], int] = lambda count: count,
    *,
    ranks: int = 1,
    windows: bool = False,
) -> KVSpec:
    """The caches of a model. ``heads``: how many there are of a cache's key/value heads, on one
    rank or on all. ``ranks``: recurrent states are those of one of so many. ``windows``: window
    groups have memory of their own.

    The layers of a model that is not causal share the pages of one: keys and values are read in the
    step that writes them, because a text runs in one step.

    :raises RequestError: ``dtype`` does not suit the model.
    """
    caches = config.rank_caches(ranks) if config.causal else config.caches[:1]
    caches = tuple(
        one._replace(kv_heads=heads(one.kv_heads)) if isinstance(one, AttentionCache) else one
        for one in caches
    )
    kv_heads, groups = heads(config.num_kv_heads), window_groups(caches) if windows else ()
    plain = all(_is_plain(one, kv_heads, config.head_dim) for one in caches)
    return KVSpec(
        num_layers=len(caches),
        kv_heads=kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=_dtype_of_caches(config, dtype),
        caches=() if plain and not groups else caches,
        windows=groups,
    )


def _is_plain(cache: Cache, kv_heads: int, head_dim: int) -> bool:
    """Whether a cache is as ``KVSpec`` describes it without ``caches``, but for its window."""
    if not isinstance(cache, AttentionCache):
        return False
    return cache._replace(window=None) == AttentionCache(kv_heads, head_dim, head_dim)


def _dtype_of_caches(config: ModelConfig, dtype: str) -> str:
    """The types with the caches to skip in place of the layers.

    :raises RequestError: a layer to skip does not exist in the model; latents, which are keys and
        values in one, would have two types, or tiers.
    """
    types = None if ">" in dtype else KVTypes.parse(dtype)
    if config.latent is not None and (types is None or types.k != types.v):
        raise RequestError(
            f"kv_cache_dtype: {dtype!r}: expected one type: {config.model_type} keeps one vector "
            "for each token, which is key and value (latent attention)"
        )
    if types is None:
        return dtype
    for layer in types.skip_layers:
        if layer >= config.num_layers:
            raise RequestError(
                f"kv_cache_dtype: {dtype!r} skips layer {layer} of {config.num_layers}"
            )
    if not config.causal or not types.skip_layers:
        return dtype
    skipped = {cache for layer in types.skip_layers for cache in config.caches_of(layer)}
    return str(replace(types, skip_layers=tuple(sorted(skipped))))


def cache_of_rank(config: RunnerConfig, model: ModelConfig, mesh: Mesh, ops: Ops) -> KVCache:
    """The cache of one rank, empty."""
    layers = config.layers_of(mesh.stage) or range(model.num_layers)
    spec = kv_spec(
        model,
        config.page_size,
        config.kv_dtype,
        lambda count: mesh.heads(model.num_heads, count).kv_count,
        ranks=mesh.size,
        windows=bool(config.num_frames),
    )
    own = caches_of_layers(model, layers) if model.causal else range(1)
    return KVCache(
        spec.of_layers(own),
        config.num_pages,
        ops.device,
        num_frames=config.num_frames,
        num_states=config.num_states,
        num_rounded=config.num_rounded,
        keys_transposed=ops.keys_transposed,
        first_heads=[_first_head(model, mesh, model.caches[cache]) for cache in own],
        first_layer=own.start,
        rank=mesh.rank,
        num_swap_pages=config.num_swap_pages,
        swap_path=config.swap_path,
        swap_parts=config.swap_parts,
        keep=config.kv_keep,
    )


def _first_head(model: ModelConfig, mesh: Mesh, cache: Cache) -> int:
    """The first of a cache's key/value heads that a rank has."""
    if isinstance(cache, StateCache):
        return 0
    return mesh.heads(model.num_heads, cache.kv_heads).kv_start


def caches_of_layers(model: ModelConfig, layers: range) -> range:
    """The caches of a stage's layers, which are next to each other."""
    used = [cache for layer in layers for cache in model.caches_of(layer)]
    return range(min(used), max(used) + 1) if used else range(0)


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
    return kv_spec(model, page_size, dtype)


class KVCache:
    """What every layer of one rank keeps of the tokens before.

    ``layers``: for each cache of ``spec`` its pages, or its states. Layers that keep all tokens are
    in the memory of ``num_pages`` pages. Each window group has a memory of as many frames as
    ``num_frames`` says, whose ids its page tables contain, and states have one of ``num_states``
    slots: ``KVSpec.region``. With ``num_rounded`` snapshots of states have that many places of
    their own, in 16 bits, as one more region (``rounded_states.py``). Within a place all layers are
    next to each other, so that a few used ones touch little memory: spread over the layers, one
    token of a 30-layer model would touch 60 huge pages of 2 MiB. A layer of pages has its keys, its
    values, and the scales of both if they are codes.

    ``keys_transposed``: the memory order of a page's keys that the backend needs (see ``KVPages``).
    ``first_heads``: by layer the first of its key/value heads that this rank holds; empty: 0.
    ``first_layer``: the first of the model's caches here. ``rank``: this one among those that share
    the heads of states.
    ``num_swap_pages`` slots, in ``swap_parts``, are the swap space: see
    :class:`~sdk.engine.rank.swap_storage.SwapStorage`. ``keep``: pages at both ends of a request
    that stay in the first tier.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        device: torch.device | str = "cpu",
        *,
        num_frames: Sequence[int] = (),
        num_states: int = 0,
        num_rounded: int = 0,
        keys_transposed: bool = True,
        first_heads: Sequence[int] = (),
        first_layer: int = 0,
        rank: int = 0,
        num_swap_pages: int = 0,
        swap_path: str | None = None,
        swap_parts: Sequence[int] = (1,),
        keep: tuple[int, int] = KEPT_PAGES,
    ) -> None:
        self.spec = spec
        self.keep = keep
        self.num_pages = num_pages
        #: By region: how many places it has.
        self.counts = (num_pages, *num_frames, num_states)
        if len(self.counts) != spec.num_regions:
            raise ValueError(
                f"KVCache: expected frames of {len(spec.windows)} window groups, found {num_frames}"
            )
        self._num_rounded = num_rounded
        self.first_heads = tuple(first_heads) or (0,) * spec.num_layers
        self.first_layer, self.rank = first_layer, rank
        self._device = torch.device(device)
        self._keys_transposed = keys_transposed
        self._swap = num_swap_pages, swap_path, tuple(swap_parts)
        self._memories: list[CacheMemory] = []
        self._storage: SwapStorage | None = None
        self.allocate()

    def allocate(self) -> None:
        """Allocate empty places; may be called again after :meth:`close`.

        :raises OutOfMemoryError: there is not enough memory.
        """
        spec = self.spec
        self._memories = [
            CacheMemory(count, spec.region_bytes(region), self._device)
            for region, count in enumerate(self.counts)
        ]
        self.layers: list[KVPages | LayerState] = [LayerState({})] * spec.num_layers
        for region, memory in enumerate(self._memories):
            for layer, found in self._layers_of(region, memory.places).items():
                self.layers[layer] = found
        self._rounded = self._allocate_rounded() if self._num_rounded else None
        num_swap_pages, swap_path, parts = self._swap
        self._recode: Callable[[int, int], None] | None = None  # bound when first needed
        if num_swap_pages:
            memories = [*self._memories[:-1], self._snapshot_memory][: len(parts)]
            places = [memory.places for memory in memories]
            self._storage = SwapStorage(places, num_swap_pages, swap_path, parts)

    def _layers_of(self, region: int, places: Tensor) -> dict[int, KVPages | LayerState]:
        """The layers whose caches are in one memory, uint8 ``[count, bytes]``."""
        spec, layers = self.spec, self.spec.layers_in(region)
        offset = 0
        if region == spec.num_regions - 1:
            return dict(_states_of(places, spec))
        below: dict[int, KVPages] = {}
        count, nbytes = places.shape
        for index, tier in reversed(list(enumerate(spec.tiers))):
            pages, offset, own = places.view(count << index, nbytes >> index), 0, {}
            for layer in layers:
                found = _layer(pages, tier, layer, offset, self._keys_transposed)
                own[layer] = replace(found, next_tier=below.get(layer))
                offset += tier.layer_bytes(layer)
            below = own
        return dict(below)

    def _allocate_rounded(self) -> RoundedStates:
        """The memory of snapshots in 16 bits."""
        from sdk.engine.rank.rounded_states import RoundedStates

        spec = self.snapshot_spec
        nbytes = spec.region_bytes(spec.num_regions - 1)
        memory = CacheMemory(self._num_rounded, nbytes, self._device)
        exact = {i: one for i, one in enumerate(self.layers) if isinstance(one, LayerState)}
        caches = [one for one in self.spec.caches if isinstance(one, StateCache)]
        return RoundedStates(memory, exact, _states_of(memory.places, spec), caches)

    @property
    def snapshot_spec(self) -> KVSpec:
        """The spec with the states as snapshots have them."""
        return self.spec.with_rounded_states if self._num_rounded else self.spec

    def snapshots(self, layer: int) -> LayerState:
        """The memory of snapshots of one layer's states."""
        found = self.layers[layer] if self._rounded is None else self._rounded.layers[layer]
        assert isinstance(found, LayerState)
        return found

    @property
    def _snapshot_memory(self) -> CacheMemory:
        return self._memories[-1] if self._rounded is None else self._rounded.memory

    @property
    def pages(self) -> list[KVPages]:
        """The layers of a model all of whose layers have keys and values."""
        return [layer for layer in self.layers if isinstance(layer, KVPages)]

    @property
    def most_tokens(self) -> int:
        """The most tokens of a step of :meth:`rings`."""
        windows = zip(self.spec.windows, self.counts[1:-1], strict=True)
        size = self.spec.page_size
        most = [tokens_in_window(window, count - 1, size) for window, count in windows]
        return min(most, default=sys.maxsize)

    def rings(self, pages: int) -> tuple[Frames, ...]:
        """Frames for so many pages of the only request there is: each group's in turn."""
        counts = enumerate(self.counts[1:-1])
        return tuple(
            Frames(group, 0, tuple(1 + page % (count - 1) for page in range(pages)))
            for group, count in counts
        )

    @property
    def can_vacate(self) -> bool:
        """Whether the memory of single places can be returned."""
        return any(memory.can_vacate for memory in self._memories)

    def copy(self, copies: Sequence[Copy], ops: Ops, leaving: Sequence[int] = ()) -> None:
        """Copy pages to and from the swap space, move and duplicate pages, in the order given.

        ``leaving``: slots of states that are to be vacated. The memory of each goes back right
        after the last copy from it: a step may round several states, and until then all of their
        places would be written beside the slots (4 % of a Mamba-2 with two requests).
        """
        of_states = ((i, one) for i, one in enumerate(copies) if isinstance(one, StateCopy))
        last = {one.slot: i for i, one in of_states if one.slot in leaving}
        for i, one in enumerate(copies):
            if isinstance(one, Swap):
                assert self._storage is not None
                self._storage.run(one)
            elif isinstance(one, StateCopy):
                assert self._rounded is not None
                move = self._rounded.save if one.out else self._rounded.load
                move(one.slot, one.place)
                if last.get(one.slot) == i:
                    self.vacate((one.slot,), len(self._memories) - 1)
            elif isinstance(one, Duplicate) and one.group is not None:
                self._memories[1 + one.group].copy(one.source, one.target)
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
            self._memories[0].copy(index, at, above)
            return
        if self._recode is None:
            self._recode = page_recoder(ops.context, self.pages)
        self._recode(source, target)

    def vacate(self, places: Sequence[int], region: int = 0) -> None:
        """Return the memory of these places of a region to the system: they are zeros until they
        are written.

        Does nothing unless ``can_vacate``, for example on a GPU.
        """
        memory = self._snapshot_memory if region == len(self._memories) else self._memories[region]
        memory.vacate(places)

    def close(self) -> None:
        """Drop the tensors. Idempotent."""
        self.layers, self._recode = [], None
        for memory in (*self._memories, self._snapshot_memory):
            memory.close()
        self._rounded = None
        if self._storage is not None:
            self._storage.close()
            self._storage = None


def _view(places: Tensor, begin: int, name: str | torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """``[count, *shape]`` of ``places``, contiguous within a place, from byte ``begin`` on."""
    dtype = getattr(torch, name) if isinstance(name, str) else name
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    strides.insert(0, places.shape[1] // dtype.itemsize)
    values = places.view(-1).view(dtype)
    at = values.storage_offset() + begin // dtype.itemsize
    return values.as_strided((places.shape[0], *shape), strides, at)


def _states_of(places: Tensor, spec: KVSpec) -> dict[int, LayerState]:
    """The layers with states in one memory, uint8 ``[count, bytes]``."""
    states, offset = dict[int, LayerState](), 0
    for layer in spec.layers_in(spec.num_regions - 1):
        cache = spec.caches[layer]
        assert isinstance(cache, StateCache)
        states[layer] = _state(places, cache, offset)
        offset += cache.nbytes
    return states


def _state(places: Tensor, cache: StateCache, begin: int) -> LayerState:
    """One layer's views of the slots of states, from byte ``begin`` of a slot on."""
    parts = {}
    for part, size in zip(cache.parts, cache.part_bytes, strict=True):
        parts[part.name] = _view(places, begin, part.dtype, part.shape)
        begin += size
    return LayerState(parts)


def _layer(pages: Tensor, spec: KVSpec, layer: int, begin: int, keys_transposed: bool) -> KVPages:
    """One layer's views of ``pages [num_pages, bytes]``, from byte ``begin`` of a page on."""
    cache, slots = spec.cache(layer), spec.page_size
    heads = cache.kv_heads
    keys, values = spec.parts(layer)
    codes, scales, offset = [], [], 0
    widths = cache.key_dim, 0 if cache.latent else cache.value_dim
    for part, values_per_head in zip((keys, values), widths, strict=True):
        width = values_per_head // part.type.packing
        transposed = keys_transposed and part is keys
        shape = (heads, width, slots) if transposed else (heads, slots, width)
        codes.append(_view(pages, begin + offset, part.type.storage_dtype, shape))
        offset += part.code_bytes
    for part in (keys, values):
        rows = heads * part.groups
        found = None
        if rows:
            found = _view(pages, begin + offset, part.type.scale_dtype, (rows, slots))
        scales.append(found)
        offset += part.scale_bytes
    k = codes[0].transpose(2, 3) if keys_transposed else codes[0]
    return KVPages(k, codes[1], keys.type, values.type, scales[0], scales[1])
