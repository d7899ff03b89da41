"""Sums, gathers and transfers over a backend of ``torch.distributed``, without process globals.

``torch.distributed.init_process_group`` sets up one group for the whole process and would conflict
with a host that uses it. So these classes use the backend objects themselves, one or more for each
engine. gloo.py makes those of CPU ranks, nccl.py those of GPU ranks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d

from sdk.kernels.errors import CollectiveError

# Untyped, because torch's stubs lack most of the backend's methods. `torch.distributed` exports the
# same objects, but some only from torch 2.6 on.
_c10d: Any = _distributed_c10d


class Connection:
    """A backend until it is closed.

    :param end: called once with the backend before it is dropped.
    """

    def __init__(self, backend: Any, end: Callable[[Any], None] | None = None) -> None:
        self._backend: Any = backend
        self._end = end
        self.size: int = backend.size()

    def run(self, what: str, begin: Callable[[Any], Any]) -> None:
        """Wait for the work that ``begin(backend)`` returns. For NCCL, the stream waits.

        :raises CollectiveError: it fails, or the connection was closed.
        """
        try:
            begin(self._open()).wait()
        except RuntimeError as error:
            raise CollectiveError(f"{what}: {error}") from error
        self._open()  # what was closed meanwhile has no result

    def _open(self) -> Any:
        if self._backend is None:
            raise CollectiveError("the group was closed")
        return self._backend

    def close(self) -> None:
        """End and drop the backend, from any thread. Idempotent."""
        backend, self._backend = self._backend, None
        if backend is not None and self._end is not None:
            self._end(backend)

    def abandon(self) -> None:
        """Never free the backend: in a forked child its destructor would hang, joining threads
        that the fork did not copy."""
        if self._backend is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))


class TorchGroup:
    """Sums and gathers over all ranks (:class:`sdk.kernels.groups.CollectiveGroup`).

    Every rank gets the same bits, and an element's sum does not depend on its position in the
    tensor: two addends commute, and more are added in rank order. The backends' own sums of three
    or more start each part of the tensor at a different rank, so a row would depend on its
    neighbours.

    :param limit_s: seconds that the host waits for another rank; ``None``: as the backend says.
        With NCCL the stream waits, not the host (sdk/cluster/executors/nccl.py).
    """

    def __init__(self, connection: Connection, limit_s: float | None = None) -> None:
        self._connection = connection
        self._reduce, self._gather = _c10d.AllreduceOptions(), _c10d.AllgatherOptions()
        if limit_s is not None:
            self._reduce.timeout = self._gather.timeout = timedelta(seconds=limit_s)

    def all_reduce(self, x: Tensor) -> None:
        """Sum ``x`` over all ranks, in place. :raises CollectiveError: a rank is lost."""
        if self._connection.size > 2 or not x.is_contiguous():
            total, *others = self.all_gather(x)
            for other in others:
                total += other
            x.copy_(total)
            return
        self._connection.run("all_reduce", lambda backend: backend.allreduce([x], self._reduce))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ``x`` of every rank, in rank order. :raises CollectiveError: a rank is lost."""
        x = x.contiguous()
        parts = x.new_empty(self._connection.size, *x.shape)
        self._connection.run(
            "all_gather",
            lambda backend: backend._allgather_base(parts.view(-1), x.view(-1), self._gather),
        )
        return list(parts.unbind(0))

    def close(self) -> None:
        """Drop the connections and the backend's threads. Idempotent."""
        self._connection.close()

    def abandon(self) -> None:
        """See :meth:`Connection.abandon`."""
        self._connection.abandon()


class TorchLink:
    """One end of a connection of two ranks (:class:`sdk.kernels.groups.Link`).

    :param sends: whether this is the end that sends.
    """

    #: The stream waits for the other end, not the host.
    waited_seconds = 0.0

    def __init__(self, connection: Connection, *, sends: bool) -> None:
        self._connection = connection
        self._other = 1 if sends else 0

    def send(self, x: Tensor) -> None:
        """See :class:`sdk.kernels.groups.Link`. :raises CollectiveError: the other end is lost."""
        self._connection.run("send", lambda backend: backend.send([x], self._other, 0))

    def receive(self, out: Tensor) -> None:
        """See :class:`sdk.kernels.groups.Link`. :raises CollectiveError: the other end is lost."""
        self._connection.run("receive", lambda backend: backend.recv([out], self._other, 0))

    def reserve(self, nbytes: int) -> None:
        """Nothing: the backend has buffers of its own."""

    def close(self) -> None:
        """Drop the connection. Idempotent."""
        self._connection.close()

    def abandon(self) -> None:
        """See :meth:`Connection.abandon`."""
        self._connection.abandon()
