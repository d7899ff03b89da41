"""How the ranks of an executor exchange tensors; nccl.py has those of GPUs."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from typing import Literal

from sdk.cluster.executors.gloo import connect as connect_gloo, connect_tcp
from sdk.cluster.executors.remote.tcp_group import TcpGroup
from sdk.cluster.executors.torch_group import TorchGroup, TorchLink
from sdk.kernels.cpu.rank_group import SharedGroup, SharedLink, why_not_shared
from sdk.kernels.system import SYSTEM

#: ``"memory"``: shared memory of one machine; a sum of 16 KB over two ranks takes about 5 us.
#: ``"gloo"``: sockets of the loopback device; 260 us. ``"tcp"``: gloo's sockets between machines,
#: neither encrypted nor authenticated.
Transport = Literal["memory", "gloo", "tcp"]
RankGroup = SharedGroup | TorchGroup | SharedLink | TorchLink | TcpGroup

# Of a folder in memory. The files of a large model's ranks have tens of MB, and containers often
# have 64 MB there: then a folder on a disk is used, whose files stay in the page cache.
_ENOUGH = 256 * 2**20


def transport() -> Transport:
    """What the ranks of this machine use."""
    return "memory" if why_not_shared() is None else "gloo"


def meeting_place() -> str:
    """A new folder, only for this user, in which the ranks meet. Its name has this process's id."""
    prefix = f"embedlm-{os.getpid()}-"
    folder = SYSTEM.memory_folder()
    with contextlib.suppress(OSError):
        if folder is not None and shutil.disk_usage(folder).free >= _ENOUGH:
            return tempfile.mkdtemp(prefix=prefix, dir=folder)
    return tempfile.mkdtemp(prefix=prefix)


def connect(
    kind: Transport,
    place: str,
    rank: int,
    size: int,
    *,
    connect_s: float,
    limit_s: float,
    processes: int | None = None,
) -> SharedGroup | TorchGroup:
    """Join the ranks that meet at ``place``; returns when this rank is connected to all others.

    :param place: a folder; for ``"tcp"`` the address of a store that rank 0 keeps, ``host:port``.
    :param connect_s: seconds to wait for the others.
    :param limit_s: seconds that one collective may wait for another rank.
    :param processes: how many processes compute at the same time (default: ``size``).
    :raises CollectiveError: the others do not connect in time.
    """
    if kind != "memory":
        join = connect_gloo if kind == "gloo" else connect_tcp
        return join(place, rank, size, connect_s=connect_s, limit_s=limit_s)
    return SharedGroup(place, rank, size, connect_s=connect_s, limit_s=limit_s, processes=processes)
