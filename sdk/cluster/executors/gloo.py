"""The collectives of CPU ranks: torch's gloo backend (sdk/cluster/executors/torch_group.py).

The ranks of one machine find each other through a file in a private folder, and the device is bound
to 127.0.0.1, so nothing listens on an external address. Ranks of several machines find each other
through a store of rank 0 (:func:`connect_tcp`); they need a network in which all machines are
trusted.

If a rank dies, the kernel closes its connections and the others' collectives fail at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C import _distributed_c10d

from sdk.cluster.executors.torch_group import Connection, TorchGroup
from sdk.kernels.errors import CollectiveError

_c10d: Any = _distributed_c10d  # untyped: see torch_group.py

#: Descriptors in addition to those for each rank; more than a group opens.
_DESCRIPTORS = 16


def connect(folder: str, rank: int, size: int, *, connect_s: float, limit_s: float) -> TorchGroup:
    """Join the ranks that meet in ``folder``; returns when this rank is connected to all others.

    :param connect_s: seconds to wait for the others.
    :param limit_s: seconds that one collective may wait for another rank.
    :raises CollectiveError: the others do not connect in time.
    """

    def store(limit: timedelta) -> Any:
        return _c10d.FileStore(str(Path(folder, "ranks")), size)

    return _connect(store, "127.0.0.1", rank, size, connect_s, limit_s)


def connect_tcp(
    place: str, rank: int, size: int, *, connect_s: float, limit_s: float
) -> TorchGroup:
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
) -> TorchGroup:
    _expect_descriptors(rank, _DESCRIPTORS + 4 * size)
    # _Options and _devices are private, but torch's own init_process_group uses them in this way
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = limit = timedelta(seconds=connect_s)
    options._threads = 1  # collectives come one at a time
    try:
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
        return TorchGroup(
            Connection(_c10d.ProcessGroupGloo(store(limit), rank, size, options)), limit_s
        )
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
