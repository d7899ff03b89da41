"""The GPU of one engine: its device, a stream of its own, and how steps become CUDA graphs on it.

A host drives an engine from any thread, in whose current stream it may have work of its own. So an
engine does not use that stream: everything it launches, copies, allocates and captures is on
:attr:`Card.stream`. Executors enter the card around every call of a rank; inside, the device and
the stream are the thread's current ones, so that operators need no argument for them.

Streams come from torch, which has 32 per device and hands them out in turn: a host that makes as
many may get this one too. Then both wait for each other more than they have to, and what such a
host launches on it while graphs are captured would become part of a graph.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import Any

from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import torch


@cache
def _one_capture() -> threading.Lock:
    """For the whole process: garbage collection is switched off during a capture, and two captures
    at a time would not know which of them switches it on again."""
    return threading.Lock()


class Card:
    """See the module. A context manager, which may be entered again inside and by several threads.

    All graphs share one memory pool, because only one runs at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # weights that the host has on the card already
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self._entered = threading.local()
        self._pool: Any = None
        self._graph: Any = None

    def entered(self) -> Card:
        """To be entered: ``with card.entered():``."""
        return self

    def __enter__(self) -> Card:
        stack = self._stack
        caller = torch.cuda.current_stream(self.device)
        context: Any = torch.cuda.stream(self.stream)
        context.__enter__()
        stack.append((caller, context))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _, context = self._stack.pop()
        context.__exit__(kind, error, trace)
        if error is not None and type(error).__module__.startswith("triton."):
            name = torch.cuda.get_device_name(self.device)
            raise KernelError(
                f"{_kernel_of(error)} cannot run on {name}: {type(error).__name__}: {error}"
            ) from error

    @property
    def _stack(self) -> list[tuple[Any, Any]]:
        """What this thread has entered: the stream that was current, and what restores it."""
        found: list[tuple[Any, Any]] | None = getattr(self._entered, "stack", None)
        if found is None:
            found = self._entered.stack = []
        return found

    @contextmanager
    def lent(self) -> Iterator[None]:
        """A context for code of the host that reads or makes tensors of this engine.

        Inside, the stream that was current before the card was entered is current again. Its work
        comes after all that the engine has launched, and before all that it launches later. No host
        waits. A tensor that was made inside and is kept needs :meth:`keep`.
        """
        caller = self._caller
        caller.wait_stream(self.stream)
        try:
            with torch.cuda.stream(caller):
                yield
        finally:
            self.stream.wait_stream(caller)

    def give(self) -> None:
        """Let the caller's stream wait for what the engine has launched."""
        self._caller.wait_stream(self.stream)

    def take(self) -> None:
        """Let what the engine launches next wait for the caller's stream."""
        self.stream.wait_stream(self._caller)

    @property
    def _caller(self) -> Any:
        """The stream of this thread that was current before it entered the card."""
        stack = self._stack
        return stack[0][0] if stack else torch.cuda.current_stream(self.device)

    def keep(self, tensor: torch.Tensor) -> None:
        """Have the memory of a tensor of another stream not reused before the work launched on this
        stream until its end is done."""
        if tensor.is_cuda:
            tensor.record_stream(self.stream)

    # Graphs

    @contextmanager
    def capturing(self, forward: Callable[[], object]) -> Iterator[None]:
        """Run ``forward`` once, which compiles its kernels and makes its buffers; then a context
        for :meth:`begin` and :meth:`end`.

        Python's garbage collector is off inside: it might end a graph or free memory, which a
        capture does not allow. What raises leaves no capture open.
        """
        with self, _one_capture():
            if self._pool is None:
                gc.collect()  # before the memory of graphs is taken
                torch.cuda.empty_cache()
                self._pool = torch.cuda.graph_pool_handle()
            forward()
            self.stream.synchronize()
            collects = gc.isenabled()
            gc.disable()
            try:
                yield
            finally:
                graph, self._graph = self._graph, None
                if graph is not None:
                    with suppress(RuntimeError):  # the capture is broken, which was raised already
                        graph.capture_end()
                if collects:
                    gc.enable()

    def begin(self) -> None:
        """Record launches from now on, without running them."""
        graph = torch.cuda.CUDAGraph()
        # Other threads of the host may make calls that a recording does not allow.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    @property
    def is_capturing(self) -> bool:
        """Whether launches are recorded."""
        return self._graph is not None

    def end(self) -> Any:
        """The graph recorded since :meth:`begin`, which has ``replay()``."""
        graph, self._graph = self._graph, None
        graph.capture_end()
        return graph

    def drop_pool(self) -> None:
        """Use a new pool for later graphs: the old one's memory is free when its graphs are."""
        self._pool = None


def _kernel_of(error: BaseException) -> str:
    """The kernel that Triton was about to launch, which its errors do not name."""
    trace = error.__traceback__
    while trace is not None:
        kernel: Any = trace.tb_frame.f_locals.get("self")
        if type(kernel).__name__ == "JITFunction":
            return f"kernel {kernel.__name__}"
        trace = trace.tb_next
    return "a kernel"
