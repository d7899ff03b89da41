"""What all operators of one engine share: backends, chosen kernels, memory for results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol

from sdk.kernels.activations import LARGE, ActivationPool
from sdk.kernels.backend import Choice, Problem
from sdk.kernels.card import Card
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.registry import choose, open_backends
from sdk.kernels.system import SYSTEM
from sdk.kernels.weights.offload import Offload, OnDisk, layer_weights

#: Beyond any machine; a mistyped number must not use up the system's threads.
MAX_THREADS = 1024
ACTIVATION_TYPES = ("float32", "bfloat16", "float16")
Compute = Literal["auto", "exact"]
Entering = Callable[[], AbstractContextManager[object]]


class Answers(Protocol):
    """See :class:`sdk.kernels.known_answers.check.KnownAnswers`."""

    declined: dict[str, str]

    def reason(self, kernel: Any, problem: Problem, like: Sequence[Any]) -> str | None: ...
    def ask(self, name: str, kernel: str, check: Callable[[], Any]) -> str | None: ...
    def failures(self) -> list[str]: ...


class Context:
    """Owned by one :class:`sdk.kernels.operators.ops.Ops`, which documents the arguments.

    ``layers``: where the weights of the model's layers are. ``capture_pool``: the buffers of the
    forward pass that is being recorded, ``None`` otherwise.
    """

    def __init__(
        self,
        device: str,
        compute: Compute,
        num_threads: int | None,
        only: Sequence[str] | None,
        deterministic: bool,
        activations: str,
        offload: Offload | None,
    ) -> None:
        if activations not in ACTIVATION_TYPES:
            raise KernelError(
                f"activations: expected one of {ACTIVATION_TYPES}, found {activations}"
            )
        if num_threads is None:
            num_threads = SYSTEM.num_cpus()
        if not 1 <= num_threads <= MAX_THREADS:
            raise KernelError(f"num_threads: expected 1 to {MAX_THREADS}, found {num_threads}")
        self.device = torch.device(device)
        #: The GPU of the engine; ``None`` on a CPU.
        self.card = card = Card(self.device) if self.device.type == "cuda" else None
        #: A context in which device and stream of the engine are the thread's current ones, and one
        #: for code of the host (:meth:`Card.lent`); on a CPU they do nothing.
        self.entered: Entering = nullcontext if card is None else card.entered
        self.lent: Entering = nullcontext if card is None else card.lent
        self.compute: Compute = compute
        self.num_threads = num_threads
        self._activations = activations
        with self.entered():
            self.layers = layer_weights(offload, self.device)
            self.backends, self.declined_backends = open_backends(
                device,
                num_threads,
                only,
                fixed=deterministic,
                activations=activations,
                offload=offload if isinstance(offload, OnDisk) else None,
            )
        #: Called by :meth:`close`.
        self.closing: list[Callable[[], None]] = []
        self.capture_pool: ActivationPool | None = None
        #: Checks of kernels before they are chosen: see :meth:`Ops.check_answers`.
        self.answers: Answers | None = None
        #: Whether kernels are only compiled: see :meth:`only_compiling`.
        self.only_compiles = False
        self._chosen: dict[Problem, Choice] = {}
        self._results = ActivationPool()

    def lending(self, parts: Iterator[Tensor]) -> Iterator[Tensor]:
        """Tensors that are computed inside :attr:`entered`, for the caller's stream."""
        while True:
            with self.entered():
                part = next(parts, None)
            if part is None:
                return
            if self.card is not None:
                self.card.give()
            yield part
            if self.card is not None:
                self.card.take()

    def close(self) -> None:
        """Stop the threads. Idempotent; the operators must not be used afterwards."""
        for end in self.closing:
            end()
        self.closing.clear()
        for backend in self.backends:
            backend.close()
        self._results.close()

    def kernel(self, op: str, like: Sequence[Any] = (), **fields: Any) -> Any:
        """The implementation of an operator for a problem, chosen at its first use.

        ``like``: what it will run on, for its case in ``known_answers/cases.py``.
        """
        problem = Problem(op, compute=self.compute, **fields)
        found = self._chosen.get(problem)
        if found is None:
            if self.only_compiles:  # nothing can be checked yet
                return choose(self.backends, problem).implementation
            found = self._chosen[problem] = self._choose(problem, like)
        return found.implementation

    @contextmanager
    def only_compiling(self, report: Callable[[int, int], None] | None = None) -> Iterator[bool]:
        """Whether kernels can be compiled ahead on this device: then those that run inside are
        compiled, several at a time, and not launched (``gpu/compile_ahead.py``)."""
        possible = self.card is not None and self.backends[0].name == "gpu"
        if possible:
            from sdk.kernels.gpu.compile_ahead import can_compile_ahead, compiling_ahead

            possible = can_compile_ahead()
        if not possible:
            yield False
            return
        self.only_compiles = True
        try:
            with compiling_ahead(report):
                yield True
                self.only_compiles = False
        finally:
            self.only_compiles = False

    def _choose(self, problem: Problem, like: Sequence[Any]) -> Choice:
        answers = self.answers
        if answers is None:
            return choose(self.backends, problem)
        return choose(self.backends, problem, lambda kernel: answers.reason(kernel, problem, like))

    @property
    def activations(self) -> torch.dtype:
        """The type of activations between kernels."""
        found: torch.dtype = getattr(torch, self._activations)
        return found

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialized tensor for the result of an operator; float32 by default."""
        dtype = dtype or torch.float32
        count = math.prod(shape)
        if self.capture_pool is not None:
            words = self.capture_pool.take(-(-count * dtype.itemsize // 4))
            return words.view(dtype)[:count].view(shape)
        if count * 4 < LARGE or self.device.type != "cpu" or dtype != torch.float32:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._results.take(count).view(shape)

    @property
    def multiplies_bf16(self) -> bool:
        """Whether inputs of products may be in bfloat16, which is faster."""
        return self.compute == "auto" and self.backends[0].multiplies_bf16

    @property
    def backend_names(self) -> tuple[str, ...]:
        return tuple(backend.name for backend in self.backends)

    @property
    def offloaded(self) -> int:
        """Bytes of packed weights that are not in the memory of the device."""
        return self.layers.nbytes + sum(backend.offloaded for backend in self.backends)

    def chosen(self) -> list[tuple[Problem, Choice]]:
        """Every choice made so far, except those of weights, which keep their own."""
        return list(self._chosen.items())
