"""Frames: the memory of pages in the layers of one window group.

A token of these layers sees only the last ``window`` tokens, so a page needs memory there only
while a token that is yet to run may see it. A running sequence *holds* the frames of the pages that
its next token sees and of those that it is about to write (:class:`Held`), and gives them back as
its window moves on. Several sequences may hold one frame.

*Attachments.* When a page becomes known, its frame is attached to it: its content belongs to that
page. An attached frame without a holder is *idle*: a request that continues this prefix holds it
again. Idle frames are evicted when frames are needed, the least recently held first; before them go
those that the window has left within a prompt or an answer, where other requests rarely begin. A
page that is evicted loses its attachments.

*Claims.* A sequence that starts is promised as many frames as it may hold while it decodes, and a
prompt in pieces gets more only where nothing is promised to others (``most_tokens``). So frames are
never missing in the middle of an answer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class WindowGroup(NamedTuple):
    """The memory of the layers with one window: ``num_frames`` places of ``frame_bytes`` for one
    page each, place 0 reserved. A token sees ``window`` tokens, itself included."""

    window: int
    frame_bytes: int
    num_frames: int


class Held:
    """The frames that one sequence holds in one group: those of the pages ``first``, ``first + 1``,
    ... of its page table. ``claim``: how many it was promised."""

    __slots__ = ("claim", "first", "frames")

    def __init__(self, claim: int, first: int = 0) -> None:
        self.claim = claim
        self.first = first
        self.frames: deque[int] = deque()

    @property
    def end(self) -> int:
        """The page after the last one with a frame."""
        return self.first + len(self.frames)

    def frame(self, index: int) -> int:
        """The frame of a page of the table; 0: it has none."""
        index -= self.first
        return self.frames[index] if 0 <= index < len(self.frames) else 0


class FramePool:
    """The frames of one window group. Not thread-safe. ``num_pages``: ids of pages.

    ``claimed``: how many frames are promised or held, each sequence for itself.
    """

    def __init__(self, group: WindowGroup, page_size: int, num_pages: int) -> None:
        self.window = group.window
        self.unit_bytes = group.frame_bytes
        self.num_frames = group.num_frames
        self.capacity = 0
        self.claimed = 0
        self.num_pinned = 0
        self.evictions = 0
        #: Called with a number of missing frames before an idle one is evicted.
        self.on_shortage: Callable[[int], None] | None = None
        #: Called with an idle frame and its page before the frame is evicted.
        self.on_evict: Callable[[int, int], None] | None = None
        self._page_size = page_size
        self._withheld = list(range(group.num_frames - 1, 0, -1))
        self._free: list[int] = []
        self._idle: OrderedDict[int, None] = OrderedDict()  # the least recently held first
        self._passed: set[int] = set()  # idle ones where other requests rarely begin
        self._holders = [0] * group.num_frames
        self._pages = [0] * group.num_frames  # by frame: the page it is attached to
        self._frames = [0] * num_pages  # by page: the frame attached to it

    # Memory (budget.Places)

    @property
    def num_withheld(self) -> int:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        return len(self._withheld)

    @property
    def num_spare(self) -> int:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        return self.capacity - self.claimed

    @property
    def unused(self) -> list[int]:
        """Places without content."""
        return list(self._free)

    @property
    def num_unused(self) -> int:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        return min(len(self._free), self.capacity - self.claimed)

    def pin(self, count: int) -> None:
        """So many frames more are held by pinned prefixes (negative: fewer)."""
        self.claimed += count
        self.num_pinned += count

    @property
    def num_idle(self) -> int:
        """Frames with content that nobody holds."""
        return len(self._idle)

    def take_away(self, count: int) -> list[int]:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        count = min(count, self.num_spare)
        taken = self._free[:count]
        del self._free[:count]
        while len(taken) < count:
            taken.append(self._evict())
        self._withheld += taken
        self.capacity -= len(taken)
        return taken

    def give(self, count: int) -> list[int]:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        kept = max(len(self._withheld) - count, 0)
        given = self._withheld[kept:]
        del self._withheld[kept:]
        self._free += given
        self.capacity += len(given)
        return given

    # Windows

    @property
    def most_held(self) -> int:
        """The most frames that a decoding sequence holds: pages of its window, a token that runs,
        and one more for which its page may come early."""
        return self.window // self._page_size + 2

    def first_seen(self, num_tokens: int) -> int:
        """The first page that the token after ``num_tokens`` sees."""
        return max(num_tokens + 1 - self.window, 0) // self._page_size

    def frames_of(self, pages: Sequence[int]) -> list[int]:
        """The frames attached to pages; 0: none."""
        return [self._frames[page] for page in pages]

    def last_without(self, pages: Sequence[int], first: int, end: int) -> int:
        """The last index in ``first : end`` of a page without a frame; -1: all have one."""
        frames = self._frames
        for index in range(end - 1, first - 1, -1):
            if not frames[pages[index]]:
                return index
        return -1

    # Holders

    def claim(self, held: Held) -> None:
        """Promise a sequence its frames. It may be more than there are until the budget was asked
        for them."""
        self.claimed += held.claim

    def hold(self, frame: int) -> None:
        """One more holder of an attached frame, besides those in ``Held``."""
        if not self._holders[frame]:
            self._leave_idle(frame)
        self._holders[frame] += 1

    def _leave_idle(self, frame: int) -> None:
        del self._idle[frame]
        self._passed.discard(frame)

    def drop(self, frames: Iterable[int]) -> None:
        """These frames have one holder less; the last of them becomes idle last."""
        for frame in frames:
            self._holders[frame] -= 1
            if not self._holders[frame]:
                if self._pages[frame]:
                    self._idle[frame] = None
                else:
                    self._free.append(frame)

    def share(self, held: Held, frames: Iterable[int]) -> None:
        """A sequence also holds these, which are attached to the next pages of its table; 0: it
        gets one of its own by :meth:`fill`."""
        for frame in frames:
            if frame:
                self.hold(frame)
            held.frames.append(frame)
        self.claimed += max(len(held.frames) - held.claim, 0)

    def fill(self, held: Held) -> list[tuple[int, int]]:
        """Take the frames that are missing after :meth:`share`: pages of the table with theirs."""
        missing = [index for index, frame in enumerate(held.frames) if not frame]
        found = self._take(len(missing))
        for index, frame in zip(missing, found, strict=True):
            held.frames[index] = frame
        return [(held.first + index, held.frames[index]) for index in missing]

    def is_passed(self, frame: int) -> bool:
        """Whether the window has left an idle frame where other requests rarely begin."""
        return frame in self._passed

    def leave(self, held: Held, num_tokens: int, num_prompt_tokens: int) -> None:
        """Give back what the tokens after ``num_tokens`` do not see.

        The frames that a request needs which begins at the last full page of the prompt become
        idle last; those of pages in its middle and of the answer are evicted before all others.
        """
        count = min(self.first_seen(num_tokens) - held.first, len(held.frames))
        if count > 0:
            before = len(held.frames)
            end = num_prompt_tokens // self._page_size
            seen = range(self.first_seen(end * self._page_size), end)
            for page in range(held.first, held.first + count):
                frame = held.frames.popleft()
                self.drop((frame,))
                if page not in seen and frame in self._idle:
                    self._idle.move_to_end(frame, last=False)
                    self._passed.add(frame)
            self.claimed -= max(before - held.claim, 0) - max(before - count - held.claim, 0)
        held.first += max(count, 0)

    def missing(self, held: Held, num_pages: int) -> int:
        """How many frames beyond what it was promised a sequence needs for its first ``num_pages``
        pages (that its window still sees)."""
        return num_pages - held.first - max(held.claim, len(held.frames))

    def grow(self, held: Held, num_pages: int) -> tuple[int, ...]:
        """Take frames for all of a sequence's first ``num_pages`` pages; returns the new ones."""
        count = num_pages - held.end
        if count <= 0:
            return ()
        before, new = len(held.frames), self._take(count)
        held.frames += new
        after = before + count
        self.claimed += max(after - held.claim, 0) - max(before - held.claim, 0)
        return tuple(new)

    def _take(self, count: int) -> list[int]:
        """Frames for one holder."""
        if count > len(self._free) and self.on_shortage is not None:
            self.on_shortage(count - len(self._free))
        new = []
        for _ in range(count):
            frame = self._free.pop() if self._free else self._evict()
            self._holders[frame] = 1
            new.append(frame)
        return new

    def release(self, held: Held) -> None:
        """A sequence ends or is preempted."""
        self.claimed -= max(held.claim, len(held.frames))
        self.drop(reversed(held.frames))
        held.frames.clear()
        held.claim = 0

    # Attachments

    def attach(self, page: int, frame: int) -> None:
        """The held ``frame`` has the content of a known page, unless that has one already."""
        if frame and not self._frames[page] and not self._pages[frame]:
            self._frames[page] = frame
            self._pages[frame] = page

    def detach(self, page: int) -> None:
        """A page is not known any more."""
        frame = self._frames[page]
        if frame:
            self._frames[page] = self._pages[frame] = 0
            if not self._holders[frame]:
                self._leave_idle(frame)
                self._free.append(frame)

    def detach_all(self) -> None:
        """No page is known any more."""
        for page in [page for page, frame in enumerate(self._frames) if frame]:
            self.detach(page)

    def _evict(self) -> int:
        frame = next(iter(self._idle))
        if self.on_evict is not None:
            self.on_evict(frame, self._pages[frame])
        self._leave_idle(frame)
        self._frames[self._pages[frame]] = self._pages[frame] = 0
        self.evictions += 1
        return frame

    def check(self, held: Iterable[Held], pinned: Iterable[int], known: set[int]) -> None:
        """Assert that all counts agree. ``pinned``: frames held besides; ``known``: pages."""
        held, pinned = list(held), list(pinned)
        counts = [0] * self.num_frames
        for one in held:
            for frame in one.frames:
                counts[frame] += 1
        for frame in pinned:
            counts[frame] += 1
        assert counts == self._holders, "frames and their holders differ"
        claimed = sum(max(one.claim, len(one.frames)) for one in held) + len(pinned)
        assert claimed == self.claimed, "claims of frames differ"
        assert self.claimed <= self.capacity, "more frames are promised than there are"
        free, idle, withheld = set(self._free), set(self._idle), set(self._withheld)
        used = {frame for frame, count in enumerate(counts) if count}
        sets = free, idle, withheld, used
        total = sum(map(len, sets))
        assert total == self.num_frames - 1 == len(set().union(*sets) - {0}), "a frame was lost"
        assert len(free) == len(self._free), "a frame is free twice"
        assert self._passed <= idle, "a frame that was passed is not idle"
        assert self.capacity + len(withheld) == self.num_frames - 1, "capacity is wrong"
        attached = {frame: page for frame, page in enumerate(self._pages) if page}
        assert idle <= attached.keys() <= idle | used, "an idle frame is of no page"
        assert set(attached.values()) <= known, "an unknown page has a frame"
        pages = {page: frame for page, frame in enumerate(self._frames) if frame}
        assert pages == {page: frame for frame, page in attached.items()}, "attachments differ"
