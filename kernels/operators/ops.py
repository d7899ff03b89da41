"""The operators of one engine. They check arguments and allocate results, once for all backends.

Models compute only through an ``Ops``. The backend, or the recorder of a step, can therefore change
without the model noticing. On a CPU every operator is bitwise batch invariant: the result of a row
does not depend on the other rows, on their number, or on the number of threads.

Activations are ``[T, features]``, where T is the number of tokens of a step, all requests together.
They are float32, except that on a GPU activations between two kernels may have 16 bits
(``Ops.activations``). This halves their bytes, and each value is rounded once, by the kernel that
writes it. Values that accumulate over layers stay float32: the residual stream and everything that
is added to it. An operator takes either type, computes in float32 and returns the type it was
given, unless its documentation says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from sdk.kernels.backend import Choice, Problem
from sdk.kernels.context import Compute, Context
from sdk.kernels.errors import KernelError
from sdk.kernels.graph import Recording
from sdk.kernels.groups import CollectiveGroup, Link
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch, type_name
from sdk.kernels.operators import attention_checks
from sdk.kernels.operators.batch import AttentionBatch, WorkShape
from sdk.kernels.operators.checks import expect, expect_floats, expect_norm, expect_numbers
from sdk.kernels.operators.head_norms import HeadNorms, QueryScale
from sdk.kernels.operators.latent import LatentOps
from sdk.kernels.operators.low_rank import AdapterTable, Shape
from sdk.kernels.operators.mlp_activations import GATES, Activation, GateKind
from sdk.kernels.operators.moe import MoEOps
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.rounding import Rounded, Rounding, Rows
from sdk.kernels.operators.sampling_ops import SamplingOps
from sdk.kernels.operators.state_ops import StateOps
from sdk.kernels.registry import linear_problem
from sdk.kernels.self_check import SelfCheck
from sdk.kernels.weights.bound import BoundLinear
from sdk.kernels.weights.layouts import Layout, Pieces, on_device
from sdk.kernels.weights.offload import Offload


class Ops:
    """The operators that every model uses, and four groups of others.

    ``moe`` (:class:`sdk.kernels.operators.moe.MoEOps`) routes tokens to experts, ``states``
    (:class:`sdk.kernels.operators.state_ops.StateOps`) runs recurrent layers, ``sampling``
    (:class:`sdk.kernels.operators.sampling_ops.SamplingOps`) selects tokens, ``recording``
    (:class:`sdk.kernels.graph.Recording`) records forward passes. ``layers``
    (:class:`sdk.kernels.weights.offload.LayerWeights`) brings offloaded weights to the device. All
    share one :class:`sdk.kernels.context.Context`. One rank owns an ``Ops`` and closes it.

    ``num_threads`` defaults to the CPUs this process may run on. ``backends`` restricts the choice
    of backends (tests). ``deterministic``: on a GPU the result of a row does not depend on the
    other rows (slower); on a CPU this is always so. ``activations``: the type of activations
    between kernels, float32 or 16 bits. ``offload``: where weights are that the device lacks.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        compute: Compute = "auto",
        num_threads: int | None = None,
        backends: Sequence[str] | None = None,
        deterministic: bool = False,
        activations: torch.dtype | str = "float32",
        offload: Offload | None = None,
    ) -> None:
        self.context = Context(
            device, compute, num_threads, backends, deterministic, type_name(activations), offload
        )
        self.device = self.context.device
        self.empty = self.context.empty
        #: See :meth:`Context.entered`; all that an engine does with tensors happens inside.
        self.entered = self.context.entered
        self.lent = self.context.lent
        #: See :class:`sdk.kernels.card.Card`; ``None`` on a CPU.
        self.card = self.context.card
        self.layers = self.context.layers
        self.moe = MoEOps(self.context)
        self.states = StateOps(self.context)
        self.latent = LatentOps(self.context)
        self.sampling = SamplingOps(self.context)
        self.recording = Recording(self.context)
        self._kernel = self.context.kernel
        self._self_check = SelfCheck(self.context)
        #: The adapter of each row of the next products, int32 ``[T]``, -1 for none. It is set
        #: before the model runs. ``None``: no row has an adapter.
        self.adapter_slots: Tensor | None = None
        self.rounded = False  #: see :meth:`rounding`

    def rounding(self) -> Ops:
        """The same operators, for encoders of images. Where bfloat16 is faster and ``compute`` is
        not exact, products with 16-bit weights, and attention both ways without other options over
        bfloat16 pages, round their inputs to bfloat16; sums stay float32."""
        found = copy(self)
        found.rounded = self.context.multiplies_bf16
        return found

    @property
    def activations(self) -> torch.dtype:
        """See :class:`Ops`."""
        return self.context.activations

    def check_answers(self, folder: Path | None) -> None:
        """From now on check each kernel of a card before it is chosen, as
        :mod:`sdk.kernels.known_answers.check` says. ``folder``: where results are kept."""
        from sdk.kernels.known_answers.check import KnownAnswers, machine
        from sdk.kernels.known_answers.file import AnswerFile

        file = None if folder is None else AnswerFile(folder, machine(self.device))
        self.context.answers = KnownAnswers(self.context, file)

    def finish_packing(self) -> None:
        """See :meth:`sdk.kernels.backend.Backend.finish_packing`."""
        for backend in self.context.backends:
            backend.finish_packing()

    def restart_threads(self, num_threads: int) -> None:
        """See :meth:`sdk.kernels.backend.Backend.restart_threads`."""
        self.context.num_threads = num_threads
        for backend in self.context.backends:
            backend.restart_threads(num_threads)

    def close(self) -> None:
        """Stop the threads. Idempotent; the operators must not be used afterwards."""
        self.context.close()

    @property
    def keys_transposed(self) -> bool:
        """The memory layout of keys in KV pages: see :class:`sdk.kernels.backend.Backend`."""
        return self.context.backends[0].keys_transposed

    @property
    def shares_keys(self) -> bool:
        """See :class:`sdk.kernels.backend.Backend`."""
        return self.context.backends[0].shares_keys

    def work_shape(
        self, requests: int, heads: int, kv_heads: int, head_dim: int
    ) -> WorkShape | None:
        """See :class:`sdk.kernels.backend.Backend`."""
        return self.context.backends[0].work_shape(requests, heads, kv_heads, head_dim)

    def linear(self, weight: Layout | Pieces, activation_bits: int = 8) -> BoundLinear:
        """Choose a kernel for a weight, check it, and pack the weight for it on this device.

        ``activation_bits``: 8, or 16 for the blocks of an input that cost the most accuracy. It
        has no effect with ``compute="exact"``, for float weights, or if the weight's file says how
        activations are quantized.
        """
        if isinstance(weight, Pieces):
            return self._linear_of_pieces(weight, activation_bits)
        layout = on_device(weight, self.device)
        choice, problem = self._choose(layout, layout.shape, activation_bits)
        return self._bound(choice, problem, choice.implementation.pack(layout), layout.shape)

    def _linear_of_pieces(self, weight: Pieces, activation_bits: int) -> BoundLinear:
        if self.device.type != "cpu":  # its kernels pack whole weights
            return self.linear(weight.whole(), activation_bits)
        pieces = weight.pieces()
        first = next(pieces)
        choice, problem = self._choose(first, weight.shape, activation_bits)
        kernel = choice.implementation
        if kernel.packs_pieces:
            packed = kernel.pack_pieces(weight.shape[0], chain((first,), pieces))
        else:
            packed = kernel.pack(weight.whole())
        return self._bound(choice, problem, packed, weight.shape)

    def _choose(
        self, layout: Layout, shape: tuple[int, int], activation_bits: int
    ) -> tuple[Choice, Problem]:
        """The kernel for a weight of this shape; ``layout``: the weight, or its first rows."""
        problem = linear_problem(layout, self.context.compute, activation_bits)
        problem = replace(problem, out_features=shape[0], rounded=self.rounded)
        return self._self_check.choose(self.context.backends, problem, layout), problem

    def _bound(
        self, choice: Choice, problem: Problem, packed: Any, shape: tuple[int, int]
    ) -> BoundLinear:
        packed = self.layers.keep(packed)
        return BoundLinear(choice, packed, shape, self.context, problem)

    def adapter_table(self, shape: Shape, dtype: torch.dtype | None = None) -> AdapterTable:
        """The low-rank adapters of one product: see :mod:`sdk.kernels.operators.low_rank`.

        The table's ``add`` is the operator. ``dtype``: of factors (default: chosen for the device);
        int8 only on a CPU.

        :raises KernelError: the device's kernels have no factors of this type.
        """
        return AdapterTable(self.context, shape, dtype)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The ``norm`` of x over the last dimension; x may be strided."""
        expect_floats("norm x", x, self.activations)
        expect_norm("norm", norm, x)
        out = self.empty(*x.shape, dtype=x.dtype)
        if x.numel():
            kernel = self._kernel("norm", (x, norm, x.dtype, None), format=norm.form)
            kernel.run(x, norm, out)
        return out

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: Norm,
        *,
        wide: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns ``(norm of s, s)``; ``residual``, float32, becomes s.

        Without a residual s is x itself, float32. The norm is of the activations' type, with
        ``wide`` float32, in ``out`` or new.
        """
        dtype = torch.float32 if wide else self.activations
        kernel, given, sums = self._norm_of_sums(x, residual, norm, (dtype, None))
        if out is None:
            out = self.empty(*x.shape, dtype=dtype)
        else:
            expect("add_norm out", out, dtype, *x.shape)
        if x.numel():
            kernel.run(*given, out)
        return out, sums

    def add_norm_for(
        self, rounding: Rounding | None, x: Tensor, residual: Tensor | None, norm: Norm
    ) -> tuple[Rows, Tensor]:
        """:meth:`add_norm` for a projection that takes rows as codes, if ``rounding`` says so.

        Where the kernel of the norm can make them, they are those of the norm in the activations'
        type, which is not written.
        """
        if rounding is None:
            return self.add_norm(x, residual, norm)
        like = (self.activations, rounding)
        kernel, given, sums = self._norm_of_sums(x, residual, norm, like)
        if not kernel.rounds:
            return self.add_norm(x, residual, norm)
        codes = self.empty(x.shape[0], rounding.columns, dtype=rounding.dtype)
        out = Rounded(codes, self.empty(rounding.groups, x.shape[0]), x.shape[1])
        if x.numel():
            kernel.run_rounded(*given, out, rounding.scheme, self.activations)
        return out, sums

    def _norm_of_sums(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: Norm,
        out: tuple[torch.dtype, Rounding | None],
    ) -> tuple[Any, tuple[Any, ...], Tensor]:
        """The kernel, its inputs, and what becomes ``x + residual``. ``out``: the result's type,
        or as which codes it is written."""
        sums = x if residual is None else residual
        expect_floats("add_norm x", x, self.activations)
        expect("add_norm residual", sums, torch.float32, *x.shape)
        expect_norm("add_norm", norm, x)
        op = "norm" if residual is None else "add_norm"
        codes = "" if out[1] is None else str(out[1].scheme)
        kernel = self._kernel(op, (x, norm, *out), format=norm.form, inputs=codes)
        return kernel, (x, norm) if residual is None else (x, residual, norm), sums

    def gated_activation(
        self,
        gate_up: Tensor,
        kind: Activation,
        used: Tensor | None = None,
        numbers: Sequence[float] = (),
    ) -> Tensor:
        """``act(gate) * up`` for ``gate_up [T, 2 I]`` = gate then up; ``[T, I]``.

        ``used``, int32 ``[1]``: only this many rows have values (CPU kernels leave out the others).
        ``numbers``: see :meth:`activation`.
        """
        expect_numbers("gated_activation", kind, numbers)
        expect_floats("gated_activation", gate_up, self.activations, None, None)
        tokens, width = gate_up.shape
        if width % 2:
            raise KernelError(f"gated_activation: expected an even width, found {width}")
        out = self.empty(tokens, width // 2, dtype=gate_up.dtype)
        if tokens:
            kernel = self._kernel("gated_activation", (gate_up,), format=kind)
            given = () if used is None else (used,)
            kernel.run(gate_up.contiguous(), kind, out, numbers, *given)
        return out

    def gate(self, x: Tensor, gate: Tensor, kind: GateKind) -> Tensor:
        """``x [T, N]`` times the function of ``gate [T, G]``, each of a run of N / G neighbours;
        returns x, which is overwritten. Rows of the gate may be strided.

        ``sigmoid``, ``softplus``: ``log(1 + e^gate)``, ``silu``: ``gate * sigmoid(gate)``, or
        ``linear``: the gate itself.
        """
        expect_floats("gate x", x, self.activations, None, None)
        expect_floats("gate", gate, self.activations, x.shape[0], None)
        if kind not in GATES or x.shape[1] % max(gate.shape[1], 1):
            raise KernelError(
                f"gate: expected one of {', '.join(GATES)} for equal runs of {x.shape[1]} "
                f"columns, found {kind!r} and {gate.shape[1]} gates"
            )
        if x.shape[0]:
            self._kernel("gate", (x, gate), format=kind).run(x, gate, kind)
        return x

    def activation(
        self,
        x: Tensor,
        kind: Activation,
        used: Tensor | None = None,
        numbers: Sequence[float] = (),
    ) -> Tensor:
        """``x = act(x)`` for ``x [T, I]``; returns x.

        ``used``: see :meth:`gated_activation`. ``numbers``: what the activation of a layer has
        besides its kind; of ``xielu`` alpha_p, alpha_n, beta and eps, the first two after softplus.
        """
        expect_floats("activation x", x, self.activations, None, None)
        expect_numbers("activation", kind, numbers)
        if x.shape[0]:
            kernel = self._kernel("activation", (x,), format=kind)
            kernel.run(x, kind, x, numbers, *(() if used is None else (used,)))
        return x

    def zeros(self, rows: int, width: int) -> Tensor:
        """``[rows, width]`` of zeros, float32."""
        out = self.empty(rows, width)
        if out.numel():
            self._kernel("zeros", (out,)).run(out)
        return out

    def add(self, x: Tensor, other: Tensor) -> Tensor:
        """``x += other``, both of one shape; returns x."""
        expect_floats("add x", x, self.activations)
        expect_floats("add other", other, self.activations, *x.shape)
        if x.numel():
            self._kernel("add", (x,)).run(x, other)
        return x

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """``x += bias`` for every row of ``x [T, N]``; returns x."""
        expect_floats("add_bias x", x, self.activations)
        expect("add_bias bias", bias, torch.float32, x.shape[-1])
        if x.numel():
            self._kernel("add_bias", (x,)).run(x, bias)
        return x

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """``x *= factor``; returns x."""
        expect_floats("scale x", x, self.activations)
        if x.numel() and factor != 1.0:
            self._kernel("scale", (x,)).run(x, None, factor)
        return x

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """``x = cap * tanh(x / cap)`` in place, float32; returns x."""
        expect("softcap x", x, torch.float32)
        if x.numel():
            self._kernel("softcap", (x,)).run(x, None, cap)
        return x

    def clamp(self, x: Tensor, limit: float) -> Tensor:
        """``x`` within ``+-limit``, in place; returns x."""
        expect_floats("clamp x", x, self.activations)
        if x.numel():
            self._kernel("clamp", (x,)).run(x, None, limit)
        return x

    def all_reduce(self, x: Tensor, group: CollectiveGroup) -> Tensor:
        """``x [T, N]`` becomes its sum over the ranks of ``group``; returns x."""
        expect_floats("all_reduce x", x, self.activations, None, None)
        if x.numel():
            kernel = self._kernel("all_reduce")
            self._exchange(x, lambda rows: kernel.run(rows, group))
        return x

    def all_gather(self, x: Tensor, group: CollectiveGroup, width: int, total: int) -> Tensor:
        """The x of all ranks side by side: ``[T, width]`` of each, ``[T, total]``.

        The last rank's x may have fewer columns.
        """
        expect_floats("all_gather x", x, self.activations, None, None)
        out = self.empty(x.shape[0], total, dtype=x.dtype)
        if out.numel():
            self._kernel("all_gather").run(x, group, width, out)
        return out

    def send(self, x: Tensor, link: Link) -> None:
        """Send ``x [T, N]``, float32, over ``link``."""
        expect("send x", x, torch.float32, None, None)
        if x.numel():
            kernel = self._kernel("send")
            self._exchange(x.contiguous(), lambda rows: kernel.run(rows, link))

    def receive(self, rows: int, width: int, link: Link) -> Tensor:
        """What the other end of ``link`` has sent, float32 ``[rows, width]``."""
        out = self.empty(rows, width)
        if out.numel():
            kernel = self._kernel("receive")
            self._exchange(out, lambda rows: kernel.run(rows, link))
        return out

    def _exchange(self, x: Tensor, run: Callable[[Tensor], None]) -> None:
        """``run(x)``, now or between two pieces of a recorded step."""
        if (exchange := self.recording.exchange) is None:
            run(x)
        else:
            exchange(x, run)

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """``x[rows]``: x ``[T, N]``, rows int64 ``[R]``, all of them in 0..T - 1."""
        expect_floats("select_rows x", x, self.activations, None, None)
        expect("select_rows rows", rows, torch.int64, None)
        out = self.empty(rows.shape[0], x.shape[1], dtype=x.dtype)
        if rows.shape[0]:
            self._kernel("select_rows", (x,)).run(x, rows, out)
        return out

    def place_rows(self, x: Tensor, rows: Tensor, index: Tensor, *, add: bool = False) -> Tensor:
        """Row t of ``x [T, H]`` becomes row ``index[t]`` of ``rows [N, H]``, or with ``add`` their
        sum; it stays as it is where ``index[t]`` is -1. Returns x; all but the index float32.

        index int32 ``[T]``; rows may be strided.
        """
        expect("place_rows x", x, torch.float32, None, None)
        expect("place_rows rows", rows, torch.float32, None, x.shape[1])
        expect("place_rows index", index, torch.int32, x.shape[0])
        if x.numel():
            self._kernel("place_rows", (rows,)).run(x, rows, index, add)
        return x

    def take_columns(self, x: Tensor, order: Tensor, *, back: bool = False) -> Tensor:
        """``x[:, order]`` of x ``[T, N]``, or the inverse with ``back``.

        order int32 ``[N]``: 0..N - 1, each once.
        """
        expect_floats("take_columns x", x, self.activations, None, None)
        expect("take_columns order", order, torch.int32, x.shape[1])
        out = self.empty(*x.shape, dtype=x.dtype)
        if out.numel():
            self._kernel("take_columns", (x,)).run(x, order, back, out)
        return out

    def rope_angles(
        self,
        positions: Tensor,
        inv_freq: Tensor,
        factor: float,
        axes: Tensor | None = None,
        shifts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of ``positions[t] * inv_freq[i]``, times ``factor``: float32 ``[T, half]``.

        positions int64 ``[T]``, inv_freq float32 ``[half]``. With ``axes``, int32 ``[half]``,
        positions are ``[number of axes, T]``, and frequency i turns by those of axis ``axes[i]``,
        which must be one of them; or with ``shifts``, int32 ``[number of axes, T]``, they are
        ``[T]``, and the shifts along the axes are added to them.
        """
        tokens, half = positions.shape[-1], inv_freq.shape[0]
        expect("rope_angles inv_freq", inv_freq, torch.float32, None)
        along = (None,) if axes is None or shifts is not None else (None, None)
        expect("rope_angles positions", positions, torch.int64, *along)
        if axes is not None:
            expect("rope_angles axes", axes, torch.int32, half)
        if shifts is not None:
            expect("rope_angles shifts", shifts, torch.int32, None, tokens)
        cos, sin = self.empty(tokens, half), self.empty(tokens, half)
        if tokens and half:
            kernel = self._kernel("rope_angles", (inv_freq, axes, shifts))
            more = () if axes is None else (axes,) if shifts is None else (axes, shifts)
            kernel.run(positions, inv_freq, factor, cos, sin, *more)
        return cos, sin

    def find_places(self, batch: AttentionBatch) -> None:
        """Fill ``batch.positions`` and ``batch.slots``, and ``batch.work`` if there is one, from
        its other tensors; also those of ``batch.windows``."""
        for one in (batch, *batch.windows):
            one.check()
            if one.num_tokens:
                self._kernel("find_places", (one.page_size,)).run(one)

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        pages: KVPages,
        norms: HeadNorms | None = None,
        scale: QueryScale | None = None,
    ) -> Tensor:
        """Rotate q and k, and write k and v into their page slots; returns q, rotated.

        q ``[T, heads, head_dim]``, k ``[T, kv_heads, head_dim]``, v the same with ``value_dim``;
        rows may be strided views of one fused projection; cos and sin ``[T, rotary_dim / 2]``
        (halves rotate against each other; dimensions beyond ``rotary_dim`` pass through).
        Without key/value heads queries alone turn: of a layer that reads the pages of another one.
        ``norms``: of heads, before or after the rotation. ``scale``: of queries by their positions.
        q may be overwritten.
        """
        batch.check(pages)
        for name, x in (("q", q), ("k", k), ("v", v)):
            expect_floats(f"rope {name}", x, self.activations, batch.num_tokens, None, None)
        for name, x in (("cos", cos), ("sin", sin)):
            expect(f"rope {name}", x, torch.float32, batch.num_tokens, None)
        if not q.shape[0]:
            return q
        if norms is not None and not norms.plain:
            q, k, v, norms = self._normalized(q, k, v, norms)
        like = (q, k, v, cos, pages, norms, scale)
        kernel = self._kernel("rope_and_cache", like, **pages.problem())
        kernel.run(q, k, v, cos, sin, batch, pages, norms, scale)
        return q

    def _normalized(
        self, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """q, k and v after norms that the rotation's kernels do not have."""
        if norms.after:
            raise KernelError(
                "rope: norms after the rotation: expected RMSNorms with one weight for all heads "
                "and one eps"
            )
        if norms.v is not None:
            v = self.norm(v, norms.v)
        return self.norm(q, norms.q), self.norm(k, norms.k), v, None

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
        slopes: Tensor | None = None,
        causal: bool = True,
        biases: Tensor | None = None,
        latent: int = 0,
        chunked: bool = False,
        ahead: Tensor | None = None,
    ) -> Tensor:
        """Attention over the pages: q ``[T, heads, head_dim]`` -> ``[T, heads * value_dim]``.
        ``latent``: the ``value_dim`` of latent pages, whose values are parts of keys.

        A token sees itself and the ``window - 1`` tokens before it (all of them without a window);
        if attention is not ``causal``, as many after it too, of those in the pages; of ``chunked``
        windows the tokens from the last multiple of their size on (Llama 4).
        ``softcap``: scores become ``cap * tanh(score / cap)`` (Gemma 2). ``sinks [heads]``: one
        more logit per head that takes probability but has no value. ``slopes [heads]``: a key's
        score gets its head's slope times the key's position minus the query's (ALiBi), after the
        scale and the softcap. ``biases [heads, 2 * reach + 1]``: it gets the one of that distance
        instead, of which the first and the last are those of all further keys too (T5, MPNet).
        ``ahead``, int32 ``[T]``: how many tokens behind itself each token sees too, as far as they
        are in the pages (the tokens of one image: see ``AttentionBatch.ahead``).
        """
        batch.check(pages)
        expect_floats("attention q", q, self.activations, batch.num_tokens, None, None)
        attention_checks.expect_by_head(q, {"sinks": sinks, "slopes": slopes}, biases)
        if ahead is not None:
            plain = causal and slopes is None and biases is None and not latent
            attention_checks.expect_ahead(ahead, batch.num_tokens, plain=plain)
        attention_checks.expect_heads(q, pages, latent)
        if pages.k_centre is not None and (softcap or sinks is not None):
            raise KernelError("attention: keys with a centre allow neither softcap nor sinks")
        tokens, heads, _ = q.shape
        out = self.empty(tokens, heads * (latent or pages.value_dim), dtype=q.dtype)
        if tokens:
            given = (window, softcap, sinks, slopes)
            like = (q, pages, scale, *given, self.shares_keys, causal, chunked, ahead is not None)
            others = (not causal, biases is not None, pages.latent, chunked, ahead is not None)
            has = *(x is not None for x in given), *others
            form = attention_checks.ATTENTION[has]
            fields = {**pages.problem(latent), "format": form, "rounded": self.rounded}
            kernel = self._kernel("attention", like, **fields)
            group = batch.group
            rest = (causal, biases, chunked, *(() if ahead is None else (ahead,)))

            def attend(q: Tensor, batch: AttentionBatch, out: Tensor) -> None:
                kernel.run(q, pages, batch.of_group(group), scale, *given, out, *rest)

            if self.recording.cut is not None:
                return self.recording.cut(q, out, attend)
            attend(q, batch, out)
        return out
