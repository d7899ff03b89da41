"""A step recorded once and replayed: one native call instead of a Python call per operator.

``Ops.capture`` runs a forward pass in which nothing is computed: every operator of the backend
notes its arguments, and the tensors it would have made are fixed buffers from then on.
``Graph.replay`` runs them all with the counts of a step. It is to a CPU what a CUDA graph is to a
GPU, with one difference: a native operator takes its number of rows at run time, so that one graph
as large as the largest step serves every smaller one.

Anything a graph does not see would be lost on replay, so while capturing every torch operation that
is not a mere view raises :class:`CaptureError`, and the caller runs such a model operator by
operator instead.

``Ops.cut_at_attention`` serves those who record in pieces: what lies between two attentions depends
on nothing but the number of tokens, an attention on the lengths of its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdk.kernels.activations import ActivationPool
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.errors import KernelError

if TYPE_CHECKING:
    from sdk.kernels.registry import Backend
    from sdk.kernels.sized_graphs import GraphRecorder

Result = TypeVar("Result")
#: One attention of a forward pass: queries ``[T, heads, head_dim]``, the batch of the step, and
#: where the result goes, ``[T, heads * head_dim]``.
Attend = Callable[[Tensor, AttentionBatch, Tensor], None]
#: What stands in the place of an attention: its queries, a tensor like its result, and what runs
#: it; returns the result.
Cut = Callable[[Tensor, Tensor, Attend], Tensor]

#: Torch operations that move no data.
_VIEWS = frozenset(
    f"aten.{name}"
    for name in (
        *("alias", "as_strided", "detach", "expand", "lift_fresh", "permute", "select", "slice"),
        *("split", "split_with_sizes", "squeeze", "t", "transpose", "unsqueeze", "view"),
        *("_unsafe_view", "_reshape_alias"),
    )
)


class CaptureError(KernelError):
    """The forward pass cannot be recorded; the message names what stood in the way."""


class Recorded(Protocol):
    """What a backend noted."""

    def run(self, tokens: int, outputs: int, requests: int) -> None: ...

    def run_again(self) -> None: ...


class Recorder(Protocol):
    """A backend that can record its operators.

    ``limits``: the rows that tensors of tokens, outputs and requests have while recording.
    """

    def record(self, limits: tuple[int, int, int]) -> AbstractContextManager[Recorded]: ...


class Graph(Generic[Result]):
    """A recorded forward pass. Owns its buffers; the weights must outlive it.

    ``result`` is what the forward pass returned: buffers, whose first rows a replay fills.
    ``replay_again()`` is a replay with the counts of the last one.
    """

    def __init__(
        self,
        recorded: Recorded,
        result: Result,
        buffers: ActivationPool,
        limits: tuple[int, int, int],
    ) -> None:
        self._recorded = recorded
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
        self._recorded.run(*counts)


class OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises :class:`CaptureError` for every torch operation that touches data."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler, 800 modules, only to leave this class alone."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func).rpartition(".")[0] in _VIEWS:
            return func(*args, **kwargs)
        with self:  # flatten, reshape, contiguous: made of views, or of views and a copy
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise CaptureError(f"a step with {func} cannot be recorded: it is not one of ours")
        return result


class GraphOps:
    """The part of :class:`sdk.kernels.ops.Ops` that records forward passes."""

    _backends: list[Backend]
    #: Of the graph being captured.
    _buffers: ActivationPool | None = None
    _cut: Cut | None = None

    @property
    def capturing(self) -> bool:
        """True while operators are recorded, not run: then tensors hold nothing to look at."""
        return self._buffers is not None

    def capture(
        self, forward: Callable[[], Result], *, tokens: int, outputs: int, requests: int
    ) -> Graph[Result]:
        """Record what ``forward`` computes on tensors of so many tokens, outputs and requests.

        After ``Ops.select_rows`` every operator runs over the outputs, before over the tokens.

        :raises CaptureError: when ``forward`` does anything but view tensors and call operators of
            one native backend.
        """
        backend = self._backends[0]
        if not hasattr(backend, "record"):
            raise CaptureError(f"{backend.name} kernels cannot be recorded")
        # A buffer is reused for tensors of its own size only, so that in a phase of several
        # operators (native/program.hpp) a row's memory is never another row's.
        self._buffers = buffers = ActivationPool(same_size=True)
        limits = (tokens, outputs, requests)
        try:
            with backend.record(limits) as recorded, OnlyViews():  # type: ignore[no-untyped-call]
                return Graph(recorded, forward(), buffers, limits)
        finally:
            self._buffers = None

    def graph_recorder(self) -> GraphRecorder | None:
        """What records the device's launches as graphs of fixed shapes; None: it has no graphs."""
        make = self._backends[0].graph_recorder
        return None if make is None else make()

    @contextmanager
    def cut_at_attention(self, cut: Cut) -> Iterator[None]:
        """Inside, ``cut`` is asked for the result of every attention."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = None
