"""Pins prefixes in the cache, reads them for snapshots, and writes snapshots back.

All of this happens between two steps. A prefix is identified by its tokens (those of images as in
``image_keys.py``) and its salt, in whole pages: the rest of a last page, at most ``page_size - 1``
tokens, is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.api.errors import OutOfMemoryError, RequestError, SnapshotError
from sdk.api.params import SamplingParams
from sdk.engine.executor import Executor
from sdk.engine.job import Job
from sdk.engine.pages.frames import Held
from sdk.engine.pages.groups import Groups
from sdk.engine.pages.image_keys import PlacedImage, placed, placed_before
from sdk.engine.pages.page_pool import PageKey
from sdk.engine.pages.swapped_places import NO_HIT
from sdk.engine.plan import SequenceSpec
from sdk.engine.rank.kv_transfer import (
    Bytes,
    LayerKV,
    LayerStates,
    StoredKV,
    joined,
    joined_states,
    read_layer,
    read_state,
    write_layer,
    write_state,
)
from sdk.engine.rank.page_rows import joined_rows, read_rows, write_rows
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.kernels.kv.tiers import page_tier
from sdk.quant.spec import KVSpec

#: Tokens of one layer that are sent to or from a rank at a time: 64 MiB with 8 heads of 128 in
#: float32, a quarter of the largest message.
_MAX_TOKENS = 8192


class PrefixStore:
    """Pins, reads and writes prefixes in the pages of one engine. ``spec`` describes the pages of
    all ranks together, and states as one rank has them. Not thread-safe.
    """

    def __init__(
        self, scheduler: Scheduler, executor: Executor, spec: KVSpec, num_ranks: int = 1
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._spec = spec
        self._num_ranks = num_ranks  # that share the heads of states

    def keys(
        self, token_ids: Sequence[int], salt: str | None, adapter: str | None = None
    ) -> list[PageKey]:
        """The keys of the full pages of a prefix. :raises RequestError: it has none."""
        config = self._scheduler.config
        if not config.enable_prefix_caching:
            raise RequestError(
                "saved and pinned prefixes need the prefix cache; set enable_prefix_caching=True"
            )
        if len(token_ids) < config.page_size:
            raise RequestError(
                f"a saved or pinned prefix consists of pages of {config.page_size} tokens; this "
                f"one has only {len(token_ids)} tokens"
            )
        job = Job(SequenceSpec("", SamplingParams()), tuple(token_ids), cache_salt=salt)
        prefix = Request(job)
        prefix.adapter = adapter
        self._scheduler.prefixes.extend_keys(prefix, len(token_ids) // config.page_size)
        return prefix.keys

    def tokens_of(self, request_id: str) -> tuple[list[int], str | None, tuple[PlacedImage, ...]]:
        """The computed tokens of an unfinished request, in whole pages, its salt and the images
        among them; with frames and states as many as another request could begin after."""
        request = self._scheduler.queues.unfinished.get(request_id)
        if request is None:
            raise RequestError(
                f"request {request_id!r} is unknown or finished; pass its tokens instead"
            )
        if request.spec.prompt_embeds is not None:
            raise RequestError(f"request {request_id!r}: a snapshot needs tokens, found embeddings")
        if request.adapter is not None:
            raise RequestError(
                f"request {request_id!r}: it runs with an adapter; snapshots of such requests are "
                "not supported"
            )
        size, groups = self._scheduler.config.page_size, self._scheduler.groups
        num_pages = request.num_computed // size
        if groups is not None:
            num_pages = groups.longest(self._scheduler.pool.match(request.keys)).num_pages
        end = num_pages * size
        images = placed_before(end, placed(request.spec.images))
        return request.token_ids[:end], request.job.cache_salt, images

    # Pins

    def pin(
        self, token_ids: Sequence[int], salt: str | None, adapter: str | None = None
    ) -> int | None:
        """Keep a prefix; returns the number of tokens kept. ``None``: not all of it is cached.

        :raises OutOfMemoryError: too few pages would be left for an unfinished request, or none.
        """
        scheduler = self._scheduler
        keys, prefixes = self.keys(token_ids, salt, adapter), scheduler.prefixes
        before = prefixes.num_pinned
        if not prefixes.pin(keys):
            return None
        if prefixes.num_pinned > before:
            try:
                self._check_available()
            except OutOfMemoryError:
                prefixes.unpin(keys)
                raise
        return len(keys) * scheduler.config.page_size

    def _check_available(self) -> None:
        """:raises OutOfMemoryError: pins leave too few pages; the message has the numbers."""
        scheduler = self._scheduler
        prefixes, size = scheduler.prefixes, scheduler.config.page_size
        pinned, capacity = prefixes.num_pinned, scheduler.pool.capacity
        needs = [("any request", 1, capacity - pinned)]
        for name, request in scheduler.queues.unfinished.items():
            needs.append(
                (f"request {name}", max_pages(request, size), prefixes.available_pages(request))
            )
        for name, need, available in needs:
            if need > available:
                raise OutOfMemoryError(
                    f"pin: {pinned} of {capacity} KV pages of {size} tokens would be pinned; "
                    f"{name} may need {need} and could get {available}"
                )

    def unpin(self, token_ids: Sequence[int], salt: str | None, adapter: str | None = None) -> bool:
        """Remove the pin of exactly this prefix. False: there is none."""
        return self._scheduler.prefixes.unpin(self.keys(token_ids, salt, adapter))

    # Snapshots

    def read(self, token_ids: Sequence[int], salt: str | None) -> StoredKV | None:
        """The keys and values of the full pages of a prefix. ``None``: a page is not cached.

        Tiered pages are read in the highest tier among them: the others are quantized again, so
        that a snapshot has one type and its readers need not know about tiers.
        """
        keys = self.keys(token_ids, salt)
        pages = self._scheduler.pool.match(keys)
        if len(pages) < len(keys):
            return None
        hit = NO_HIT
        self._round_states()
        if (groups := self._scheduler.groups) is not None:
            hit = groups.longest(pages)
            if hit.num_pages < len(pages):
                return None
        locations = self._scheduler.pool.locations(pages)
        tier = min(page_tier(location)[0] for location in locations)
        slot = 0 if hit.snapshot is None else hit.snapshot.slot
        layers = self._read(range(self._spec.num_layers), locations, tier, hit.frames, slot)
        tokens = len(pages) * self._scheduler.config.page_size
        return StoredKV(self._spec.tiers[tier], tuple(layers), tokens)

    def _round_states(self) -> None:
        """Snapshots in 16 bits are written with the next plan, unless they are read before it."""
        groups = self._scheduler.groups
        if groups is not None and groups.rounds:
            run_copies(self._scheduler, self._executor)

    def _read(
        self,
        numbers: Iterable[int],
        locations: list[int],
        tier: int,
        frames: Sequence[Sequence[int]] = (),
        slot: int = 0,
    ) -> list[LayerKV | LayerStates]:
        """The contents of pages in these layers as rows of the type of a tier. ``frames``: by
        window group those of the last pages; ``slot``: of their state."""
        spec, layers = self._spec, list[LayerKV | LayerStates]()
        regions = [locations, *map(list, frames)]
        for layer in numbers:
            region = spec.region(layer)
            if region == spec.num_regions - 1:
                answers = self._executor.on_ranks(read_state, layer, slot)
                layers.append(joined_states(answers))
            else:
                layers.append(self._read_rows(layer, regions[region], tier))
        return layers

    def _read_rows(self, layer: int, places: list[int], tier: int) -> LayerKV:
        """The contents of these pages or frames of one layer, from all ranks."""
        step, parts = max(_MAX_TOKENS // self._scheduler.config.page_size, 1), []
        for begin in range(0, len(places), step):
            some = places[begin : begin + step]
            answers = self._executor.on_ranks(read_layer, layer, some, tier)
            parts.append(joined(answers, self._spec.cache(layer).kv_heads))
        if len(parts) == 1:
            return parts[0]
        return LayerKV(np.concatenate([part.rows for part in parts]), parts[0].centre)

    def restore(
        self, token_ids: Sequence[int], salt: str | None, stored: StoredKV, *, pin: bool
    ) -> int:
        """Write a prefix into unused pages of the cache; returns how many of its tokens fitted:
        with window groups or states all or none.

        :raises OutOfMemoryError: ``pin`` is set and the prefix does not fit.
        :raises SnapshotError: layers with a window lack tokens that this engine keeps; states are
            not those after the last token that this engine can use, or of other ranks.
        """
        keys, size = self.keys(token_ids, salt), self._scheduler.config.page_size
        self._check_rows(stored, len(keys) * size)
        pool, groups = self._scheduler.pool, self._scheduler.groups
        pages = pool.acquire(pool.match(keys), 0) or []
        known = len(pages)
        try:
            missing = len(keys) - known
            if pin and missing > pool.num_available:
                raise OutOfMemoryError(
                    f"restore: the prefix needs {missing} KV pages of {size} tokens, "
                    f"{pool.num_available} of {pool.capacity} are unused"
                )
            count = missing if groups is not None else min(missing, pool.num_available)
            new = pool.acquire((), count) or []
            if groups is not None and len(new) < missing:
                return groups.longest(pages).num_pages * size
            pages = pages + new
            self._write(new, known, stored)
            for page, key in zip(new, keys[known:], strict=False):
                pool.publish(page, key)
            if groups is not None and not self._write_groups(groups, pages, stored):
                return groups.longest(pages).num_pages * size
            if pin:
                self.pin(token_ids, salt)
        finally:
            pool.release(pages)
        self._scheduler.prefixes.restored += len(new)
        return len(pages) * size

    def _check_rows(self, stored: StoredKV, num_tokens: int) -> None:
        """See :meth:`restore`; ``num_tokens``: those that would be restored."""
        most = stored.num_tokens
        for index, layer in enumerate(stored.layers):
            if isinstance(layer, LayerStates):
                self._check_state(index, stored, layer, num_tokens)
            elif len(layer.rows) < most and self._scheduler.groups is None:
                raise SnapshotError(
                    f"the snapshot has only the last {len(layer.rows)} of {most} tokens of layer "
                    f"{index}, which has a window, and with the options of this LLM such layers "
                    "keep all tokens (see explain()): restore it without these options"
                )

    def _check_state(
        self, index: int, stored: StoredKV, layer: LayerStates, num_tokens: int
    ) -> None:
        config = self._scheduler.config
        if num_tokens != stored.num_tokens:
            raise SnapshotError(
                f"the snapshot has recurrent states after {stored.num_tokens} tokens, and this LLM "
                f"could begin after {num_tokens} of them: its pages have {config.page_size} tokens "
                f"(block_size), and prompts of up to {config.max_model_len - 1} (max_model_len)"
            )
        ranks, found, own = len(layer.rows), stored.spec.caches[index], self._spec.caches[index]
        if ranks != self._num_ranks or found != own:
            raise SnapshotError(
                f"the snapshot has recurrent states of {ranks} ranks, in layer {index} {found}; "
                f"expected {self._num_ranks} ranks (tensor_parallel_size), {own}: states are not "
                "converted, so restore it with as many ranks and the same state_snapshot_dtype"
            )

    def _write_groups(self, groups: Groups, pages: list[int], stored: StoredKV) -> bool:
        """Write what the token after a prefix sees in layers with a window, and its state; whether
        all of it is stored and fits."""
        written = groups.begin_writing(len(pages))
        if written is None:
            return False
        run_copies(self._scheduler, self._executor)  # of what was there before
        known: list[int] = []
        try:
            for layer, held in enumerate(stored.layers):
                region = self._spec.region(layer)
                if isinstance(held, LayerStates):
                    self._executor.on_ranks(write_state, layer, written.slot, held.rows)
                elif region:
                    frames = written.frames[region - 1]
                    if not self._write_frames(layer, frames, held, stored):
                        return False
            known = pages
        finally:
            groups.end_writing(known, written)
        return True

    def _write_frames(self, layer: int, to: Held, held: LayerKV, stored: StoredKV) -> bool:
        """Write the last rows of one layer; whether it has all that the next token sees."""
        size, rows = self._scheduler.config.page_size, held.rows
        window = self._spec.windows[self._spec.region(layer) - 1]
        left_out = stored.num_tokens - len(rows)
        begin = to.first * size - left_out
        if begin < 0:  # the first tokens of a page, which no later token sees
            if to.end * size + 1 - window < left_out:
                return False
            rows = np.pad(rows, ((-begin, 0), (0, 0), (0, 0)))
            begin = 0
        part = LayerKV(rows[begin : begin + len(to.frames) * size], held.centre)
        self._executor.on_ranks(write_layer, layer, list(to.frames), part, stored.spec)
        return True

    # Parts of prefixes, which are handed over between engines

    @property
    def spec(self) -> KVSpec:
        """What is written into pages: shape and type of the first tier, over all ranks."""
        return self._spec.tiers[0]

    @property
    def dtype(self) -> str:
        """The KV type of the whole cache, all tiers."""
        return self._spec.dtype

    def centres(self) -> list[NDArray[np.float32] | None]:
        """For each layer what is subtracted from its keys, ``[kv_heads, head_dim]``, if anything.
        Equal rows stand for equal keys only where these and ``dtype`` are equal.
        """
        frames = [[0]] * len(self._spec.windows)
        numbers = range(self._spec.num_layers)
        layers = self._read(numbers, [0], 0, frames)  # 0: of no request
        return [layer.centre if isinstance(layer, LayerKV) else None for layer in layers]

    @property
    def num_ranks(self) -> int:
        """How many ranks share the heads of states."""
        return self._num_ranks

    def num_usable(self, keys: Sequence[PageKey]) -> int:
        """After how many of these pages, all of which a request has, it could begin: those that are
        cached, with frames and states up to where all of these are. Changes nothing."""
        pages, groups = self._scheduler.pool.match(keys), self._scheduler.groups
        return len(pages) if groups is None else groups.longest(pages).num_pages

    def read_rest(self, keys: Sequence[PageKey]) -> dict[int, LayerKV | LayerStates] | None:
        """What the token after a prefix needs besides these pages of it, by layer: the last rows of
        those with a window, up to the end of the prefix, and states. ``None``: it is not there.
        """
        self._round_states()
        pages, groups = self._scheduler.pool.match(keys), self._scheduler.groups
        assert groups is not None
        hit = groups.longest(pages)
        if not keys or hit.num_pages < len(keys):
            return None
        numbers = rest_layers(self._spec)
        slot = 0 if hit.snapshot is None else hit.snapshot.slot
        layers = self._read(numbers, [], 0, hit.frames, slot)
        return dict(zip(numbers, layers, strict=True))

    def write_rest(
        self, keys: Sequence[PageKey], rest: Mapping[int, LayerKV | LayerStates]
    ) -> bool:
        """Write what :meth:`read_rest` has returned in an engine with the same ``dtype``, centres
        and ranks. Returns whether a request can begin after these pages now: False if one of them
        is gone, or if frames or memory are short."""
        pool, groups, size = self._scheduler.pool, self._scheduler.groups, self.spec.page_size
        assert groups is not None
        pages = pool.acquire(pool.match(keys), 0) or []  # not evicted meanwhile
        try:
            if len(pages) < len(keys) or groups.longest(pages).num_pages == len(pages):
                return len(pages) == len(keys)
            none = LayerKV(np.empty((0, 0, 0), dtype=np.uint8))
            layers = tuple(rest.get(layer, none) for layer in range(self._spec.num_layers))
            return self._write_groups(groups, pages, StoredKV(self.spec, layers, len(keys) * size))
        finally:
            pool.release(pages)

    def num_cached(self, keys: Sequence[PageKey]) -> int:
        """How many of these pages, from the first on, are cached. Changes nothing."""
        return len(self._scheduler.pool.match(keys))

    def read_pages(self, keys: Sequence[PageKey]) -> tuple[int, list[Bytes]]:
        """How many of these pages there are, up to the first one that is not cached in the first
        tier, and for each layer that keeps all tokens the rows of its tokens.
        """
        locations = self._scheduler.pool.locations(self._scheduler.pool.match(keys))
        lower = (i for i, location in enumerate(locations) if page_tier(location)[0])
        locations = locations[: next(lower, len(locations))]
        if not locations or not self._spec.layers_in(0):
            return len(locations), []
        answers = self._executor.on_ranks(read_rows, locations)
        return len(locations), joined_rows(answers, self._spec)

    def refresh(self, keys: Sequence[PageKey]) -> int:
        """Make the cached ones of these pages, up to the first that is not, the most recently used;
        returns how many they are.
        """
        pool = self._scheduler.pool
        pages = pool.acquire(pool.match(keys), 0) or []
        pool.release(pages)
        return len(pages)

    def write_pages(self, keys: Sequence[PageKey], first: int, rows: Sequence[Bytes]) -> int:
        """Continue a cached prefix: ``keys`` are those of its pages up to the last new one, and
        ``rows`` those of its tokens from page ``first`` on, as ``read_pages`` returns them in an
        engine with the same ``dtype`` and centres; none if no layer keeps all tokens.

        Returns how many of the pages are cached now. These are fewer than ``keys`` if too few pages
        are unused, not counting those before ``first``, or if page ``first - 1`` is gone.
        """
        pool = self._scheduler.pool
        begin = max(first - 1, 0)
        pages = pool.acquire(pool.match(keys[begin:]), 0) or []  # not evicted for the new ones
        try:
            known = begin + len(pages)
            count = min(len(keys) - known, pool.num_available - begin)
            if known < first or count <= 0:
                return known
            if not (new := pool.acquire((), count)):
                return known
            pages = pages + new
            run_copies(self._scheduler, self._executor)
            size = self._scheduler.config.page_size
            begin, end = (known - first) * size, (known - first + len(new)) * size
            some = [layer[begin:end] for layer in rows]
            if some:
                self._executor.on_ranks(write_rows, pool.locations(new), some, self.spec)
            for page, key in zip(new, keys[known:], strict=False):
                pool.publish(page, key)
        finally:
            pool.release(pages)
        self._scheduler.prefixes.restored += len(new)
        return known + len(new)

    def _write(self, pages: list[int], first: int, stored: StoredKV) -> None:
        """Fill pages with the stored ones from page ``first`` on."""
        if not pages:
            return
        run_copies(self._scheduler, self._executor)
        locations = self._scheduler.pool.locations(pages)
        size = self._scheduler.config.page_size
        step = max(_MAX_TOKENS // size, 1)
        for layer, held in enumerate(stored.layers):
            if self._spec.region(layer) or isinstance(held, LayerStates):
                continue
            for begin in range(0, len(locations), step):
                some = locations[begin : begin + step]
                at = (first + begin) * size
                part = LayerKV(held.rows[at : at + len(some) * size], held.centre)
                self._executor.on_ranks(write_layer, layer, some, part, stored.spec)


def rest_layers(spec: KVSpec) -> list[int]:
    """The layers that have frames or states instead of pages."""
    return [layer for layer in range(spec.num_layers) if spec.region(layer)]


def run_copies(scheduler: Scheduler, executor: Executor) -> None:
    """Carry out all pending copies and moves of pages now, instead of with the next step."""
    plan = scheduler.plan_copies()
    try:
        if plan.copies:
            executor.launch(plan)
            scheduler.prefixes.swap.drop_unwritten(executor.result().unwritten)
    except BaseException:
        scheduler.undo(plan)
        raise
    scheduler.pool.confirm_copies()


def max_pages(request: Request, page_size: int) -> int:
    """The most pages that an unfinished request may need."""
    if request.spec.kind == "embed":
        return -(-request.num_tokens // page_size)
    return sum(-(-(one.max_len - 1) // page_size) for one in request.sequences)
