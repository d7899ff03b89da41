"""The GPU that is measured, or Triton's interpreter instead, to test that everything runs."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sdk.api.errors import SdkError
from sdk.kernels.backend import Problem
from sdk.kernels.gpu import available, matrix_type, tuning_of
from sdk.kernels.gpu.tuning import LIBRARIES
from sdk.kernels.registry import choose, open_backends

#: All buffers together are this many times the size of the second-level cache.
_CACHES = 4
#: Samples of a timing, and the least seconds of one.
_SAMPLES, _SAMPLE_S = 7, 3e-3


def no_card() -> str | None:
    """Why nothing can be measured here; ``None`` with a GPU or under the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        import_module("triton")  # the backend checks whether it is loaded, and interprets
    return None if available("cpu") is None else available("cuda")


class Card:
    """One device, and timing on it.

    ``tiny``: there is no GPU and Triton interprets; shapes are small and times mean nothing.
    ``activations``: the type of activations in most models on it.
    ``measured``: results of earlier rows, by name. The limits are ``copy``, in bytes read and
    written per second, and ``gemm``, in operations per second.
    ``rehearsing``: everything runs once to be compiled; nothing is timed.
    """

    def __init__(self, measured: dict[str, float], *, rehearsing: bool = False) -> None:
        self.rehearsing = rehearsing
        self.tiny = available("cpu") is None
        self.device = torch.device("cpu" if self.tiny else "cuda")
        self.measured, self.activations = measured, matrix_type(str(self.device))
        self.name, self.cache = "Triton's interpreter", 1 << 20
        #: What it shares with cards that may use its table of tile sizes.
        self.kind: dict[str, Any] = {}
        #: The rule for tile sizes, without the card's table.
        self.tuning = replace(tuning_of(str(self.device)), table=None, libraries={})
        if not self.tiny:
            found = torch.cuda.get_device_properties(self.device)
            self.name, self.cache = found.name, found.L2_cache_size
            self.kind = {"capability": [found.major, found.minor]}
            self.kind["processors"] = found.multi_processor_count
        self.random = torch.Generator(self.device).manual_seed(1)
        self.backends, _ = open_backends(str(self.device), 1, ("gpu", "reference"))

    @property
    def copy(self) -> float:
        return self.found("copy")

    @property
    def gemm(self) -> float:
        return self.found("gemm")

    def found(self, name: str) -> float:
        """The result of an earlier row. :raises SdkError: there is none."""
        if self.rehearsing:
            return self.measured.get(name, 1.0)
        if name not in self.measured:
            raise SdkError(f"expected an earlier measurement of {name}, found none")
        return self.measured[name]

    def choose(self, problem: Problem) -> Any:
        """The kernel of ours for ``problem``, also where the card's table prefers a library's."""
        names = [f"gpu.{name}" for name in LIBRARIES]
        choice = choose(
            self.backends, problem, lambda one: "a library's" if one.name in names else None
        )
        return choice.implementation

    def close(self) -> None:
        for backend in self.backends:
            backend.close()

    def size(self, real: int, tiny: int) -> int:
        """A dimension: ``real`` on a GPU, ``tiny`` under the interpreter."""
        return tiny if self.tiny else real

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=self.random, device=self.device, dtype=dtype)

    def matrix(self, n: int, k: int) -> Tensor:
        """A random matrix whose products with rows of variance 1 have variance 1."""
        return self.normal(n, k).mul_(k**-0.5)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Random integers from ``low`` to ``high - 1``: uint8 if they fit, otherwise int64."""
        dtype = torch.uint8 if high <= 256 else torch.int64
        return torch.randint(
            low, high, shape, generator=self.random, device=self.device, dtype=dtype
        )

    def copies(self, nbytes: int) -> int:
        """The number of buffers of ``nbytes`` to use in turn, so that none is still cached."""
        if self.tiny or self.rehearsing:
            return 1
        return max(1, min(64, -(-_CACHES * self.cache // nbytes)))

    def time(self, calls: Sequence[Callable[[], Any]], *, graph: bool = True) -> float:
        """Median seconds of one of ``calls``, which run in turn, each on its own buffers.

        ``graph``: replay them from a CUDA graph, so that launching costs nothing.
        """
        for call in calls:
            call()
        if self.rehearsing:
            self.synchronize()
            return 1.0
        if self.tiny:
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) / len(calls)
        run = _recorded(calls) if graph else lambda: _run(calls)
        once = _seconds(run, 1)
        count = max(1, math.ceil(_SAMPLE_S / once))
        return statistics.median(_seconds(run, count) for _ in range(_SAMPLES)) / len(calls)

    def synchronize(self) -> None:
        """:raises RuntimeError: the card was lost; no other call in this process will work."""
        if not self.tiny:
            torch.cuda.synchronize()


def _run(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _recorded(calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(calls)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _run(calls)
    return graph.replay


def _seconds(run: Callable[[], Any], count: int) -> float:
    """Seconds of one ``run``, by the card's clock."""
    begin, end = (_event() for _ in range(2))
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def expect_close(what: str, found: Tensor, expected: Tensor, limit: float) -> None:
    """Check a result before it is timed. :raises SdkError: it is wrong."""
    found, expected = found.double(), expected.double().to(found.device)
    distance = float((found - expected).norm() / expected.norm())
    if not distance <= limit:
        raise SdkError(
            f"{what}: expected an error of at most {limit:g} of the norm, found {distance:.3g}"
        )
