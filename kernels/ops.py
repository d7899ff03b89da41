"""The operators of one engine: validation and allocation live here, once, for every backend.

Models compute through an ``Ops`` and nothing else, so that the backend (and later a recorded step)
can be exchanged under them. On a CPU every operator is bitwise batch invariant: the result of a row
does not depend on the other rows, on how many there are, or on the number of threads.

Activations are ``[T, features]``; T counts the tokens of a step, all requests together. They are
float32, or on a GPU of 16 bits where one kernel hands them to the next (``Ops.activations``): then
they are half the bytes, and every one is rounded once, by the kernel that makes it. What adds up
over layers stays float32: the residual stream and all that is summed into it. An operator takes
either type, computes in float32 and, unless it says otherwise, answers in the type it was given.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sdk.kernels.activations import LARGE, ActivationPool
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.checks import expect, expect_floats
from sdk.kernels.errors import KernelError
from sdk.kernels.experts import ExpertOps
from sdk.kernels.graph import GraphOps
from sdk.kernels.kv_pages import KVPages
from sdk.kernels.ladder_ops import LadderOps
from sdk.kernels.layouts import Layout, on_device
from sdk.kernels.offload import Offload, OffloadOps, places_of
from sdk.kernels.registry import Choice, Problem, choose, linear_problem, open_backends
from sdk.kernels.sampling_ops import SamplingOps
from sdk.kernels.self_check import SelfCheck

#: Beyond any machine; a mistyped number must not use up the system's threads.
MAX_THREADS = 1024
ACTIVATION_TYPES = (torch.float32, torch.bfloat16, torch.float16)
Compute = Literal["auto", "exact"]
#: The last is gpt-oss' gate: see kernels/reference/norm.py.
Activation = Literal["silu", "gelu_tanh", "gelu", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class BoundLinear:
    """A weight in the hands of its kernel."""

    choice: Choice
    packed: Any
    shape: tuple[int, int]
    ops: Ops
    problem: Problem

    def matmul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x [M, K] -> [M, N]``, float32; into ``out``, if given, in its type.

        The rows of ``out`` may be strided.
        """
        short = self.ops.activations
        expect_floats("linear x", x, short, None, self.shape[1])
        if out is None:
            out = self.ops.empty(x.shape[0], self.shape[0])
        else:
            expect_floats("linear out", out, short, x.shape[0], self.shape[0])
            if out.stride(1) != 1 or (out.shape[0] > 1 and out.stride(0) < out.shape[1]):
                raise KernelError(
                    f"linear out: expected rows of their own, found strides {out.stride()}"
                )
        if x.shape[0]:
            self.choice.implementation.matmul(self.packed, x.contiguous(), out)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """``w[ids]``, dequantized exactly: ids int64 ``[T]`` -> float32 ``[T, K]``."""
        expect("rows ids", ids, torch.int64, None)
        # On a GPU looking at them would wait for it; its kernels skip what is not there.
        if ids.numel() and not self.ops.capturing and ids.is_cpu:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.shape[0]:
                bad = low if low < 0 else high
                raise KernelError(f"rows: expected ids in 0..{self.shape[0] - 1}, found {bad}")
        out = self.ops.empty(ids.shape[0], self.shape[1])
        if ids.numel():
            self.choice.implementation.rows(self.packed, ids.contiguous(), out)
        return out

    def layout(self) -> Layout:
        """The weight as it was before packing, bit for bit."""
        with self.ops.fetched(self.packed):
            layout: Layout = self.choice.implementation.unpack(self.packed)
        return layout

    @property
    def nbytes(self) -> int:
        return int(self.choice.implementation.nbytes(self.packed))


class Ops(ExpertOps, LadderOps, GraphOps, SamplingOps, OffloadOps):
    """Chosen kernels plus what they share (the thread pool). Owned by one rank, closed with it.

    ``num_threads`` defaults to the CPUs this process may run on. ``backends`` restricts the choice
    (tests); ``declined_backends`` says which are missing and why. ``deterministic``: on a GPU
    a row's result does not depend on the rows beside it (slower); on a CPU that is always so.
    ``activations``: the type of those between kernels, float32 or one of 16 bits; see the module.
    ``offload``: where weights go that are not to stay in the device's memory.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        compute: Compute = "auto",
        num_threads: int | None = None,
        backends: Sequence[str] | None = None,
        deterministic: bool = False,
        activations: torch.dtype = torch.float32,
        offload: Offload | None = None,
    ) -> None:
        if num_threads is None:
            num_threads = len(os.sched_getaffinity(0))
        if not 1 <= num_threads <= MAX_THREADS:
            raise KernelError(f"num_threads: expected 1 to {MAX_THREADS}, found {num_threads}")
        if activations not in ACTIVATION_TYPES:
            raise KernelError(
                f"activations: expected one of {ACTIVATION_TYPES}, found {activations}"
            )
        self.device = torch.device(device)
        self.compute: Compute = compute
        self.num_threads = num_threads
        self.activations = activations
        on_disk, self._host = places_of(offload, self.device)
        self._backends, self.declined_backends = open_backends(
            device,
            num_threads,
            backends,
            fixed=deterministic,
            activations=activations,
            offload=on_disk,
        )
        self._chosen: dict[Problem, Choice] = {}
        self._self_check = SelfCheck(self.device, activations)
        self._activations = ActivationPool()
        #: The adapter of each row that products run over now, int32 ``[T]``, -1 for none: it is set
        #: before a model runs. ``None``: no row has one.
        self.adapter_slots: Tensor | None = None

    def close(self) -> None:
        """Stop the threads. Idempotent; the operators must not be used afterwards."""
        for backend in self._backends:
            backend.close()
        self._activations.close()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialized tensor for the result of an operator."""
        count = math.prod(shape)
        if self._buffers is not None:
            words = self._buffers.take(-(-count * dtype.itemsize // 4))
            return words.view(dtype)[:count].view(shape)
        if count * 4 < LARGE or self.device.type != "cpu" or dtype != torch.float32:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return self._activations.take(count).view(shape)

    @property
    def keys_transposed(self) -> bool:
        """How the keys of KV pages are to lie: see :class:`sdk.kernels.registry.Backend`."""
        return self._backends[0].keys_transposed

    @property
    def shares_keys(self) -> bool:
        """See :class:`sdk.kernels.registry.Backend`."""
        return self._backends[0].shares_keys

    @property
    def backend_names(self) -> tuple[str, ...]:
        return tuple(backend.name for backend in self._backends)

    def chosen(self) -> list[tuple[Problem, Choice]]:
        """Every choice made so far except the linear layers', which keep their own."""
        return list(self._chosen.items())

    def _kernel(self, op: str, **fields: Any) -> Any:
        problem = Problem(op, compute=self.compute, **fields)
        found = self._chosen.get(problem)
        if found is None:
            found = self._chosen[problem] = choose(self._backends, problem)
        return found.implementation

    def linear(self, layout: Layout, activation_bits: int = 8) -> BoundLinear:
        """Choose a kernel for a weight, check it, and pack the weight for it on this device.

        ``activation_bits``: 8, or 16 for the blocks of an input that cost the most accuracy. Says
        nothing with ``compute="exact"``, for plain floats, or where the file of the weight says how
        inputs are rounded.
        """
        layout = on_device(layout, self.device)
        problem = linear_problem(layout, self.compute, activation_bits)
        choice = self._self_check.choose(self._backends, problem, layout)
        packed = self.kept(choice.implementation.pack(layout))
        return BoundLinear(choice, packed, layout.shape, self, problem)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; x may be strided."""
        expect_floats("rms_norm x", x, self.activations)
        expect("rms_norm weight", weight, torch.float32, x.shape[-1])
        out = self.empty(*x.shape, dtype=x.dtype)
        if x.numel():
            self._kernel("rms_norm").run(x, weight, eps, out)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, wide: bool = False
    ) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns ``(rms_norm(s), s)``; ``residual``, float32, becomes s.

        The norm is of the activations' type, with ``wide`` float32.
        """
        expect_floats("add_rms_norm x", x, self.activations)
        expect("add_rms_norm residual", residual, torch.float32, *x.shape)
        expect("add_rms_norm weight", weight, torch.float32, x.shape[-1])
        out = self.empty(*residual.shape, dtype=torch.float32 if wide else self.activations)
        if x.numel():
            self._kernel("add_rms_norm").run(x, residual, weight, eps, out)
        return out, residual

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """``act(gate) * up`` for ``gate_up [T, 2 I]`` = gate then up; ``[T, I]``."""
        expect_floats("gated_activation", gate_up, self.activations, None, None)
        tokens, width = gate_up.shape
        if width % 2:
            raise KernelError(f"gated_activation: expected an even width, found {width}")
        out = self.empty(tokens, width // 2, dtype=gate_up.dtype)
        if tokens:
            self._kernel("gated_activation", format=kind).run(gate_up.contiguous(), kind, out)
        return out

    def zeros(self, rows: int, width: int) -> Tensor:
        """``[rows, width]`` of zeros, float32."""
        out = self.empty(rows, width)
        if out.numel():
            self._kernel("zeros").run(out)
        return out

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """``x += other``, both of one shape; returns x."""
        expect_floats("add x", x, self.activations)
        expect_floats("add other", other, self.activations, *x.shape)
        if x.numel():
            self._kernel("add").run(x, other)
        return x

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """``x += bias`` for every row of ``x [T, N]``; returns x."""
        expect_floats("add_bias x", x, self.activations)
        expect("add_bias bias", bias, torch.float32, x.shape[-1])
        if x.numel():
            self._kernel("add_bias").run(x, bias)
        return x

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """``x *= factor``; returns x."""
        expect_floats("scale x", x, self.activations)
        if x.numel() and factor != 1.0:
            self._kernel("scale").run(x, None, factor)
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """``x = cap * tanh(x / cap)`` in place, float32; returns x."""
        expect("softcap x", x, torch.float32)
        if x.numel():
            self._kernel("softcap").run(x, None, cap)
        return x

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """``x[rows]``: x ``[T, N]``, rows int64 ``[R]``, all of them in 0..T - 1."""
        expect_floats("select_rows x", x, self.activations, None, None)
        expect("select_rows rows", rows, torch.int64, None)
        out = self.empty(rows.shape[0], x.shape[1], dtype=x.dtype)
        if rows.shape[0]:
            self._kernel("select_rows").run(x, rows, out)
        return out

    def take_columns(self, x: Tensor, order: Tensor, *, back: bool = False) -> Tensor:
        """``x[:, order]`` of x ``[T, N]``, or the inverse with ``back``.

        order int32 ``[N]``: 0..N - 1, each once.
        """
        expect_floats("take_columns x", x, self.activations, None, None)
        expect("take_columns order", order, torch.int32, x.shape[1])
        out = self.empty(*x.shape, dtype=x.dtype)
        if out.numel():
            self._kernel("take_columns").run(x, order, back, out)
        return out

    def rope_angles(
        self, positions: Tensor, inv_freq: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of ``positions[t] * inv_freq[i]``, times ``factor``: float32 ``[T, half]``.

        positions int64 ``[T]``, inv_freq float32 ``[half]``.
        """
        expect("rope_angles positions", positions, torch.int64, None)
        expect("rope_angles inv_freq", inv_freq, torch.float32, None)
        tokens, half = positions.shape[0], inv_freq.shape[0]
        cos, sin = self.empty(tokens, half), self.empty(tokens, half)
        if tokens and half:
            self._kernel("rope_angles").run(positions, inv_freq, factor, cos, sin)
        return cos, sin

    def find_places(self, batch: AttentionBatch) -> None:
        """Fill ``batch.positions`` and ``batch.slots`` from its other tensors."""
        batch.check()
        if batch.num_tokens:
            self._kernel("find_places").run(batch)

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        pages: KVPages,
    ) -> None:
        """Rotate q (in place) and k, and write k and v into their page slots.

        q ``[T, heads, head_dim]``, k and v ``[T, kv_heads, head_dim]``, rows may be strided
        views of one fused projection; cos and sin ``[T, rotary_dim / 2]`` (halves rotate against
        each other, as Hugging Face models do; dimensions beyond ``rotary_dim`` pass through).
        """
        batch.check(pages)
        for name, x in (("q", q), ("k", k), ("v", v)):
            expect_floats(f"rope {name}", x, self.activations, batch.num_tokens, None, None)
        for name, x in (("cos", cos), ("sin", sin)):
            expect(f"rope {name}", x, torch.float32, batch.num_tokens, None)
        if q.shape[0]:
            kernel = self._kernel("rope_and_cache", head_dim=k.shape[2], kv_dtype=pages.dtype)
            kernel.run(q, k, v, cos, sin, batch, pages)

    def attention(
        self,
        q: Tensor,
        pages: KVPages,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over the pages: q ``[T, heads, head_dim]`` -> ``[T, heads * head_dim]``.

        A token sees itself and the ``window - 1`` tokens before it (all of them without a window).
        ``softcap``: scores become ``cap * tanh(score / cap)`` (Gemma 2). ``sinks [heads]``: one
        more logit per head that takes probability but has no value.
        """
        batch.check(pages)
        expect_floats("attention q", q, self.activations, batch.num_tokens, None, None)
        if sinks is not None:
            expect("attention sinks", sinks, torch.float32, q.shape[1])
        tokens, heads, head_dim = q.shape
        kv_heads = pages.k.shape[1]
        if heads % kv_heads or pages.head_dim != head_dim:
            raise KernelError(
                f"attention: {heads} query heads of {head_dim} do not fit "
                f"pages {list(pages.k.shape)}"
            )
        if pages.k_centre is not None and (softcap or sinks is not None):
            raise KernelError("attention: keys with a centre allow neither softcap nor sinks")
        out = self.empty(tokens, heads * head_dim, dtype=q.dtype)
        if tokens:
            kernel = self._kernel("attention", head_dim=head_dim, kv_dtype=pages.dtype)

            def attend(q: Tensor, batch: AttentionBatch, out: Tensor) -> None:
                kernel.run(q, pages, batch, scale, window, softcap, sinks, out)

            if self._cut is not None:
                return self._cut(q, out, attend)
            attend(q, batch, out)
        return out
