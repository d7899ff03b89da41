"""One hand-over at the receiver: checks what arrives and writes it between steps."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import numpy as np

from sdk.api.errors import SdkError, TransferError
from sdk.cluster.transfer.connector import End, Offer, Part, Receiving, Rows
from sdk.cluster.transfer.engine_pages import EnginePages
from sdk.engine.pages.page_pool import PageKey
from sdk.engine.rank.kv_transfer import LayerKV, LayerStates
from sdk.quant.caches import AttentionCache, StateCache

#: How long a write waits for a step to begin: a host that steps the engine itself may not do it.
_STEP_BEGINS_S = 0.05
_LOOK_S = 0.0005


class Pace:
    """Decides how many pages all hand-overs of a receiver may write between two steps.

    While requests run, receiving and writing takes ``share`` of the time of a step, but one page is
    written at least. Receiving counts, because the cores are those of the steps: where there are
    just as many as threads, a step takes longer by as much CPU time as others use meanwhile.
    """

    def __init__(self, pages: EnginePages, share: float) -> None:
        self._driver, self._scheduler = pages.driver, pages.scheduler
        self._share = share
        self._lock = threading.Lock()
        self._page_seconds = 0.0  # of the last writes
        self._last = time.monotonic(), 0  # the end of the last write, and the steps until then

    def write(self, most: int, received: float, action: Callable[[int], int]) -> int:
        """What ``action(count)`` returns, between two steps, for up to ``most`` pages. Each of
        them took ``received`` seconds of a CPU to receive.
        """
        with self._lock:
            return self._driver.between_steps(
                lambda: self._timed(self._count(most, received), action)
            )

    def _count(self, most: int, received: float) -> int:
        if not self._driver.has_work:
            return most
        ended, steps = self._last
        passed = self._scheduler.num_steps - steps
        if not passed or not self._page_seconds:
            return 1
        seconds = (time.monotonic() - ended) / passed * self._share
        return max(min(int(seconds / (self._page_seconds + received)), most), 1)

    def _timed(self, count: int, action: Callable[[int], int]) -> int:
        begin = time.monotonic()
        found = action(count)
        now = time.monotonic()
        self._page_seconds = (now - begin) / count
        self._last = now, self._scheduler.num_steps
        return found

    def wait(self) -> None:
        """Let a step begin after the last write, if there is one to run."""
        with self._lock:
            ends = time.monotonic() + _STEP_BEGINS_S
            while (
                self._driver.has_work
                and self._scheduler.num_steps == self._last[1]
                and time.monotonic() < ends
            ):
                time.sleep(_LOOK_S)


class Rest:
    """What comes after the pages of an offer: the last rows of layers with a window up to token
    ``end``, and states there.
    """

    def __init__(self, pages: EnginePages, offer: Offer, end: int) -> None:
        self._pages = pages
        self._offer = offer
        self._end = end
        self._waiting = list(pages.rest_layers)
        self._parts: dict[int, list[Rows]] = {layer: [] for layer in self._waiting}
        self._next: int | None = None  # where the next part of a layer begins that is not complete

    @property
    def is_whole(self) -> bool:
        """Whether all layers have come."""
        return not self._waiting

    def take(self, part: Part, digest: bytes) -> bool:
        """Keep a copy of a part. False: no more are expected.

        :raises TransferError: it is not the part that follows, or is longer than a window.
        """
        if not self._waiting:
            return False
        layer, spec = self._waiting[0], self._offer.spec
        cache, first, last = spec.caches[layer], part.first, part.first + len(part.rows)
        end, least, most = self._offer.ranks, 0, 0
        if isinstance(cache, AttentionCache):
            end = most = self._end
            least = max(end - spec.windows[spec.region(layer) - 1] - spec.page_size, 0)
        if self._next is not None:
            least = most = self._next
        if part.layer != layer or not least <= first <= most or last > end:
            raise TransferError(
                f"expected layer {layer} from {least} to {end}, found layer {part.layer} from "
                f"{first} to {last}: a part is missing, repeated or out of order"
            )
        if part.digest != digest:
            raise TransferError(f"the part of layer {layer} belongs to another prompt")
        self._parts[layer].append(part.rows.copy())
        self._next = last
        if last == end:
            self._next = None
            del self._waiting[0]
        return True

    def layers(self) -> dict[int, LayerKV | LayerStates]:
        """All of it, once."""
        found: dict[int, LayerKV | LayerStates] = {}
        for layer, parts in self._parts.items():
            rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
            is_state = isinstance(self._offer.spec.caches[layer], StateCache)
            centre = self._pages.centres[layer]
            found[layer] = LayerStates(rows[:, 0]) if is_state else LayerKV(rows, centre)
        self._parts.clear()
        return found


class Intake:
    """Receives one offer. ``num_known``: tokens that were cached before, ``num_tokens``: those
    that are now.
    """

    def __init__(self, pages: EnginePages, pace: Pace, offer: Offer, group_bytes: int) -> None:
        self.num_known = self.num_tokens = 0
        self._pages = pages
        self._pace = pace
        self._offer = offer
        self._unit = math.lcm(offer.spec.page_size, pages.page_size)
        self._end = len(offer.token_ids) // self._unit * self._unit
        self._group_bytes = max(group_bytes, pages.group_bytes(self._unit), pages.row_bytes)
        self._rest = Rest(pages, offer, self._end)
        self._keys: list[PageKey] = []
        self._digests: list[bytes] = []

    def accept(self, receiving: Receiving) -> None:
        """Ask for what is not cached, or refuse.

        :raises SdkError: it was refused.
        """
        pages = self._pages
        try:
            pages.check(self._offer)
            if not self._end:
                raise TransferError(
                    f"{len(self._offer.token_ids)} tokens in pages of {self._offer.spec.page_size} "
                    f"are less than a page of {pages.page_size} of this engine"
                )
            self._keys = pages.keys(self._offer)[: self._end // pages.page_size]
            known = pages.driver.between_steps(self._num_known)
        except SdkError as error:
            receiving.refuse(str(error))
            raise
        self._digests = self._offer.digests()
        self.num_known = self.num_tokens = known * pages.page_size // self._unit * self._unit
        receiving.accept(self.num_known, self._unit, self._group_bytes)

    def _num_known(self) -> int:
        """The pages that are cached. One less if all are, but not what the next token needs besides
        them: that is sent after the last page."""
        kept = self._pages.kept
        known = kept.refresh(self._keys)
        return known - (known == len(self._keys) and kept.num_usable(self._keys) < known)

    def take(self, receiving: Receiving) -> None:
        """Receive and write all groups. :raises SdkError: not everything came or fitted."""
        is_whole = True
        try:
            sent = self._groups(receiving)
            if sent == self._end > self.num_known:
                is_whole = self._rest.is_whole
                self._write_rest()
        finally:  # pages became cached one after the other; the first is to be evicted last
            keys = self._keys[: self.num_tokens // self._pages.page_size]
            found = self._pages.driver.between_steps(lambda: self._refreshed(keys))
            self.num_tokens = found * self._pages.page_size
        receiving.done(self.num_tokens)
        if sent < self._end:
            raise TransferError(f"the sender had only {sent} of {self._end} tokens")
        if not is_whole:
            raise TransferError(
                f"the sender had not the states or windows any more after {sent} tokens: a request "
                f"can begin after {self.num_tokens} of them"
            )
        if self.num_tokens < self._end:
            raise TransferError(
                f"all tokens but the first {self.num_tokens} have been evicted again"
            )

    def _refreshed(self, keys: list[PageKey]) -> int:
        kept = self._pages.kept
        return kept.num_usable(keys[: kept.refresh(keys)])

    def _write_rest(self) -> None:
        """Write what came after the pages, if it is all.

        :raises TransferError: the cache has no room for it, or lost a page.
        """
        if not (self._pages.rest_layers and self._rest.is_whole):
            return
        self._pace.wait()
        kept, rest = self._pages.kept, self._rest.layers()

        def write(_: int) -> bool:
            if not self._pages.page_layers:  # there is nothing in pages, but prefixes have them
                self.num_tokens = kept.write_pages(self._keys, 0, ()) * self._pages.page_size
            return kept.write_rest(self._keys, rest)

        if not self._pace.write(1, 0.0, write):
            raise TransferError(
                f"the KV cache has no room for the states or windows after {self._end} tokens"
            )

    def _groups(self, receiving: Receiving) -> int:
        """Receive and write until the end; returns how many tokens were sent or known."""
        rows: list[Rows] = []
        last = self._digests[self._end // self._offer.spec.page_size - 1]
        begin = time.thread_time()
        has_rows = bool(self._pages.page_layers)
        while not isinstance(part := receiving.receive(), End):
            are_written = self.num_tokens == self._end or not has_rows
            if are_written and self._rest.take(part, last):
                receiving.release()
                continue
            self._check(part, rows)
            rows.append(part.rows)
            if len(rows) == len(self._pages.page_layers):
                self._write(rows, time.thread_time() - begin)
                rows = []
                receiving.release()
                begin = time.thread_time()
        if rows or (has_rows and part.num_tokens != self.num_tokens):
            raise TransferError(
                f"the sender says that it sent {part.num_tokens} tokens; {self.num_tokens} arrived"
            )
        return part.num_tokens

    def _check(self, part: Part, rows: list[Rows]) -> None:
        """:raises TransferError: it is not the part that follows the others of its group."""
        count, at, unit = len(part.rows), self.num_tokens, self._unit
        layer = next(iter(self._pages.page_layers[len(rows) :]), None)
        if (part.layer, part.first) != (layer, at):
            wanted = "no more" if layer is None else f"layer {layer} of the tokens from {at} on"
            raise TransferError(
                f"expected {wanted}, found layer {part.layer} "
                f"from {part.first} on: a part is missing, repeated or out of order"
            )
        size = self._pages.group_bytes(count)
        full = count % unit == 0 and at + count <= self._end
        if not full or (rows and count != len(rows[0])):
            raise TransferError(
                f"a part of {count} tokens from {at} on; expected multiples of {unit} up to "
                f"{self._end}, as many in each layer"
            )
        if size > self._group_bytes:
            raise TransferError(f"a group of {size} bytes; expected at most {self._group_bytes}")
        if part.digest != self._digests[(at + count) // self._offer.spec.page_size - 1]:
            raise TransferError(f"the part from token {at} on belongs to another prompt")

    def _write(self, rows: list[Rows], received: float) -> None:
        """Write a group, which took this many seconds of a CPU to receive.

        :raises TransferError: the cache has no room for all of it, or lost the page before it.
        """
        pages, size = self._pages, self._pages.page_size
        first = done = self.num_tokens // size
        last = done + len(rows[0]) // size

        def write(count: int) -> int:
            begin = (done - first) * size
            some = [layer[begin : begin + count * size] for layer in rows]
            return pages.kept.write_pages(self._keys[: done + count], done, some)

        while done < last:
            self._pace.wait()
            found = self._pace.write(last - done, received / (last - first), write)
            if found < done:
                raise TransferError("the first pages have been evicted again")
            if found == done:
                raise TransferError(
                    f"the KV cache has no room for more than {self.num_tokens} tokens: the other "
                    "pages are used"
                )
            done = found
            self.num_tokens = done * size
