"""The ranks of one machine, which exchange tensors through shared memory: native/rank_group.hpp."""

from __future__ import annotations

import os
import sys
import weakref

import torch
from torch import Tensor

from sdk.kernels.cpu.library import find_library
from sdk.kernels.cpu.runtime import check
from sdk.kernels.errors import CollectiveError


def why_not_shared() -> str | None:
    """Why ranks of this machine cannot share memory; ``None`` if they can."""
    if sys.platform != "linux":
        return f"on {sys.platform} a rank could not tell that another one ended"
    found = find_library()
    return found if isinstance(found, str) else None


class SharedGroup:
    """A :class:`sdk.kernels.groups.Group`. The native operators exchange through it directly.

    The ranks meet in ``folder``, best one in memory (``/dev/shm``); they need it only until all
    have joined. Sums are added in the order of the ranks.

    :param connect_s: seconds to wait for the others.
    :param limit_s: seconds to wait in an exchange for a rank that is alive. One that has ended is
        noticed after 0.1 to 0.2 s.
    :raises CollectiveError: the others do not come in time.
    """

    def __init__(
        self, folder: str, rank: int, size: int, *, connect_s: float, limit_s: float
    ) -> None:
        library = find_library()
        if isinstance(library, str):
            raise CollectiveError(library)
        handle = library.embedlm_ranks_create(rank, size, limit_s)
        if not handle:
            raise CollectiveError(f"rank {rank}: out of memory")
        self.handle: int = handle
        self._library = library
        self._size = size
        # Native programs hold the handle, and their model holds this group.
        weakref.finalize(self, library.embedlm_ranks_destroy, handle).atexit = False
        joined = library.embedlm_ranks_join(handle, os.fsencode(folder), connect_s)
        check(joined, f"rank {rank} cannot connect to the others")

    def all_reduce(self, x: Tensor) -> None:
        """See :class:`sdk.kernels.groups.Group`."""
        total, *others = self._gather("all_reduce", x)
        for other in others:
            total += other
        x.copy_(total)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See :class:`sdk.kernels.groups.Group`."""
        return self._gather("all_gather", x)

    def _gather(self, what: str, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        out = torch.empty((self._size, *x.shape), dtype=x.dtype)
        if x.numel():
            gather = self._library.embedlm_ranks_gather
            check(gather(self.handle, x.data_ptr(), x.nbytes, out.data_ptr()), what)
        return list(out.unbind(0))

    def close(self) -> None:
        """Let all exchanges fail, here and on the other ranks. Idempotent.

        The memory is given back with the object.
        """
        self._library.embedlm_ranks_give_up(self.handle)

    def abandon(self) -> None:
        """For a forked child, in which the group does nothing."""
