"""Whole decode steps as CUDA graphs.

A graph has fixed shapes, so there is one per bucket of batch sizes, captured when it is first
needed; a step of fewer requests runs in the next larger one, filled up with rows that have no
request (no query, slot -1: attention and the write of keys pass over them). All graphs share one
pool of memory, because only one runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from sdk.kernels.errors import KernelError
from sdk.kernels.graph import CaptureError

Result = TypeVar("Result")


def buckets(largest: int) -> list[int]:
    """Batch sizes that have a graph: powers of two up to 8, then multiples of 8."""
    small = [size for size in (1, 2, 4) if size < largest]
    return [*small, *range(8, largest, 8), largest]


class StepGraphs(Generic[Result]):
    """The decode steps of one engine. ``forward(size, shared)`` runs one over the first rows of
    buffers that stay, ``shared`` if all requests begin with the same pages; what it returns are
    buffers too, filled by every replay.

    Not run on a card yet: capture itself is the one part the interpreter cannot show.
    """

    def __init__(self, forward: Callable[[int, bool], Result], largest: int) -> None:
        self._forward = forward
        self._buckets = buckets(largest)
        self._captured: dict[tuple[int, bool], tuple[Any, Result]] = {}
        self._pool: Any = None

    def size(self, requests: int) -> int:
        """The bucket a step of so many requests runs in."""
        for size in self._buckets:
            if size >= requests:
                return size
        raise KernelError(
            f"replay: expected at most {self._buckets[-1]} requests, found {requests}"
        )

    def replay(self, size: int, shared: bool) -> Result:
        """Run the step of a bucket on what its buffers hold now.

        :raises CaptureError: when it cannot be captured.
        """
        if (size, shared) not in self._captured:
            try:
                self._captured[size, shared] = self._capture(size, shared)
            except RuntimeError as error:
                raise CaptureError(f"a decode step cannot be captured: {error}") from error
        graph, result = self._captured[size, shared]
        graph.replay()
        return result

    def _capture(self, size: int, shared: bool) -> tuple[Any, Result]:
        """Once as it is, which compiles its kernels, then recorded."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(size, shared)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self._forward(size, shared)
        self._pool = graph.pool()
        return graph, result
