"""What replicas that run in lockstep share: see :mod:`sdk.models.experts.lockstep`."""

from __future__ import annotations

import mmap
import os
import shutil
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdk.loading.load import ModelFacts
    from sdk.models.experts.lockstep import Lockstep

_WORD = 8
#: Seconds until all of them have started.
_CONNECT_S = 120.0
#: Seconds that one waits for another one that lives: the host replaces those that are stuck.
_PATIENCE_S = 24 * 3600.0


class Doorbells:
    """Made before the replicas are forked, which share it. Each uses its own number, ``rank``.

    A replica that begins a step counts it in shared memory and wakes the others, of which those
    without requests wait for messages. A replica whose own count is behind takes part in a step.
    """

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, _WORD * size)
        self._begun = memoryview(self._memory).cast("q")
        self._bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(size)]

    def ring(self, rank: int) -> None:
        """Count a step that begins here, and wake the others."""
        self._begun[rank] += 1
        for other, bell in enumerate(self._bells):
            if other != rank:
                os.eventfd_write(bell, 1)

    def bell(self, rank: int) -> int:
        """The descriptor that becomes readable when another replica begins a step."""
        return self._bells[rank]

    def answer(self, rank: int) -> None:
        """Make the descriptor wait for the next ring."""
        with suppress(BlockingIOError):  # answered already
            os.eventfd_read(self._bells[rank])

    def is_behind(self, rank: int) -> bool:
        """Whether another replica has begun a step in which this one must take part."""
        return max(self._begun) > self._begun[rank]

    def close(self) -> None:
        """Close the descriptors of this process."""
        for bell in self._bells:
            os.close(bell)
        self._begun.release()
        self._memory.close()


class LockstepStart:
    """Made by the parent of ``size`` replicas before they are forked, anew for each start.

    ``redundant``: copies of experts.
    """

    def __init__(self, size: int, redundant: int) -> None:
        from sdk.cluster.executors.groups import meeting_place

        self._size = size
        self._redundant = redundant
        self._folder = meeting_place()
        self._numbers: set[int] = set()
        self.doorbells = Doorbells(size)

    def take(self, number: int) -> bool:
        """Whether replica ``number`` starts with these, not with the next ones."""
        if number in self._numbers or len(self._numbers) == self._size:
            return False
        self._numbers.add(number)
        return True

    def join(self, number: int, facts: ModelFacts) -> Lockstep:
        """In the forked child: returns when all replicas are here.

        :raises CollectiveError: one of them does not come.
        """
        from sdk.kernels.cpu.rank_group import SharedGroup
        from sdk.memory.demand import lockstep_floats
        from sdk.models.experts.lockstep import Lockstep

        group = SharedGroup(
            self._folder,
            number,
            self._size,
            connect_s=_CONNECT_S,
            limit_s=_PATIENCE_S,
            processes=self._size * facts.runner_config.num_threads,
        )
        if number == 0:
            shutil.rmtree(self._folder, ignore_errors=True)  # all have joined
        return Lockstep(
            number,
            self._size,
            group,
            most_tokens=facts.runner_config.max_num_batched_tokens,
            row_floats=lockstep_floats(facts.model_config),
            redundant=self._redundant,
            ring=partial(self.doorbells.ring, number),
        )

    def close(self) -> None:
        """In the parent, when other replicas start or none will."""
        self.doorbells.close()
        shutil.rmtree(self._folder, ignore_errors=True)
