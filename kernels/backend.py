"""The protocols between operators, the kernel registry and the backends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import WorkShape
from sdk.kernels.operators.rounding import Rounding, Rows
from sdk.kernels.operators.routes import Routes
from sdk.kernels.scratch import Products, Scratch
from sdk.kernels.weights.layouts import Layout


@dataclass(frozen=True, slots=True)
class Problem:
    """What an implementation must know to accept or reject an op. Unused fields stay unset.

    ``compute`` is ``"auto"`` (for a quantized weight, activations may be quantized to
    ``activation_bits`` per block) or ``"exact"`` (fp32 arithmetic on the dequantized values).
    ``inputs``: how the weight's file says that activations are quantized, in words; empty if it
    does not, or with exact arithmetic.
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
    #: Whether activations may be rounded to bfloat16: see
    #: :meth:`sdk.kernels.operators.ops.Ops.rounding`.
    rounded: bool = False
    dtype: str = "float32"
    head_dim: int = 0
    #: Of values, where it is not that of keys (``head_dim``).
    value_dim: int = 0
    kv_dtype: str = ""


class Implementation(Protocol):
    """One kernel for one op.

    One that rounds activations to bfloat16 has ``rounds_inputs = True``, and is asked only for
    problems that are ``rounded``.
    """

    name: str

    def reject(self, problem: Problem) -> str | None:
        """Why this implementation cannot run the problem, or ``None`` if it can."""


class LinearKernel(Implementation, Protocol):
    """``y = x @ w.T`` with one packed weight. ``packed`` is what ``pack`` returned."""

    def pack(self, layout: Layout) -> Any:
        """The weight in the kernel's memory layout, values unchanged. May refer to ``layout``."""

    def unpack(self, packed: Any) -> Layout:
        """The inverse of :meth:`pack`, bit for bit."""

    #: Whether products take an ``activation`` (:data:`sdk.kernels.operators.ops.Activation`): the
    #: weight has the rows of gate, then those of up, and the result is ``act(gate) * up``, half as
    #: wide.
    gates: bool

    def rounding(self, packed: Any) -> Rounding | None:
        """How :meth:`matmul` takes rows as codes. ``None``: it does not."""

    def matmul(self, packed: Any, x: Rows, out: Tensor, activation: str = "") -> None:
        """``out [M, N] = x [M, K] @ w.T``; x is contiguous, both have any type of the backend."""

    #: Whether it has :meth:`pack_pieces`.
    packs_pieces: bool

    def pack_pieces(self, rows: int, pieces: Iterable[Layout]) -> Any:
        """:meth:`pack` of ``Dense`` or ``Blocks`` that come some rows at a time: a multiple of
        :data:`sdk.kernels.weights.layouts.PIECE_ROWS`, except for the last ones. ``rows``: of
        all."""

    #: Whether ``rows`` takes ``part`` (:meth:`sdk.kernels.weights.bound.BoundLinear.rows`).
    reads_parts: bool

    def rows(
        self, packed: Any, ids: Tensor, out: Tensor, part: tuple[int, int] | None = None
    ) -> None:
        """``out [T, K] = w[ids]``, dequantized exactly; ids int64 ``[T]``, already checked."""

    def nbytes(self, packed: Any) -> int:
        """Bytes of the packed weight."""

    def group(self, packed: Sequence[Any]) -> Any:
        """The weights of all experts of a layer, of one shape and format, as one object. ``None``:
        the kernel does not support this."""

    def matmul_routed(
        self,
        group: Any,
        x: Tensor,
        routes: Routes,
        by_token: bool,
        out: Tensor,
        activation: str = "",
    ) -> None:
        """``out[r] = x[routes.tokens[r] if by_token else r] @ w[routes.owners[r]].T``."""


class RecordedProgram(Protocol):
    """Operators that a backend has recorded."""

    def run(self, tokens: int, outputs: int, requests: int) -> None: ...

    def run_again(self) -> None: ...


class ProgramRecorder(Protocol):
    """A backend that can record its operators.

    ``limits``: the numbers of tokens, output rows and requests while recording.
    """

    def record(self, limits: tuple[int, int, int]) -> AbstractContextManager[RecordedProgram]: ...


class Backend(Protocol):
    """The kernels of one device for one engine, and what they share, such as a thread pool."""

    name: str
    #: Whether the keys of a page and head are stored as ``[head_dim][page_size]``. Otherwise they
    #: are ``[page_size][head_dim]``, like the values (``KVPages``).
    keys_transposed: bool
    #: Whether it multiplies bfloat16 faster than float32: see
    #: :meth:`sdk.kernels.operators.ops.Ops.rounding`.
    multiplies_bf16: bool
    #: Bytes of packed weights that are not in the memory of the device.
    offloaded: int
    #: Whether attention reads keys that all requests share only once, see
    #: ``AttentionBatch.shared_len``.
    shares_keys: bool
    #: Whether its launches can be captured as graphs of fixed shapes, see
    #: :class:`sdk.kernels.card.Card`. A backend that takes the counts of a step at run time has
    #: ``record`` instead (:class:`ProgramRecorder`).
    captures: bool

    def work_shape(
        self, requests: int, heads: int, kv_heads: int, head_dim: int
    ) -> WorkShape | None:
        """The shape of ``AttentionBatch.work`` for steps of up to this many requests; None:
        attention uses no list of work. ``heads`` and ``kv_heads`` of each layer on this device."""

    def implementations(self, op: str) -> Sequence[Any]:
        """Implementations of ``op``, best first; empty if the backend has none."""

    def finish_packing(self) -> None:
        """Wait until the weights that ``pack`` returned are packed. Kernels wait by themselves; a
        process that forks must call this first."""

    def restart_threads(self, num_threads: int) -> None:
        """Use ``num_threads`` new threads, in a forked child of the process that opened this.

        Packed weights stay valid, recorded operators do not.
        """

    def close(self) -> None:
        """Free threads and memory. Idempotent."""


class BackendFacts(Protocol):
    """Facts about a backend for memory plans, before anything is loaded."""

    def matrix_type(self, device: str) -> torch.dtype:
        """The 16-bit float type that the device multiplies fastest, or float32 if the kernels
        support no 16-bit type."""

    def held_bytes(self, kind: str, rows: int, columns: int) -> int | None:
        """Bytes that the kernels need for a weight ``[rows, columns]`` in GGUF blocks of type
        ``kind``. ``None``: as many as in the file."""

    def scratch_of(self, products: Products, device: str) -> Scratch | None:
        """The scratch that its kernels need. ``None``: none."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The selected implementation, and why the ones before it rejected the problem."""

    implementation: Any
    declined: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return str(self.implementation.name)
