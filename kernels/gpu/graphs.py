"""CUDA graphs: records and replays launches on torch's current card."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch


class CardRecorder:
    """See :class:`sdk.kernels.sized_graphs.GraphRecorder`; all graphs share one memory pool.

    Not run on a card yet: capture is the one part that the interpreter cannot test.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: Any = None
        self._graph: Any = None
        self._undo = ExitStack()

    def warm_up(self, forward: Callable[[], object]) -> None:
        """Run ``forward`` once and wait for it.

        Afterwards no garbage is left that could be destroyed during a recording, and torch has
        returned the memory that the run freed on this stream.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream()
            self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            forward()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()

    def begin(self) -> None:
        """Record launches from now on, without running them. Needs :meth:`warm_up` first."""
        with ExitStack() as undo:
            undo.enter_context(torch.cuda.stream(self._stream))
            self._graph = torch.cuda.CUDAGraph()
            # Other threads of the host may make calls that a recording does not allow.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._undo = undo.pop_all()

    def end(self) -> Any:
        """The graph recorded since :meth:`begin`, which has ``replay()``."""
        graph, self._graph = self._graph, None
        with self._undo:
            graph.capture_end()
        return graph
