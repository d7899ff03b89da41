"""The collectives of GPU ranks: torch's NCCL backend (sdk/cluster/executors/torch_group.py).

In an exchange of GPU ranks the stream waits, not the host. So the loss of a rank does not show in
the exchange, and whoever waits for the card waits for ever. :meth:`Children.watch` therefore looks
for ranks that have ended or take too long, and closes the groups of rank 0. That aborts NCCL's
kernels; the call in progress ends with an error, and what the card has computed is not used.

torch watches NCCL's exchanges too. It ends the whole process if one takes longer than the backend's
time limit, which is why that limit is a year here. It also ends the process when NCCL reports an
error, and after an abort, unless the host has set ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` to 0 or 2
(:func:`process_may_end`). This package changes no environment variable.

None of this has run on a card yet: tests put gloo in the place of NCCL.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C import _distributed_c10d

from sdk.cluster.executors.torch_group import Connection, TorchGroup, TorchLink
from sdk.kernels.errors import CollectiveError

logger = logging.getLogger("sdk")
_c10d: Any = _distributed_c10d  # untyped: see torch_group.py

_Joined = TypeVar("_Joined")
_NEVER = timedelta(days=365)
_ABORT_S = 10.0
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def nccl_backend(store: Any, rank: int, size: int) -> Any:
    """NCCL between ``size`` ranks that share ``store``. :raises CollectiveError: torch has none."""
    make = getattr(_c10d, "ProcessGroupNCCL", None)
    if make is None:
        raise CollectiveError(
            f"torch {torch.__version__} has no NCCL: install its build for NVIDIA's GPUs"
        )
    options = make.Options()
    options._timeout = _NEVER
    return make(store, rank, size, options)


def process_may_end() -> str | None:
    """Why torch may end this process when a GPU rank is lost; ``None``: it does not."""
    if os.environ.get(_ERROR_HANDLING) in ("0", "2"):
        return None
    return (
        f"{_ERROR_HANDLING} is not 0 or 2: torch ends this process when a rank on a GPU is lost; "
        "set it to 0 before the process starts to get an error instead"
    )


@dataclass(frozen=True, slots=True)
class Cards:
    """The GPUs of an executor: rank r has the r-th of those that its process sees.

    ``backend``: makes what connects ranks from a store, a rank and the number of ranks.
    """

    backend: Callable[[Any, int, int], Any] = nccl_backend
    kind: str = "cuda"

    def of(self, rank: int) -> torch.device:
        """The card of a rank."""
        return torch.device(self.kind, rank)

    def use(self, rank: int) -> None:
        """Make the card of a rank the current device of this thread, in a process of our own."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.of(rank))

    def connect(
        self,
        folder: str,
        rank: int,
        size: int,
        *,
        card: torch.device,
        connect_s: float,
    ) -> TorchGroup:
        """Join the ranks that meet in ``folder``; returns when all are connected.

        NCCL's backend keeps the file there open and looks into it, so the folder must stay.

        :param card: of this rank.
        :param connect_s: seconds to wait for the others.
        :raises CollectiveError: the others do not connect in time.
        """

        def join() -> TorchGroup:
            group = TorchGroup(self._connection(folder, rank, size, connect_s))
            group.all_reduce(torch.zeros(1, device=card))  # NCCL connects in its first exchange
            return group

        return _within(connect_s, join, f"rank {rank}", card)

    def link(self, folder: str, *, sends: bool, card: torch.device, connect_s: float) -> TorchLink:
        """One end of a link between two ranks that meet in ``folder``; as :meth:`connect`."""
        rank = 0 if sends else 1

        def join() -> TorchLink:
            link = TorchLink(self._connection(folder, rank, 2, connect_s), sends=sends)
            first = torch.zeros(1, device=card)
            (link.send if sends else link.receive)(first)
            return link

        return _within(connect_s, join, "the sender" if sends else "the receiver", card)

    def _connection(self, folder: str, rank: int, size: int, connect_s: float) -> Connection:
        store = _c10d.FileStore(str(Path(folder, "ranks")), size)
        limit = timedelta(seconds=connect_s)
        store.set_timeout(limit)
        store.set(f"here-{rank}", "")  # NCCL itself would wait for the others for ever
        store.wait([f"here-{other}" for other in range(size)], limit)
        return Connection(self.backend(store, rank, size), _abort)


def _within(limit_s: float, join: Callable[[], _Joined], who: str, card: torch.device) -> _Joined:
    """What ``join`` returns, in a thread that is left alone if it takes too long: a rank that is
    lost while NCCL connects leaves the others waiting in native code."""
    found: list[_Joined] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            if card.type == "cuda":
                torch.cuda.set_device(card)  # of this thread
            found.append(join())
            if card.type == "cuda":
                torch.cuda.synchronize(card)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="sdk-connect", daemon=True)
    thread.start()
    # the store's own limit comes first, and has the better message
    thread.join(limit_s + 1.0)
    if failed and not isinstance(failed[0], RuntimeError):
        raise failed[0]
    if failed or thread.is_alive():
        why = failed[0] if failed else f"no answer within {limit_s:g} s"
        raise CollectiveError(f"{who} cannot connect to the others: {why}")
    return found[0]


def _abort(backend: Any) -> None:
    """Let NCCL's kernels end, and with them what waits for the card."""

    def run() -> None:
        try:
            backend.abort()
        except RuntimeError as error:  # a backend whose host waits has nothing to abort
            logger.debug("abort: %s", error)

    thread = threading.Thread(target=run, name="sdk-abort", daemon=True)
    thread.start()
    thread.join(_ABORT_S)
    if thread.is_alive():
        logger.warning("NCCL did not end its exchanges within %g s", _ABORT_S)
