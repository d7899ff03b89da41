"""The operators of one engine: validation and allocation live here, once, for every backend.

Models compute through an ``Ops`` and nothing else, so that the backend (and later a recorded step)
can be exchanged under them. On a CPU every operator is bitwise batch invariant: the result of a row
does not depend on the other rows, on how many there are, or on the number of threads.

Activations are float32 ``[T, features]``; T counts the tokens of a step, all requests together.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sdk.kernels.activations import LARGE, ActivationPool
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.errors import KernelError
from sdk.kernels.layouts import Affine, Blocks, Dense, KVPages, Layout
from sdk.kernels.registry import Choice, Problem, choose, open_backends
from sdk.kernels.sampling import DRAW, Draws, Tokens

Compute = Literal["auto", "exact"]
Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class BoundLinear:
    """A weight in the hands of its kernel."""

    choice: Choice
    packed: Any
    shape: tuple[int, int]
    empty: Callable[..., Tensor]

    def matmul(self, x: Tensor) -> Tensor:
        """``x [M, K] -> [M, N]``, float32."""
        if x.dim() != 2 or x.shape[1] != self.shape[1]:
            raise KernelError(f"linear: expected x [M, {self.shape[1]}], found {list(x.shape)}")
        out = self.empty(x.shape[0], self.shape[0])
        if x.shape[0]:
            self.choice.implementation.matmul(self.packed, x.contiguous(), out)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """``w[ids]``, dequantized exactly: ids int64 ``[T]`` -> float32 ``[T, K]``."""
        if ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.shape[0]:
                bad = low if low < 0 else high
                raise KernelError(f"rows: expected ids in 0..{self.shape[0] - 1}, found {bad}")
        out = self.empty(ids.shape[0], self.shape[1])
        if ids.numel():
            self.choice.implementation.rows(self.packed, ids.contiguous(), out)
        return out

    def layout(self) -> Layout:
        """The weight as it was before packing, bit for bit."""
        layout: Layout = self.choice.implementation.unpack(self.packed)
        return layout

    @property
    def nbytes(self) -> int:
        return int(self.choice.implementation.nbytes(self.packed))


class Ops:
    """Chosen kernels plus what they share (the thread pool). Owned by one rank, closed with it.

    ``num_threads`` defaults to the CPUs this process may run on. ``backends`` restricts the choice
    (tests); ``declined_backends`` says which are missing and why.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        compute: Compute = "auto",
        num_threads: int | None = None,
        backends: Sequence[str] | None = None,
    ) -> None:
        if num_threads is None:
            num_threads = len(os.sched_getaffinity(0))
        if num_threads < 1:
            raise KernelError(f"num_threads: expected at least 1, found {num_threads}")
        self.device = torch.device(device)
        self.compute: Compute = compute
        self.num_threads = num_threads
        self._backends, self.declined_backends = open_backends(device, num_threads, backends)
        self._chosen: dict[Problem, Choice] = {}
        self._activations = ActivationPool()
        self._sampling: Any = None

    def close(self) -> None:
        """Stop the threads. Idempotent; the operators must not be used afterwards."""
        for backend in self._backends:
            backend.close()
        self._activations.close()

    def empty(self, *shape: int) -> Tensor:
        """An uninitialized float32 tensor for the result of an operator."""
        count = math.prod(shape)
        if count * 4 < LARGE or self.device.type != "cpu":
            return torch.empty(shape, dtype=torch.float32, device=self.device)
        return self._activations.take(count).view(shape)

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

    def linear(self, layout: Layout) -> BoundLinear:
        """Choose a kernel for a weight and pack the weight for it."""
        out_features, in_features = layout.shape
        match layout:
            case Dense():
                fields: dict[str, Any] = {
                    "layout": "dense",
                    "format": str(layout.values.dtype).removeprefix("torch."),
                }
            case Affine():
                fields = {"layout": "affine", "bits": layout.bits, "group": layout.group}
            case Blocks():
                fields = {"layout": "blocks", "format": layout.type}
        problem = Problem(
            "linear",
            compute=self.compute,
            in_features=in_features,
            out_features=out_features,
            **fields,
        )
        choice = choose(self._backends, problem)
        return BoundLinear(choice, choice.implementation.pack(layout), layout.shape, self.empty)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
        out = self.empty(*x.shape)
        if x.numel():
            self._kernel("rms_norm").run(x.contiguous(), weight, eps, out)
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns ``(rms_norm(s), s)``; ``residual`` becomes s."""
        out = self.empty(*residual.shape)
        if x.numel():
            self._kernel("add_rms_norm").run(x.contiguous(), residual, weight, eps, out)
        return out, residual

    def gated_activation(self, gate_up: Tensor, kind: Activation) -> Tensor:
        """``act(gate) * up`` for ``gate_up [T, 2 I]`` = gate then up; float32 ``[T, I]``."""
        tokens, width = gate_up.shape
        out = self.empty(tokens, width // 2)
        if tokens:
            self._kernel("gated_activation", format=kind).run(gate_up.contiguous(), kind, out)
        return out

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
        if q.shape[0]:
            kernel = self._kernel(
                "rope_and_cache", head_dim=k.shape[2], kv_dtype=_dtype_name(pages.k)
            )
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
        tokens, heads, head_dim = q.shape
        kv_heads = pages.k.shape[1]
        if heads % kv_heads or pages.k.shape[3] != head_dim:
            raise KernelError(
                f"attention: {heads} query heads of {head_dim} do not fit "
                f"pages {list(pages.k.shape)}"
            )
        out = self.empty(tokens, heads * head_dim)
        if tokens:
            kernel = self._kernel("attention", head_dim=head_dim, kv_dtype=_dtype_name(pages.k))
            kernel.run(q, pages, batch, scale, window, softcap, sinks, out)
        return out

    def argmax(self, logits: Tensor) -> Tokens:
        """The first best token of each row of ``logits [R, V]`` float32; no probabilities."""
        return self._sample(logits, None)

    def sample(self, logits: Tensor, draws: Draws) -> Tokens:
        """One token per row of ``logits [R, V]`` float32, as ``draws [R]`` say.

        See :mod:`sdk.kernels.sampling`. A row whose maximum is not finite gets no draw.
        """
        if draws.dtype != DRAW or draws.shape != logits.shape[:1]:
            raise KernelError(
                f"sample: expected one DRAW for each row of logits {list(logits.shape)}, "
                f"found {draws.dtype} {list(draws.shape)}"
            )
        return self._sample(logits, draws)

    def _sample(self, logits: Tensor, draws: Draws | None) -> Tokens:
        if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
            raise KernelError(
                f"sample: expected float32 logits [R, V], found {logits.dtype} {list(logits.shape)}"
            )
        if not logits.shape[0]:
            return Tokens([], [], [])
        if self._sampling is None:  # once: making and looking up a Problem takes 2 us
            self._sampling = self._kernel("sample")
        result: Tokens = self._sampling.run(logits, draws)
        return result


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
