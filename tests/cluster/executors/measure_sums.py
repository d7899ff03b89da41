"""The time of a sum over two ranks: ``python tests/cluster/executors/measure_sums.py
[tcp|gloo|memory]``.

The two ranks are processes of this machine; sockets are those of the loopback device.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from typing import Any

import torch

from sdk.api.remote_workers import Address
from sdk.cluster.executors.groups import connect
from sdk.cluster.executors.remote.tcp_group import TcpGroup
from sdk.cluster.wire.tls import SharedToken

TOKEN = b"0123456789abcdef-of-these-tests"
SIZES = {"2.3 KB": 576, "16 KB": 4096, "590 KB": 147456}


def group_of(kind: str, rank: int, folder: str, server: socket.socket) -> Any:
    if kind != "tcp":
        return connect(kind, folder, rank, 2, connect_s=60, limit_s=60)
    if rank:
        stream = SharedToken(TOKEN, "sums").connect(Address(*server.getsockname()), 60)
    else:
        stream = SharedToken(TOKEN, "sums").accept(server.accept()[0], 60)
    return TcpGroup(rank, {1 - rank: stream}, 60)


def main(kind: str) -> None:
    folder = tempfile.mkdtemp()
    server = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    rank = int(child == 0)
    torch.set_num_threads(1)
    group = group_of(kind, rank, folder, server)
    for name, count in SIZES.items():
        x = torch.ones(1, count)
        seconds = []
        for _ in range(2000 if count < 10_000 else 200):
            x.fill_(1.0)
            began = time.perf_counter()
            group.all_reduce(x)
            seconds.append(time.perf_counter() - began)
        if not rank:
            tenths = statistics.quantiles(seconds, n=10)
            print(f"{kind} {name}: p50 {tenths[4] * 1e6:.0f} us, p90 {tenths[8] * 1e6:.0f} us")
    if rank:
        os._exit(0)
    os.waitpid(child, 0)
    group.close()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tcp")
