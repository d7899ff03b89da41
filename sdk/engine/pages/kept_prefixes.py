"""Prefixes that callers want kept: pinned in the cache, taken out of it, put back into it.

All of this happens between two steps. A prefix is known by its tokens and its salt, in whole pages:
what is left of a last page is computed again, at most ``page_size - 1`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sdk.engine.pages.page_pool import PageKey
from sdk.engine.rank.kv_transfer import LayerKV, StoredKV, joined, read_layer, write_layer
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.errors import OutOfMemoryError, RequestError
from sdk.executors.base import Executor
from sdk.kernels.ladder import page_level
from sdk.params import SamplingParams
from sdk.quant.spec import KVSpec

#: Tokens of one layer that go to a rank or come from it at a time: 64 MiB with 8 heads of 128 in
#: float32, a quarter of what a message holds.
_MOST_TOKENS = 8192


class KeptPrefixes:
    """Pins, reads and writes prefixes in the pages of one engine, ``spec`` of all its ranks
    together. Not thread-safe.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, spec: KVSpec) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._spec = spec

    def _keys(self, token_ids: Sequence[int], salt: str | None) -> list[PageKey]:
        """The keys of the full pages of a prefix. :raises RequestError: there are none."""
        config = self._scheduler.config
        if not config.enable_prefix_caching:
            raise RequestError("prefixes are kept by the prefix cache: enable_prefix_caching=True")
        if len(token_ids) < config.page_size:
            raise RequestError(
                f"prefixes are kept in pages of {config.page_size} tokens; this one has "
                f"{len(token_ids)}"
            )
        prefix = Request("", token_ids, SamplingParams(), salt=salt)
        self._scheduler.prefixes.extend_keys(prefix, len(token_ids) // config.page_size)
        return prefix.keys

    def tokens_of(self, request_id: str) -> tuple[list[int], str | None]:
        """What is computed of an unfinished request in whole pages, and its salt."""
        request = self._scheduler.queues.unfinished.get(request_id)
        if request is None:
            raise RequestError(
                f"request {request_id!r} is unknown or finished: give its tokens instead"
            )
        size = self._scheduler.config.page_size
        return request.token_ids[: request.num_computed // size * size], request.salt

    # Pins

    def pin(self, token_ids: Sequence[int], salt: str | None) -> int | None:
        """Keep a prefix; the tokens kept. ``None``: not all of it is in the cache.

        :raises OutOfMemoryError: too few pages would be left, for anybody or for a request.
        """
        scheduler = self._scheduler
        keys, prefixes = self._keys(token_ids, salt), scheduler.prefixes
        before = prefixes.num_pinned
        if not prefixes.pin(keys):
            return None
        if prefixes.num_pinned > before:
            try:
                self._check_room()
            except OutOfMemoryError:
                prefixes.unpin(keys)
                raise
        return len(keys) * scheduler.config.page_size

    def _check_room(self) -> None:
        """:raises OutOfMemoryError: pins leave too little, with the sums."""
        scheduler = self._scheduler
        prefixes, size = scheduler.prefixes, scheduler.config.page_size
        pinned, capacity = prefixes.num_pinned, scheduler.pool.capacity
        needs = [("any request", 1, capacity - pinned)]
        for name, request in scheduler.queues.unfinished.items():
            needs.append((f"request {name}", most_pages(request, size), prefixes.room(request)))
        for who, need, room in needs:
            if need > room:
                raise OutOfMemoryError(
                    f"pin: {pinned} of {capacity} KV pages of {size} tokens would be pinned; "
                    f"{who} may need {need} and could get {room}"
                )

    def unpin(self, token_ids: Sequence[int], salt: str | None) -> bool:
        """Give up the pin of exactly this prefix. False: there is none."""
        return self._scheduler.prefixes.unpin(self._keys(token_ids, salt))

    # Snapshots

    def read(self, token_ids: Sequence[int], salt: str | None) -> StoredKV | None:
        """The keys and values of the full pages of a prefix. ``None``: one is not in the cache.

        Of a ladder in the type of the best page: the others' values are coded anew, so that a
        snapshot has one type, and whoever reads it need not know of ladders.
        """
        keys = self._keys(token_ids, salt)
        pages = self._scheduler.pool.match(keys)
        if len(pages) < len(keys):
            return None
        places = self._scheduler.pool.places(pages)
        level = min(page_level(place)[0] for place in places)
        layers = []
        step = max(_MOST_TOKENS // self._scheduler.config.page_size, 1)
        for layer in range(self._spec.num_layers):
            parts = []
            for begin in range(0, len(pages), step):
                some = places[begin : begin + step]
                answers = self._executor.on_ranks(read_layer, layer, some, level)
                parts.append(joined(answers, self._spec.kv_heads))
            rows = parts[0].rows
            if len(parts) > 1:
                rows = np.concatenate([part.rows for part in parts])
            layers.append(LayerKV(rows, parts[0].centre))
        return StoredKV(self._spec.levels[level], tuple(layers))

    def restore(
        self, token_ids: Sequence[int], salt: str | None, stored: StoredKV, *, pin: bool
    ) -> int:
        """Put a prefix into the cache, as far as there are pages that nobody holds; its tokens.

        :raises OutOfMemoryError: it is to be pinned and does not fit.
        """
        keys, size = self._keys(token_ids, salt), self._scheduler.config.page_size
        pool = self._scheduler.pool
        pages = pool.acquire(pool.match(keys), 0) or []
        known = len(pages)
        try:
            missing = len(keys) - known
            if pin and missing > pool.num_available:
                raise OutOfMemoryError(
                    f"restore: the prefix needs {missing} KV pages of {size} tokens, "
                    f"{pool.num_available} of {pool.capacity} are held by nobody"
                )
            new = pool.acquire((), min(missing, pool.num_available)) or []
            pages = pages + new
            self._write(new, known, stored)
            for page, key in zip(new, keys[known:], strict=False):
                pool.publish(page, key)
            if pin:
                self.pin(token_ids, salt)
        finally:
            pool.release(pages)
        self._scheduler.prefixes.restored += len(new)
        return len(pages) * size

    def _write(self, pages: list[int], first: int, stored: StoredKV) -> None:
        """Fill pages with what is stored, from its page ``first`` on."""
        if not pages:
            return
        run_copies(self._scheduler, self._executor)
        places = self._scheduler.pool.places(pages)
        size = self._scheduler.config.page_size
        step = max(_MOST_TOKENS // size, 1)
        for layer, (rows, centre) in enumerate((x.rows, x.centre) for x in stored.layers):
            for begin in range(0, len(places), step):
                some = places[begin : begin + step]
                at = (first + begin) * size
                part = LayerKV(rows[at : at + len(some) * size], centre)
                self._executor.on_ranks(write_layer, layer, some, part, stored.spec)


def run_copies(scheduler: Scheduler, executor: Executor) -> None:
    """Have all copies and moves of pages made that wait for the next step."""
    plan = scheduler.plan_copies()
    try:
        if plan.copies:
            executor.launch(plan)
            scheduler.prefixes.swap.lose(executor.result().unwritten)
    except BaseException:
        scheduler.undo(plan)
        raise
    scheduler.pool.settle()


def most_pages(request: Request, page_size: int) -> int:
    """Pages for all that may become of an unfinished request."""
    if request.kind == "embed":
        return -(-request.num_tokens // page_size)
    return sum(-(-(one.max_len - 1) // page_size) for one in request.sequences)
