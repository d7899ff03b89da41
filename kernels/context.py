"""What all operators of one engine share: backends, chosen kernels, memory for results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from sdk.kernels.activations import LARGE, ActivationPool
from sdk.kernels.backend import Choice, Problem
from sdk.kernels.card import Card
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.offload import Offload, OnDisk, layer_weights
from sdk.kernels.registry import choose, open_backends

if TYPE_CHECKING:
    from sdk.kernels.known_answers import KnownAnswers

ACTIVATION_TYPES = ("float32", "bfloat16", "float16")
Compute = Literal["auto", "exact"]
Entering = Callable[[], AbstractContextManager[object]]


class Context:
    """Owned by one :class:`sdk.kernels.ops.Ops`, which documents the arguments.

    ``layers``: where the weights of the model's layers are. ``capture_pool``: the buffers of the
    forward pass that is being recorded, ``None`` otherwise.
    """

    def __init__(
        self,
        device: str,
        compute: Compute,
        num_threads: int,
        only: Sequence[str] | None,
        deterministic: bool,
        activations: str,
        offload: Offload | None,
    ) -> None:
        if activations not in ACTIVATION_TYPES:
            raise KernelError(
                f"activations: expected one of {ACTIVATION_TYPES}, found {activations}"
            )
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
        self.capture_pool: ActivationPool | None = None
        #: Checks of kernels before they are chosen: see :meth:`Ops.check_answers`.
        self.answers: KnownAnswers | None = None
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
        for backend in self.backends:
            backend.close()
        self._results.close()

    def kernel(self, op: str, like: Sequence[Any] = (), **fields: Any) -> Any:
        """The implementation of an operator for a problem, chosen at its first use.

        ``like``: what it will run on, for its case in ``answer_cases.py``.
        """
        problem = Problem(op, compute=self.compute, **fields)
        found = self._chosen.get(problem)
        if found is None:
            found = self._chosen[problem] = self._choose(problem, like)
        return found.implementation

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
    def backend_names(self) -> tuple[str, ...]:
        return tuple(backend.name for backend in self.backends)

    @property
    def offloaded(self) -> int:
        """Bytes of packed weights that are not in the memory of the device."""
        return self.layers.nbytes + sum(backend.offloaded for backend in self.backends)

    def chosen(self) -> list[tuple[Problem, Choice]]:
        """Every choice made so far, except those of weights, which keep their own."""
        return list(self._chosen.items())
