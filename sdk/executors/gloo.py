"""The collectives of CPU ranks: torch's gloo backend, without process globals.

``torch.distributed.init_process_group`` sets up one group for the whole process and would conflict
with a host that uses it. This module uses the backend's class directly, one object per engine. The
ranks of one machine find each other through a file in a private folder, and the device is bound to
127.0.0.1, so nothing listens on an external address. Ranks of several machines find each other
through a store of rank 0 (:func:`connect_tcp`); they need a network in which all machines are
trusted.

If a rank dies, the kernel closes its connections and the others' collectives fail at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from sdk.kernels.errors import CollectiveError

# Untyped, because torch's stubs lack most of the backend's methods. `torch.distributed` exports the
# same objects, but some only from torch 2.6 on.
_c10d: Any = _distributed_c10d


#: Descriptors in addition to those for each rank; more than a group opens.
_DESCRIPTORS = 16


class GlooGroup:
    """Sums and gathers float32 CPU tensors over the ranks (:class:`sdk.kernels.groups.Group`).

    Every rank gets the same bits, and an element's sum does not depend on its position in the
    tensor: two addends commute, and more are added in rank order. Gloo's own sum of three or more
    starts each part of the tensor at a different rank, so a row would depend on its neighbours.
    """

    def __init__(self, backend: Any, limit_s: float) -> None:
        self._backend: Any = backend
        self._size = backend.size()
        self._reduce, self._gather = _c10d.AllreduceOptions(), _c10d.AllgatherOptions()
        self._reduce.timeout = self._gather.timeout = timedelta(seconds=limit_s)

    def all_reduce(self, x: Tensor) -> None:
        """Sum ``x`` over all ranks, in place. :raises CollectiveError: see the class."""
        if self._size > 2 or not x.is_contiguous():
            total, *others = self.all_gather(x.contiguous())
            for other in others:
                total += other
            x.copy_(total)
            return
        try:
            self._open().allreduce([x], self._reduce).wait()
        except RuntimeError as error:
            raise CollectiveError(f"all_reduce: {error}") from error

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ``x`` of every rank, in rank order. :raises CollectiveError: see the class."""
        parts = list(torch.empty((self._size, *x.shape), dtype=x.dtype).unbind(0))
        try:
            self._open().allgather([parts], [x], self._gather).wait()
        except RuntimeError as error:
            raise CollectiveError(f"all_gather: {error}") from error
        return parts

    def _open(self) -> Any:
        if self._backend is None:
            raise CollectiveError("the group was closed")
        return self._backend

    def close(self) -> None:
        """Drop the connections and gloo's threads. Idempotent."""
        self._backend = None

    def abandon(self) -> None:
        """Never free the backend: in a forked child its destructor would hang, joining threads
        that the fork did not copy."""
        if self._backend is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))


def connect(folder: str, rank: int, size: int, *, connect_s: float, limit_s: float) -> GlooGroup:
    """Join the ranks that meet in ``folder``; returns when this rank is connected to all others.

    :param connect_s: seconds to wait for the others.
    :param limit_s: seconds that one collective may wait for another rank.
    :raises CollectiveError: the others do not connect in time.
    """

    def store(limit: timedelta) -> Any:
        return _c10d.FileStore(str(Path(folder, "ranks")), size)

    return _connect(store, "127.0.0.1", rank, size, connect_s, limit_s)


def connect_tcp(place: str, rank: int, size: int, *, connect_s: float, limit_s: float) -> GlooGroup:
    """Like :func:`connect`, for ranks of several machines that meet at a :class:`TcpStore`.

    A rank listens only at the address with which it reaches the store.
    """
    host, _, port = place.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), connect_s) as probe:
            own = probe.getsockname()[0]
    except OSError as error:
        raise CollectiveError(f"rank {rank} cannot reach rank 0 at {place}: {error}") from error

    def store(limit: timedelta) -> Any:
        return _c10d.TCPStore(host, int(port), size, False, limit, False)

    return _connect(store, own, rank, size, connect_s, limit_s)


class TcpStore:
    """Where the ranks of several machines meet, in rank 0's process: it listens at ``host`` only.

    Holds the addresses at which ranks listen. :raises CollectiveError: ``host`` is not an address
    of this machine.
    """

    def __init__(self, host: str, size: int) -> None:
        try:
            with socket.socket() as listener:
                listener.bind((host, 0))
                listener.listen(size)
                port = listener.getsockname()[1]
                descriptor = os.dup(listener.fileno())  # the store closes its own
        except OSError as error:
            raise CollectiveError(f"cannot listen at {host}: {error}") from error
        self.place = f"{host}:{port}"
        limit = timedelta(seconds=60)  # of no use here: nobody waits for this end
        self._store: Any = _c10d.TCPStore(host, port, size, True, limit, False, False, descriptor)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._store = None


def _connect(
    store: Callable[[timedelta], Any],
    host: str,
    rank: int,
    size: int,
    connect_s: float,
    limit_s: float,
) -> GlooGroup:
    _expect_descriptors(rank, _DESCRIPTORS + 4 * size)
    # _Options and _devices are private, but torch's own init_process_group uses them in this way
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = limit = timedelta(seconds=connect_s)
    options._threads = 1  # collectives come one at a time
    try:
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
        return GlooGroup(_c10d.ProcessGroupGloo(store(limit), rank, size, options), limit_s)
    except RuntimeError as error:
        raise CollectiveError(f"rank {rank} cannot connect to the others: {error}") from error


def _expect_descriptors(rank: int, count: int) -> None:
    """Check for free descriptors: without one, gloo's listener ends the whole process."""
    with contextlib.ExitStack() as undo:
        try:
            for _ in range(count):
                undo.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            raise CollectiveError(
                f"rank {rank} cannot connect to the others: expected {count} free file "
                f"descriptors (ulimit -n): {error}"
            ) from error
