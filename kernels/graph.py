"""Records a step once and replays it: one native call instead of a Python call per operator.

``Recording.capture`` runs a forward pass that computes nothing: every operator of the backend
records its arguments, and its results become fixed buffers. ``Graph.replay`` then runs all
operators with the counts of a step. This is the CPU's counterpart of a CUDA graph, with one
difference: a native operator takes its number of rows at run time, so one graph of the largest step
serves every smaller step.

A graph would lose what it does not see. During capture, therefore, every torch operation that is
not a pure view raises :class:`CaptureError`, and the caller runs such a model operator by operator.

``Recording.in_pieces`` is for recording in pieces: the work between two attentions depends only on
the number of tokens, while an attention depends on the lengths of its requests. Exchanges between
ranks are not recorded either, because then all ranks would have to record the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from sdk.kernels.activations import ActivationPool
from sdk.kernels.backend import RecordedProgram
from sdk.kernels.card import Card
from sdk.kernels.context import Context
from sdk.kernels.errors import CaptureError, KernelError
from sdk.kernels.host import arithmetic
from sdk.kernels.lazy_torch import Tensor, loaded
from sdk.kernels.operators.batch import AttentionBatch

Result = TypeVar("Result")
#: One attention of a forward pass: queries ``[T, heads, head_dim]``, the batch of the step, and
#: where the result goes, ``[T, heads * head_dim]``.
Attend = Callable[[Tensor, AttentionBatch, Tensor], None]
#: Called in place of an attention, with its queries, a tensor like its result, and the function
#: that runs it. Returns the result.
Cut = Callable[[Tensor, Tensor, Attend], Tensor]

#: Called in place of an exchange between ranks, with its tensor ``[T, N]`` and the function that
#: runs it on the first rows of a tensor like that.
Exchange = Callable[[Tensor, Callable[[Tensor], None]], None]


class Graph(Generic[Result]):
    """A recorded forward pass. Owns its buffers; the weights must outlive it.

    ``recorded`` is what the backend recorded. ``result`` is what the forward pass returned:
    buffers, whose first rows a replay fills.
    ``replay_again()`` is a replay with the counts of the last one.
    """

    def __init__(
        self,
        recorded: RecordedProgram,
        result: Result,
        buffers: ActivationPool,
        limits: tuple[int, int, int],
    ) -> None:
        self.recorded = recorded
        self._buffers = buffers
        self.result = result
        self.replay_again = recorded.run_again
        self.max_tokens, self.max_outputs, self.max_requests = limits

    def replay(self, *, tokens: int, outputs: int, requests: int) -> None:
        """Run the step on what its input buffers hold now: their first ``tokens`` and so on.

        :raises KernelError: for counts beyond the recorded ones, or when the native call fails.
        """
        counts = (tokens, outputs, requests)
        if tokens > self.max_tokens or outputs > self.max_outputs or requests > self.max_requests:
            limits = (self.max_tokens, self.max_outputs, self.max_requests)
            raise KernelError(
                f"replay: expected at most {limits} tokens, outputs and requests, found {counts}"
            )
        self.recorded.run(*counts)


@contextmanager
def only_views() -> Iterator[None]:
    """Raises :class:`CaptureError` for every operation on tensors that touches data."""
    with ExitStack() as undo:
        undo.enter_context(arithmetic.only_views())
        if loaded():
            from sdk.kernels.host.torch_views import OnlyViews

            undo.enter_context(OnlyViews())  # type: ignore[no-untyped-call]
        yield


class Recording:
    """``Ops.recording``: records forward passes instead of running them."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._recorded: RecordedProgram | None = None
        #: See :meth:`in_pieces`.
        self.cut: Cut | None = None
        self.exchange: Exchange | None = None

    def capture(
        self, forward: Callable[[], Result], *, tokens: int, outputs: int, requests: int
    ) -> Graph[Result]:
        """Record what ``forward`` computes for this many tokens, output rows and requests.

        Before ``Ops.select_rows`` operators run over the tokens, after it over the output rows.

        :raises CaptureError: ``forward`` does something other than view tensors and call operators
            of one native backend.
        """
        context = self._context
        backend: Any = context.backends[0]
        if not hasattr(backend, "record"):
            raise CaptureError(f"{backend.name} kernels cannot be recorded")
        # A buffer is reused for tensors of the same size only. In a phase of several operators
        # (native/program.hpp) the memory of a row then never becomes that of another row.
        context.capture_pool = buffers = ActivationPool(same_size=True)
        limits = (tokens, outputs, requests)
        try:
            with backend.record(limits) as recorded, only_views():
                self._recorded = recorded
                return Graph(recorded, forward(), buffers, limits)
        finally:
            context.capture_pool = self._recorded = None

    @property
    def active(self) -> bool:
        """Whether a step is being recorded."""
        return self._recorded is not None

    @contextmanager
    def torch_operations(self, rows: Tensor) -> Iterator[list[str]]:
        """Inside, row-wise operations of torch join a step that is being recorded.

        ``rows`` has one row for each token. Yields the names of what is recorded, so far none.
        :raises CaptureError: (inside) an operation whose rows depend on one another.
        """
        context = self._context
        assert context.capture_pool is not None
        from sdk.kernels.cpu.runtime import unowned
        from sdk.kernels.torch_tape import TorchTape

        def total(a: Tensor, b: Tensor) -> Tensor:
            out = context.empty(*a.shape)
            context.kernel("zeros", (out,)).run(out)
            for x in (a, b):
                context.kernel("add", (out,)).run(out, x)
            return out

        recorder: Any = self._recorded
        pool, empty = context.capture_pool, context.empty
        with TorchTape(recorder, pool, rows, unowned, empty, total) as tape:
            yield tape.names

    @property
    def card(self) -> Card | None:
        """What captures graphs of fixed shapes. ``None``: the backend's launches cannot be."""
        return self._context.card if self._context.backends[0].captures else None

    @contextmanager
    def in_pieces(self, cut: Cut, exchange: Exchange) -> Iterator[None]:
        """Inside, ``cut`` supplies the result of every attention, and ``exchange`` runs every sum
        and transfer between ranks."""
        self.cut, self.exchange = cut, exchange
        try:
            yield
        finally:
            self.cut = self.exchange = None
