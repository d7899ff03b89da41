"""What sequences hold besides pages: frames of window groups, and slots of recurrent states.

A model whose layers all keep every token has none of this: there is no :class:`Groups` then.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from sdk.engine.pages.budget import Budget, Places
from sdk.engine.pages.frames import FramePool, Held
from sdk.engine.pages.page_pool import PageKey, PagePool
from sdk.engine.pages.state_saves import StateSaves
from sdk.engine.pages.states import StatePool, StateSnapshot
from sdk.engine.pages.swap import Holds, SwapSpace
from sdk.engine.pages.swapped_places import Hit, SwappedPlaces
from sdk.engine.plan import Duplicate, Frames, StepPlan, StepRow
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler_config import SchedulerConfig

#: Of the budget for states, if there are pages too: a snapshot of a delta net takes as much as the
#: keys of 2,400 to 3,200 tokens, one of a short convolution as much as those of a page.
_SHARE_OF_STATES = 0.5


class Vacated(NamedTuple):
    """Places that have lost their memory to another kind: pages, frames by group, slots, and those
    of snapshots in 16 bits."""

    pages: list[int]
    frames: list[list[int]]
    slots: list[int]
    rounded: list[int]

    def __bool__(self) -> bool:
        return bool(self.pages or self.slots or self.rounded or any(self.frames))

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """See ``StepPlan.vacated``."""
        kinds = self.pages, *self.frames, self.slots, self.rounded
        return tuple(map(tuple, kinds)) if self else ()


class Written(NamedTuple):
    """Places for the caller to write what the token after a prefix needs besides pages: by group
    its frames, and the place of a snapshot of its state (0: there are no states)."""

    frames: list[Held]
    slot: int


class Pinned(NamedTuple):
    """What a pinned prefix holds besides its pages."""

    frames: tuple[tuple[int, ...], ...]
    snapshot: StateSnapshot | None


class Groups:
    """The frames and slots of one scheduler, and the budget that they share with its pages."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self._config = config
        self._pool = pool
        size = config.page_size
        self.frames = [FramePool(group, size, pool.num_pages) for group in config.windows]
        self.states = None if config.states is None else StatePool(config.states)
        rounded = None if config.states is None else config.states.of_snapshots
        #: Where snapshots of states are: their own places if they have 16 bits.
        self.snapshots = self.states if rounded is None else StatePool(rounded)
        states = [] if self.states is None else [self.states]
        if self.snapshots is not None and rounded is not None:
            states.append(self.snapshots)
        self._kinds: list[Places] = [pool, *self.frames, *states]
        self.budget = Budget(config.cache_bytes, self._kinds, self._shares())
        for pages in self.frames:
            pages.on_shortage = partial(self._obtain_unused, pages)
        for one in states:
            one.on_shortage = partial(self._obtain_unused, one)
        pool.on_need = self._obtain_pages
        pool.on_forget = self._forget
        pool.on_resize = self._resize
        #: ``None``: what is evicted is lost.
        self.swapped: SwappedPlaces | None = None
        #: For the next plan: frames of running sequences.
        self._new_frames: list[tuple[str, Frames]] = []
        self._started: set[str] = set()  # sequences that the next plan starts
        self.saves: StateSaves | None = None
        if self.states is not None and self.snapshots is not None:
            self.saves = StateSaves(self.states, self.snapshots, pool, config)

    def use_swap(self, swap: SwapSpace) -> None:
        """Frames and states go to the swap space when they are evicted."""
        self.swapped = SwappedPlaces(
            swap, self._pool, self.frames, self.snapshots, rounds=self.rounds
        )

    @property
    def rounds(self) -> bool:
        """Whether snapshots have 16 bits."""
        return self.snapshots is not self.states

    def _shares(self) -> list[float]:
        """The shares of the kinds in the budget: as a sequence of full length needs pages and
        frames."""
        config, size = self._config, self._config.page_size
        num_pages = -(-config.max_model_len // size)
        bytes_of = [num_pages * config.page_bytes]
        for one in self.frames:
            bytes_of.append(min(one.most_held, num_pages) * one.unit_bytes)
        rest = 1.0 if self.states is None else 1.0 - _SHARE_OF_STATES
        shares = [rest * one / (sum(bytes_of) or 1) for one in bytes_of]
        if self.states is None:
            return shares
        return [*shares, 0.0, _SHARE_OF_STATES] if self.rounds else [*shares, _SHARE_OF_STATES]

    def _obtain_pages(self, count: int) -> None:
        """The pool needs this many spare pages."""
        self._obtain(self._needs(count))

    def _obtain(self, needs: Sequence[int]) -> bool:
        """:meth:`Budget.obtain`, but memory that nobody uses comes before content."""
        self._borrow(needs)
        return self.budget.obtain(needs)

    def _obtain_unused(self, kind: Places, count: int) -> None:
        """``kind`` lacks this many places without content: take memory that nobody uses."""
        needs = [kind.num_unused + count if one is kind else 0 for one in self._kinds]
        self._borrow(needs)
        self.budget.obtain_unused(kind, max(needs))

    def _borrow(self, needs: Sequence[int]) -> None:
        """Take from a memory pool what is missing so that each kind may have so many places without
        content, as cached pages do: it is granted as pages, for all kinds."""
        pool = self._pool
        if pool.on_shortage is not None and pool.unit_bytes:
            missing = self.budget.missing_unused(needs)
            if missing > 0:
                pool.on_shortage(-(-missing // pool.unit_bytes), False)

    def _needs(self, pages: int = 0, slots: int = 0, snapshots: int = 0) -> list[int]:
        needs = [pages] + [0] * len(self.frames)
        if self.states is None:
            return needs
        return [*needs, slots, snapshots] if self.rounds else [*needs, slots + snapshots]

    def _resize(self, num_pages: int) -> None:
        self.budget.grow(num_pages * self._pool.unit_bytes)

    def _forget(self, page: int | None) -> None:
        """A page (``None``: every page) is not known any more."""
        attached: list[FramePool | StatePool] = [*self.frames]
        if self.snapshots is not None:
            attached.append(self.snapshots)
        for kind in attached:
            if page is None:
                kind.detach_all()
            else:
                kind.detach(page)

    # Prefixes

    def serves(
        self,
        pages: Sequence[int],
        num_tokens: int,
        swapped: Sequence[PageKey] | None = None,
    ) -> int:
        """-1 if every window group has the frames that the token after ``num_tokens`` sees among
        those of ``pages``; else the last page without one: no boundary after it that sees it can
        be served. ``swapped``: the pages after them, which are in the swap space, where frames of
        all of them may be too."""
        found = -1
        for group, pool in enumerate(self.frames, 1):
            first = pool.first_seen(num_tokens)
            if self.swapped is None or swapped is None:
                found = max(found, pool.last_without(pages, first, len(pages)))
            else:
                found = max(found, self.swapped.last_without(group, pages, swapped, first))
        return found

    def hit(
        self,
        pages: Sequence[int],
        num_tokens: int,
        snapshot: StateSnapshot | None,
        num_swapped: int = 0,
        state: PageKey | None = None,
        tail: PageKey | None = None,
    ) -> Hit:
        """The prefix of so many tokens, which all groups serve: ``pages``, then others from the
        swap space, perhaps and a tail; see :class:`Hit`."""
        num_rest, frames = num_swapped + (tail is not None), []
        for pool in self.frames:
            first = pool.first_seen(num_tokens)
            rest = (0,) * (num_rest - max(first - len(pages), 0))
            frames.append((*pool.frames_of(pages[first:]), *rest))
        return Hit(len(pages) + num_swapped, tuple(frames), snapshot, state, tail)

    def longest(self, pages: Sequence[int]) -> Hit:
        """The longest prefix of known ``pages`` that all groups serve; without tails."""
        size, states, index = self._config.page_size, self.snapshots, len(pages)
        while index > 0:
            snapshot = None if states is None else states.of(pages[index - 1])
            if states is None or snapshot is not None:
                missing = self.serves(pages[:index], index * size)
                if missing < 0:
                    return self.hit(pages[:index], index * size, snapshot)
                if states is None:
                    index = missing + 1
            index -= 1
        return self.hit((), 0, None)

    def tail_frames(self, page: int, writer: Request | None, index: int) -> list[int] | None:
        """The frames of a tail in each group: those attached to its page, or those that a running
        ``writer`` holds for page ``index`` of its table. ``None``: one is missing."""
        if writer is not None:
            found = [held.frame(index) for held in writer.windows]
        else:
            found = [pool.frames_of((page,))[0] for pool in self.frames]
        return found if all(found) else None

    # Starting

    def _claims(self, sequence: Request) -> list[int]:
        """How many frames of each group a sequence is promised."""
        longest = sequence.num_tokens if sequence.spec.kind == "embed" else sequence.max_len - 1
        num_pages = -(-max(longest, 1) // self._config.page_size)
        if not self._config.enable_chunked_prefill:  # a prompt is written in one step
            return [num_pages] * len(self.frames)
        return [min(pool.most_held, num_pages) for pool in self.frames]

    def missing_for(
        self, request: Request, hits: Sequence[Hit], sources: Sequence[Sequence[int]], pages: int
    ) -> int:
        """The bytes that are missing to start a request with these hits: for ``pages`` more pages,
        for its frames and slots. ``sources``: for each tail its frames, which are copied."""
        needs = self._needs(pages, *self._states_of(hits))
        for sequence, hit in zip(request.sequences, hits, strict=True):
            claims = self._claims(sequence)
            for index, claim in enumerate(claims):
                needs[1 + index] += max(claim, len(hit.frames[index]) + bool(sources))
        for one in sources:
            for index, _ in enumerate(one):
                needs[1 + index] += 1
        return self.budget.missing(needs)

    def _states_of(self, hits: Sequence[Hit]) -> tuple[int, int]:
        """How many slots and places of snapshots it takes to start from these hits."""
        if self.states is None:
            return 0, 0
        snapshots = {hit.snapshot for hit in hits}
        read = [one for one in snapshots if one is not None and not one.held]
        through = self.rounds and any(hit.state is not None for hit in hits)
        return self.states.num_working * len(hits), len(read) + through

    def most_pages(self, num_sequences: int, pinned: int) -> int:
        """How many pages a request with so many sequences could get if nothing else ran but
        ``pinned`` pages stayed."""
        config, budget = self._config, self.budget.nbytes
        least, most = 0, self._pool.num_pages - 1 - pinned
        if budget is None:
            most = self._pool.capacity - pinned
        while least < most:
            count = (least + most + 1) // 2
            nbytes = (count + pinned) * config.page_bytes
            fits = True
            for pool in self.frames:
                frames = count
                if config.enable_chunked_prefill:
                    frames = min(count, pool.most_held * num_sequences)
                frames += pool.num_pinned
                nbytes += frames * pool.unit_bytes
                fits &= frames < pool.num_frames
            if self.states is not None and self.snapshots is not None:
                # a sequence may start from a snapshot, which is read while it has its own slots
                slots = self.states.num_working * num_sequences
                kept = num_sequences + self.snapshots.num_pinned
                nbytes += slots * self.states.unit_bytes + kept * self.snapshots.unit_bytes
                fits &= slots + (0 if self.rounds else kept) < self.states.num_slots
                fits &= kept < self.snapshots.num_slots
            if fits and (budget is None or nbytes <= budget):
                least = count
            else:
                most = count - 1
        return least

    def begin(
        self,
        request: Request,
        hits: Sequence[Hit],
        sources: Sequence[Sequence[int]],
        pages: int,
        held_slots: Holds,
    ) -> None:
        """Give each sequence of a request what it holds besides pages. It is known not to be
        missing; ``pages``: that many spare pages are needed too. ``held_slots``: of the swap
        space, those that the hits need."""
        for one in sources:
            for pool, frame in zip(self.frames, one, strict=True):
                pool.hold(frame)
                pool.claimed += 1
        for sequence, hit in zip(request.sequences, hits, strict=True):
            sequence.windows = []
            tokens = hit.num_pages * self._config.page_size
            if hit.tail is not None:
                tokens += len(hit.tail.token_ids)
            if hit.snapshot is not None:
                tokens = hit.snapshot.num_tokens
            for pool, claim, frames in zip(
                self.frames, self._claims(sequence), hit.frames, strict=True
            ):
                held = Held(claim, hit.end - len(frames))
                sequence.windows.append(held)
                pool.claim(held)
                pool.share(held, frames)
            if self.saves is not None:
                self.saves.read(sequence, hit.snapshot, tokens)
            self._started.add(sequence.request_id)
        obtained = self._obtain(self._needs(pages, *self._states_of(hits)))
        assert obtained, "memory for frames or slots is missing"
        for sequence, hit in zip(request.sequences, hits, strict=True):
            if self.saves is not None:
                self.saves.begin(sequence)
            if self.swapped is not None:
                self.swapped.load(sequence, hit, held_slots)

    def copy_tail(self, sequence: Request, sources: Sequence[int], index: int) -> None:
        """Copy the frames of a tail into new ones for page ``index`` of a sequence."""
        for group, (pool, held, source) in enumerate(
            zip(self.frames, sequence.windows, sources, strict=True)
        ):
            [frame] = pool.grow(held, index + 1)
            self._pool.copies.append(Duplicate(source, frame, group))

    def drop_sources(self, sources: Iterable[Sequence[int]]) -> None:
        """The copies of tails are noted: their frames need not be held any more."""
        for one in sources:
            for pool, frame in zip(self.frames, one, strict=True):
                pool.drop((frame,))
                pool.claimed -= 1

    # Steps

    def begin_plan(self, running: Iterable[Request], busy: Container[Request]) -> None:
        """A plan begins. Windows that have moved on give back, except those of ``busy`` sequences,
        which other plans in flight run."""
        self._started.clear()
        if self.frames:
            for request in running:
                for sequence in request.sequences:
                    if sequence not in busy:
                        self.leave(sequence)

    def repeat(
        self, plan: StepPlan, need_page: Iterable[Request], need_save: Iterable[Request]
    ) -> StepPlan:
        """A repeated plan with the frames of its new pages, and with its snapshots."""
        self._started.clear()
        for request in need_page:
            self.grow_pages(request, len(request.pages))
        if self.saves is not None:
            for request in need_save:
                self.saves.plan(request, 1)
        return self.complete(plan)

    def plan_saves(self, rows: Iterable[tuple[Request, StepRow]]) -> None:
        """Choose the snapshots that a plan takes."""
        if self.saves is not None:
            for sequence, row in rows:
                self.saves.plan(sequence, row.num_scheduled_tokens - len(row.drafts))

    def complete(self, plan: StepPlan) -> StepPlan:
        """The plan with the frames that running sequences got, and with its snapshots."""
        frames, self._new_frames = tuple(self._new_frames), []
        saves = () if self.saves is None else self.saves.take()
        vacated = self.take_vacated().places
        return plan._replace(new_frames=frames, state_saves=saves, vacated=vacated)

    def leave(self, sequence: Request) -> None:
        """Give back the frames that no later token of a sequence sees."""
        for pool, held in zip(self.frames, sequence.windows, strict=True):
            pool.leave(held, sequence.num_computed, sequence.num_prompt_tokens)

    def most_tokens(self, request: Request, count: int) -> int:
        """How many of ``count`` tokens each sequence of a request can run: more frames than it was
        promised may be missing. At least two."""
        if not self.frames:
            return count
        for sequence in request.sequences:
            self.leave(sequence)
        if self._fits(request, count):
            return count
        least, most = min(2, count), count
        while least < most:
            middle = (least + most + 1) // 2
            if self._fits(request, middle):
                least = middle
            else:
                most = middle - 1
        return least

    @property
    def most_drafts(self) -> int | None:
        """The most drafts of a row, if there is a limit."""
        return None if self.states is None else self.states.num_working - 1

    def _fits(self, request: Request, count: int) -> bool:
        needs = self._needs()
        for sequence in request.sequences:
            end = sequence.num_computed + count
            num_pages = min(-(-end // self._config.page_size), len(sequence.pages))
            for index, (pool, held) in enumerate(zip(self.frames, sequence.windows, strict=True)):
                needs[1 + index] += max(pool.missing(held, num_pages), 0)
        return not any(needs) or not self.budget.missing(needs)

    def grow(self, sequence: Request, num_tokens: int) -> None:
        """Take the frames for the next ``num_tokens`` tokens of a sequence."""
        end = sequence.num_computed + num_tokens
        self.grow_pages(sequence, -(-end // self._config.page_size))

    def grow_pages(self, sequence: Request, num_pages: int) -> None:
        """Take the frames for the first ``num_pages`` pages of a sequence, as far as later tokens
        see them."""
        for group, (pool, held) in enumerate(zip(self.frames, sequence.windows, strict=True)):
            if held.end >= num_pages:
                continue
            pool.leave(held, sequence.num_computed, sequence.num_prompt_tokens)
            lacking = pool.missing(held, num_pages)
            if lacking > 0:
                needs = self._needs()
                needs[1 + group] = lacking
                obtained = self._obtain(needs)
                assert obtained, "frames for a prompt are missing"
            first = held.end
            frames = pool.grow(held, num_pages)
            if sequence.request_id not in self._started:
                self._new_frames.append((sequence.request_id, Frames(group, first, frames)))

    # Results

    def publish(self, sequence: Request, index: int, key: PageKey) -> None:
        """A sequence has filled page ``index``, which is known now, or one with the same key is:
        attach its frames."""
        if not self.frames:
            return
        for page in self._pool.match((key,)):
            for pool, held in zip(self.frames, sequence.windows, strict=True):
                pool.attach(page, held.frame(index))

    def keep(self, sequence: Request, page: int, index: int) -> None:
        """A sequence ends, and ``page`` is known for the last tokens that it has computed, which
        are in page ``index`` of its table: the next request may go on from there."""
        for pool, held in zip(self.frames, sequence.windows, strict=True):
            pool.attach(page, held.frame(index))
        if self.saves is not None:
            self.saves.keep(sequence, page)

    def release(self, sequence: Request) -> None:
        """A sequence gives everything back."""
        for pool, held in zip(self.frames, sequence.windows, strict=True):
            pool.release(held)
        sequence.windows = []
        if self.saves is not None:
            self.saves.release(sequence)
        self._new_frames = [one for one in self._new_frames if one[0] != sequence.request_id]

    def sees(self, sequence: Request, num_tokens: int) -> bool:
        """Whether a running sequence still holds what the token after its first ``num_tokens``
        reads."""
        return self.saves is None and all(
            held.first <= pool.first_seen(num_tokens)
            for pool, held in zip(self.frames, sequence.windows, strict=True)
        )

    # Contents from elsewhere

    def begin_writing(self, num_pages: int) -> Written | None:
        """Places for what the token after a prefix of full pages needs. ``None``: there are too
        few."""
        tokens, found = num_pages * self._config.page_size, list[Held]()
        needs, snapshots = self._needs(snapshots=1), self.snapshots
        for index, pool in enumerate(self.frames):
            found.append(Held(0, pool.first_seen(tokens)))
            needs[1 + index] = num_pages - found[-1].first
        if not self._obtain(needs):
            return None
        for pool, held in zip(self.frames, found, strict=True):
            pool.grow(held, num_pages)
        return Written(found, 0 if snapshots is None else snapshots.take(1)[0])

    def end_writing(self, pages: Sequence[int], written: Written) -> None:
        """These known pages have the places of :meth:`begin_writing`, unless they had some. Without
        pages nothing was written."""
        for pool, held in zip(self.frames, written.frames, strict=True):
            for index in range(held.first, held.end if pages else 0):
                pool.attach(pages[index], held.frame(index))
            pool.release(held)
        if self.snapshots is not None and pages:
            before = self.snapshots.last_of(pages[:-1])
            tokens = len(pages) * self._config.page_size
            self.snapshots.attach(pages[-1], written.slot, tokens, before)
        elif self.snapshots is not None:
            self.snapshots.give_back((written.slot,))

    # Pins

    def pin(self, pages: Sequence[int]) -> Pinned | None:
        """Keep what a request needs to continue a prefix of full pages. ``None``: it is gone."""
        hit = self.longest(pages)
        needs = self._needs(snapshots=hit.snapshot is not None and not hit.snapshot.held)
        needs[1 : 1 + len(self.frames)] = map(len, hit.frames)
        if hit.num_pages < len(pages) or self.budget.missing(needs):
            return None
        for pool, frames in zip(self.frames, hit.frames, strict=True):
            for frame in frames:
                pool.hold(frame)
            pool.pin(len(frames))
        if self.snapshots is not None and hit.snapshot is not None:
            self.snapshots.hold(hit.snapshot)
            self.snapshots.num_pinned += 1
        self.budget.obtain(self._needs())
        return Pinned(hit.frames, hit.snapshot)

    def unpin(self, pinned: Pinned) -> None:
        """The opposite of :meth:`pin`."""
        for pool, frames in zip(self.frames, pinned.frames, strict=True):
            pool.drop(reversed(frames))
            pool.pin(-len(frames))
        if self.snapshots is not None and pinned.snapshot is not None:
            self.snapshots.drop(pinned.snapshot)
            self.snapshots.num_pinned -= 1

    def size_in_pages(self, sequence: Request) -> int:
        """What a running sequence holds, in pages' worth of bytes, at least."""
        nbytes = sum(
            held.claim * pool.unit_bytes
            for pool, held in zip(self.frames, sequence.windows, strict=True)
        )
        if self.states is not None:
            nbytes += self.states.num_working * self.states.unit_bytes
        return len(sequence.pages) + -(-nbytes // max(self._config.page_bytes, 1))

    @property
    def unused(self) -> list[list[int]]:
        """The places without content: frames by group, slots, those of snapshots in 16 bits."""
        slots = [] if self.states is None else self.states.unused
        rounded = self.snapshots.unused if self.rounds and self.snapshots is not None else []
        return [*(one.unused for one in self.frames), slots, rounded]

    def take_vacated(self) -> Vacated:
        """See :meth:`Budget.take_vacated`."""
        pages, *others = self.budget.take_vacated()
        rounded = others.pop() if self.rounds else []
        slots = others.pop() if self.states is not None else []
        return Vacated(pages, others, slots, rounded)

    def check(self, sequences: Sequence[Request], pins: Sequence[Pinned]) -> None:
        """Assert that all counts agree."""
        self.budget.check()
        pool = self._pool
        known = {page for page in range(1, pool.num_pages) if pool.key(page) is not None}
        for index, frames in enumerate(self.frames):
            held = [sequence.windows[index] for sequence in sequences]
            pinned = [frame for one in pins for frame in one.frames[index]]
            frames.check(held, pinned, known)
            for sequence, one in zip(sequences, held, strict=True):
                assert one.first <= frames.first_seen(sequence.num_computed), "a frame is missing"
                assert one.end * self._config.page_size >= sequence.num_computed, "no frame"
        if self.saves is not None:
            self.saves.check(sequences, pins=[one.snapshot for one in pins if one.snapshot])
