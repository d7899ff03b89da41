"""What a backend is: the protocols between operators, the registry and the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sdk.kernels.layouts import Layout
from sdk.kernels.routes import Routes
from sdk.kernels.scratch import Products, Scratch


@dataclass(frozen=True, slots=True)
class Problem:
    """What an implementation must know to accept or decline. Fields an op does not use stay unset.

    ``compute`` is ``"auto"`` (activations may be rounded to ``activation_bits`` per block where the
    weight is quantized) or ``"exact"`` (fp32 arithmetic on the dequantized values). ``inputs``: how
    they must be rounded, in words, where the file of the weight says so and compute is not exact.
    """

    op: str
    compute: str = "auto"
    layout: str = ""
    format: str = ""
    bits: int = 0
    group: int = 0
    super_group: int = 0
    in_features: int = 0
    out_features: int = 0
    activation_bits: int = 8
    inputs: str = ""
    dtype: str = "float32"
    head_dim: int = 0
    kv_dtype: str = ""


class Implementation(Protocol):
    """One way to run one op."""

    name: str

    def reject(self, problem: Problem) -> str | None:
        """Why this implementation cannot run the problem, or ``None`` when it can."""


class LinearKernel(Implementation, Protocol):
    """``y = x @ w.T`` on one packed weight. ``packed`` is whatever ``pack`` returned."""

    def pack(self, layout: Layout) -> Any:
        """Bring the weight into the kernel's own order, values unchanged; may keep ``layout``."""

    def unpack(self, packed: Any) -> Layout:
        """The inverse of :meth:`pack`, bit for bit."""

    def matmul(self, packed: Any, x: Tensor, out: Tensor) -> None:
        """``out [M, N] = x [M, K] @ w.T``, x contiguous; both any of the backend's types."""

    def rows(self, packed: Any, ids: Tensor, out: Tensor) -> None:
        """``out [T, K] = w[ids]``, dequantized exactly; ids int64 ``[T]``, already checked."""

    def nbytes(self, packed: Any) -> int:
        """Bytes the packed weight occupies."""

    def group(self, packed: Sequence[Any]) -> Any:
        """The weights of all experts of a layer, of one shape and format, as one thing; ``None``
        where the kernel cannot take them as one."""

    def matmul_routed(
        self, group: Any, x: Tensor, routes: Routes, by_token: bool, out: Tensor
    ) -> None:
        """``out[r] = x[routes.tokens[r] if by_token else r] @ w[routes.owners[r]].T``."""


class Recorded(Protocol):
    """What a backend noted."""

    def run(self, tokens: int, outputs: int, requests: int) -> None: ...

    def run_again(self) -> None: ...


class Recorder(Protocol):
    """A backend that can record its operators.

    ``limits``: the rows that tensors of tokens, outputs and requests have while recording.
    """

    def record(self, limits: tuple[int, int, int]) -> AbstractContextManager[Recorded]: ...


class GraphRecorder(Protocol):
    """Records the launches on a device between :meth:`begin` and :meth:`end`."""

    def rehearse(self, forward: Callable[[], object]) -> None:
        """Run ``forward`` once without recording, to compile kernels and create buffers."""

    def begin(self) -> None:
        """Record launches from now on, without running them. Needs a rehearsal first."""

    def end(self) -> Any:
        """The graph recorded since :meth:`begin`, which has ``replay()``."""


class Backend(Protocol):
    """The kernels of one device for one engine; holds what they share, such as a thread pool."""

    name: str
    #: Whether a page's keys of one head are to lie ``[head_dim][page_size]`` in memory, else
    #: ``[page_size][head_dim]`` like its values (``KVPages``).
    keys_transposed: bool
    #: Bytes of packed weights that are not in the memory of the device.
    offloaded: int
    #: Whether attention reads keys that all requests share once (``AttentionBatch.shared_len``).
    shares_keys: bool
    #: Makes what records this device's launches; ``None`` where there are no graphs of fixed
    #: shapes. A backend that takes the counts of a step at run time has ``record`` instead
    #: (:class:`sdk.kernels.graph.Recorder`).
    graph_recorder: Callable[[], GraphRecorder] | None

    def implementations(self, op: str) -> Sequence[Any]:
        """Implementations of ``op``, best first; empty when the backend has none."""

    def close(self) -> None:
        """Give back threads and memory. Idempotent."""


class BackendFacts(Protocol):
    """What a backend's folder knows before anything is loaded."""

    def matrix_type(self, device: str) -> torch.dtype:
        """The floats that the device multiplies best: of 16 bits, or float32 where the kernels
        have no others."""

    def held_bytes(self, kind: str, rows: int, columns: int) -> int | None:
        """Bytes of a weight ``[rows, columns]`` in GGUF's blocks of type ``kind`` as the kernels
        keep it; ``None``: as the file has it."""

    def scratch_of(self, products: Products, device: str) -> Scratch | None:
        """What its kernels ask for beside inputs and results; ``None``: nothing."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation that won, and why the ones before it declined."""

    implementation: Any
    declined: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return str(self.implementation.name)
