"""Which kernel runs what: backends in order, each implementation accepts or says why not.

``choose`` asks every implementation of an op, fastest backend first; the first whose ``reject``
returns ``None`` wins, once, at load. The refusals are kept, so that ``llm.explain()`` can tell why
a layer runs where it runs. ``kernels/reference`` never rejects: every format runs on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from sdk.kernels.errors import KernelError
from sdk.kernels.layouts import Affine, Blocks, Dense, Float8, Layout, inputs_of
from sdk.kernels.offload import OnDisk

if TYPE_CHECKING:
    from sdk.kernels.experts import Routes
    from sdk.kernels.scratch import Products, Scratch
    from sdk.kernels.sized_graphs import GraphRecorder

#: Backends, best first. A backend is a folder here with ``available``, ``open_backend`` and
#: ``ACTIVATIONS``, the types that its operators take and give. What a plan asks of a device's best
#: backend: see :class:`BackendFacts`.
BACKENDS = ("gpu", "cpu", "reference")
_BEST = {"cuda": "gpu", "cpu": "cpu"}


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


def facts_of(device: str) -> BackendFacts:
    """Those of the best backend for ``device``, whether or not it can run here."""
    return cast("BackendFacts", import_module(f"sdk.kernels.{_BEST[device.partition(':')[0]]}"))


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation that won, and why the ones before it declined."""

    implementation: Any
    declined: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return str(self.implementation.name)


def open_backends(
    device: str,
    num_threads: int,
    only: Sequence[str] | None = None,
    *,
    fixed: bool = False,
    activations: torch.dtype = torch.float32,
    offload: OnDisk | None = None,
) -> tuple[list[Backend], tuple[tuple[str, str], ...]]:
    """Open every backend that runs here: ``(backends, ((name, why not), ...))``.

    ``fixed``, ``activations`` and ``offload``: see :class:`sdk.kernels.ops.Ops`.
    """
    opened: list[Backend] = []
    missing: list[tuple[str, str]] = []
    for name in only or BACKENDS:
        module = import_module(f"sdk.kernels.{name}")
        reason = module.available(device)
        if reason is None and activations not in module.ACTIVATIONS:
            reason = f"its operators have no activations in {activations}"
        if reason is None:
            opened.append(module.open_backend(device, num_threads, fixed=fixed, offload=offload))
        else:
            missing.append((name, reason))
    return opened, tuple(missing)


def choose(
    backends: Sequence[Backend],
    problem: Problem,
    check: Callable[[Any], str | None] = lambda implementation: None,
) -> Choice:
    """The first implementation that does not reject ``problem`` and has no reason from ``check``.

    :raises KernelError: if there is none.
    """
    declined: list[tuple[str, str]] = []
    for backend in backends:
        for implementation in backend.implementations(problem.op):
            reason = implementation.reject(problem)
            if reason is None:
                reason = check(implementation)
            if reason is None:
                return Choice(implementation, tuple(declined))
            declined.append((implementation.name, reason))
    why = "; ".join(f"{name}: {reason}" for name, reason in declined) or "no backend has this op"
    raise KernelError(f"no kernel runs {problem}: {why}")


def linear_problem(layout: Layout, compute: str, activation_bits: int) -> Problem:
    """What a kernel must know of a weight to multiply with it."""
    match layout:
        case Dense() | Float8():
            fields: dict[str, Any] = {
                "layout": "dense" if isinstance(layout, Dense) else "float8",
                "format": str(layout.values.dtype).removeprefix("torch."),
                "group": layout.block[1] if isinstance(layout, Float8) else 0,
            }
        case Affine():
            kind = "" if layout.table is None else "table"
            fields = {"layout": "affine", "format": kind}
            fields |= {"bits": layout.bits, "group": layout.group}
            if layout.scale_table is None:  # these run on over the ends of rows
                fields["super_group"] = layout.super_group
        case Blocks():
            fields = {"layout": "blocks", "format": layout.type}
    out_features, in_features = layout.shape
    scheme = None if compute == "exact" else inputs_of(layout)
    return Problem(
        "linear",
        compute=compute,
        in_features=in_features,
        out_features=out_features,
        activation_bits=activation_bits,
        inputs="" if scheme is None else str(scheme),
        **fields,
    )
