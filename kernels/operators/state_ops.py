"""The operators of recurrent layers: what a token leaves behind is a state of one size.

Each reads the states with which the requests of a step begin, and writes those that the step asks
for (:class:`sdk.kernels.operators.states.StateBatch`). On a CPU the tokens of a request run one
after another in a fixed order: results and states have the same bits however its tokens are divided
over steps, whatever else is in a step, and in whichever slots its states are.
"""

from __future__ import annotations

from typing import Any, Literal

from sdk.kernels.context import Context
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.checks import expect, expect_floats, expect_norm
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.states import RwkvKeys

#: The most inputs that a convolution sees, its own token included.
MAX_TAPS = 16
#: The largest Dk of :meth:`StateOps.gated_delta`, D of :meth:`StateOps.rwkv`, N of
#: :meth:`StateOps.ssd` and :meth:`StateOps.selective_scan`.
MAX_STATE_DIM = 512
#: The functions of a gate of :meth:`StateOps.gated_norm`.
NormGate = Literal["silu", "sigmoid"]
NORM_GATES: tuple[NormGate, ...] = ("silu", "sigmoid")
#: What :meth:`StateOps.rates` is a function of.
RateKind = Literal["sigmoid", "softplus", "tanh"]
RATES: tuple[RateKind, ...] = ("sigmoid", "softplus", "tanh")


class StateOps:
    """``Ops.states``: causal convolutions, the gated delta rule, the recurrences of RWKV-7, Mamba-1
    and Mamba-2; and the small operators around them.

    Tensors of tokens may be strided views of one projection, as long as the numbers of a head, or
    of a convolution's row, are next to each other.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        *,
        activation: str | None = None,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """A depthwise convolution over each request's tokens: ``x [T, C]`` -> ``[T, C]``.

        ``y[t] = act(sum over j of weight[:, j] * x[t - K + 1 + j] + bias)``: weight ``[C, K]``,
        bias ``[C]`` or none, both float32; ``activation``: ``silu`` or none. ``state`` float32
        ``[slots, K - 1, C]``: the last K - 1 inputs, oldest first. ``before``, ``after`` ``[T, C]``
        make it a gated short convolution (LFM2): x is multiplied by ``before`` first (products are
        the inputs that the state keeps), the result by ``after`` last. Without these, a weight
        ``[M, C, K]`` and a bias ``[M, C]`` are those of M convolutions of x: ``[M, T, C]``.
        """
        states = _states("causal_conv", batch)
        tokens = batch.num_tokens
        self._expect("causal_conv x", x, tokens, None)
        width = x.shape[1]
        several = weight.shape[:1] if weight.dim() == 3 else ()
        expect("causal_conv weight", weight, torch.float32, *several, width, None)
        taps = weight.shape[-1]
        if not 2 <= taps <= MAX_TAPS:
            raise KernelError(f"causal_conv weight: expected 2 to {MAX_TAPS} taps, found {taps}")
        if activation not in (None, "silu"):
            raise KernelError(
                f"causal_conv activation: expected None or 'silu', found {activation!r}"
            )
        if bias is not None:
            expect("causal_conv bias", bias, torch.float32, *several, width)
        for name, gate in (("before", before), ("after", after)):
            if gate is not None:
                self._expect(f"causal_conv {name}", gate, tokens, width)
                if several:
                    raise KernelError(f"causal_conv {name}: expected none with several weights")
        _expect_state("causal_conv", state, taps - 1, width)
        out = self._context.empty(*several, tokens, width, dtype=x.dtype)
        if out.numel():
            like = (x, weight, bias, state, activation, before, after)
            gates = [
                name for name, one in (("before", before), ("after", after)) if one is not None
            ]
            kernel = self._kernel("causal_conv", like, format=" ".join(gates))
            kernel.run(x, weight, bias, state, batch, states, activation, before, after, out)
        return out

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        batch: AttentionBatch,
        scale: float,
        *,
        eps: float | None = None,
        tiled: bool = False,
    ) -> Tensor:
        """The gated delta rule (Yang et al. 2024, arXiv 2412.06464): ``[T, Hv, Dv]``.

        For each token of a head ``S = e^decay S``, then ``S += k (beta (v - k S))``, and the result
        is ``scale * q S``. q, k ``[T, Hk, Dk]``, v ``[T, Hv, Dv]``, beta float32 ``[T, Hv]``;
        ``decay`` float32, at most 0, ``[T, Hv]``, or ``[T, Hv, Dk]``, one for each row of the state
        (KDA, arXiv 2510.26692). ``state`` float32 ``[slots, Hv, Dk, Dv]``. Head h of v uses head
        ``h // (Hv / Hk)`` of q and k, or ``h % Hk`` if they are ``tiled``. ``eps``: q and k are
        divided by ``sqrt(sum of squares + eps)`` first; ``None``: taken as they are.
        """
        states = _states("gated_delta", batch)
        tokens = batch.num_tokens
        self._expect("gated_delta q", q, tokens, None, None)
        self._expect("gated_delta v", v, tokens, None, None)
        key_heads, key_dim = q.shape[1:]
        heads, value_dim = v.shape[1:]
        self._expect("gated_delta k", k, tokens, key_heads, key_dim)
        per_row = decay.dim() == 3
        rows = (key_dim,) if per_row else ()
        expect("gated_delta decay", decay, torch.float32, tokens, heads, *rows)
        expect("gated_delta beta", beta, torch.float32, tokens, heads)
        _expect_rows("gated_delta decay", decay)
        if not 1 <= key_dim <= MAX_STATE_DIM:
            raise KernelError(
                f"gated_delta: expected keys of 1 to {MAX_STATE_DIM} numbers, found {key_dim}"
            )
        if key_heads < 1 or heads % key_heads:
            raise KernelError(
                f"gated_delta: expected heads of v in a multiple of {key_heads} heads of k, found "
                f"{heads}"
            )
        _expect_state("gated_delta", state, heads, key_dim, value_dim)
        out = self._context.empty(tokens, heads, value_dim, dtype=v.dtype)
        if out.numel():
            like = (q, k, v, decay, state, eps, tiled)
            kernel = self._kernel("gated_delta", like, head_dim=key_dim, format="rows" * per_row)
            given = (q, k, v, decay, beta, state, batch, states)
            kernel.run(*given, scale, eps, tiled, out)
        return out

    def rwkv(
        self,
        r: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        rate: Tensor,
        keys: RwkvKeys,
        state: Tensor,
        batch: AttentionBatch,
        *,
        first: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The time mixing of RWKV-7 (Peng et al. 2025, arXiv 2503.14456): two ``[T, H, D]``.

        For each token of a head ``u = k * norm`` divided by its length, and ``S = e^decay S -
        (rate * u) (u S) + key v`` with S before the token in ``u S``; key is ``k (1 + (rate - 1)
        mix)``. The results are ``r S`` and the token's own part, ``(r * read . key) v``. r, k, v
        ``[T, H, D]``; decay, at most 0, and rate float32 ``[T, H, D]``. ``first``: v and how far,
        float32, each of its numbers moves from v to it, ``[T, H, D]`` both. ``state`` float32
        ``[slots, H, D, D]``.
        """
        states = _states("rwkv", batch)
        tokens = batch.num_tokens
        self._expect("rwkv r", r, tokens, None, None)
        heads, dim = r.shape[1:]
        given = [("k", k), ("v", v)] if first is None else [("k", k), ("v", v), ("first", first[0])]
        for name, x in given:
            self._expect(f"rwkv {name}", x, tokens, heads, dim)
        wide = {"decay": decay, "rate": rate} | ({} if first is None else {"mix": first[1]})
        for name, x in wide.items():
            expect(f"rwkv {name}", x, torch.float32, tokens, heads, dim)
            _expect_rows(f"rwkv {name}", x)
        for name, x in (("norm", keys.norm), ("mix", keys.mix), ("read", keys.read)):
            expect(f"rwkv {name} of keys", x, torch.float32, heads, dim)
        if not 1 <= dim <= MAX_STATE_DIM:
            raise KernelError(f"rwkv: expected heads of 1 to {MAX_STATE_DIM} numbers, found {dim}")
        _expect_state("rwkv", state, heads, dim, dim)
        out, own = (self._context.empty(tokens, heads, dim, dtype=v.dtype) for _ in range(2))
        if out.numel():
            like = (r, k, v, decay, rate, first, state)
            kernel = self._kernel("rwkv", like, head_dim=dim, format="first" * (first is not None))
            kernel.run(r, k, v, decay, rate, keys, first, state, batch, states, out, own)
        return out, own

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        """The state space of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): ``[T, H, P]``.

        For each token of a head ``S = e^(dt a) S + dt x b^T``, and the result is ``S c + d x``.
        x ``[T, H, P]``; dt float32 ``[T, H]``, after its bias, softplus and limits; a ``[H]``,
        negative, and d ``[H]`` or none, float32; b, c ``[T, G, N]``, of which head h uses group
        ``h // (H / G)``. ``state`` float32 ``[slots, H, P, N]``.
        """
        states = _states("ssd", batch)
        tokens = batch.num_tokens
        self._expect("ssd x", x, tokens, None, None)
        self._expect("ssd b", b, tokens, None, None)
        heads, width = x.shape[1:]
        groups, size = b.shape[1:]
        self._expect("ssd c", c, tokens, groups, size)
        expect("ssd dt", dt, torch.float32, tokens, heads)
        expect("ssd a", a, torch.float32, heads)
        if d is not None:
            expect("ssd d", d, torch.float32, heads)
        if not 1 <= size <= MAX_STATE_DIM:
            raise KernelError(f"ssd: expected b of 1 to {MAX_STATE_DIM} numbers, found {size}")
        if groups < 1 or heads % groups:
            raise KernelError(
                f"ssd: expected heads in a multiple of {groups} groups, found {heads}"
            )
        _expect_state("ssd", state, heads, width, size)
        out = self._context.empty(tokens, heads, width, dtype=x.dtype)
        if out.numel():
            kernel = self._kernel("ssd", (x, b, d, state), head_dim=size)
            kernel.run(x, dt, a, b, c, d, state, batch, states, out)
        return out

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
    ) -> Tensor:
        """The state space of Mamba-1 (Gu and Dao 2023, arXiv 2312.00752): ``[T, C]``.

        For each token of a channel ``S = e^(dt a) S + dt x b``, and the result is ``S c + d x``.
        x ``[T, C]``; dt float32 ``[T, C]``, after its bias and softplus; a ``[C, N]``, negative,
        and d ``[C]`` or none, float32; b, c ``[T, N]``, of all channels. ``state`` float32
        ``[slots, C, N]``.
        """
        states = _states("selective_scan", batch)
        tokens = batch.num_tokens
        self._expect("selective_scan x", x, tokens, None)
        self._expect("selective_scan b", b, tokens, None)
        width, size = x.shape[1], b.shape[1]
        self._expect("selective_scan c", c, tokens, size)
        expect("selective_scan dt", dt, torch.float32, tokens, width)
        _expect_rows("selective_scan dt", dt)
        expect("selective_scan a", a, torch.float32, width, size)
        if d is not None:
            expect("selective_scan d", d, torch.float32, width)
        if not 1 <= size <= MAX_STATE_DIM:
            raise KernelError(
                f"selective_scan: expected b of 1 to {MAX_STATE_DIM} numbers, found {size}"
            )
        _expect_state("selective_scan", state, width, size)
        out = self._context.empty(tokens, width, dtype=x.dtype)
        if out.numel():
            kernel = self._kernel("selective_scan", (x, b, d, state), head_dim=size)
            kernel.run(x, dt, a, b, c, d, state, batch, states, out)
        return out

    def rates(
        self,
        x: Tensor,
        kind: RateKind,
        *,
        bias: Tensor | None = None,
        factor: Tensor | None = None,
        limits: tuple[float, float] | None = None,
    ) -> Tensor:
        """What recurrences take of a projection ``x [T, N]``: float32 ``[T, N]``.

        ``factor * f(x + bias)``; f is ``sigmoid``, ``softplus`` or ``tanh``, within ``limits`` if
        they are given. ``bias`` ``[N]``; ``factor`` ``[F]``: one for a run of N / F neighbours;
        both float32. So the delta rule's decay is ``-exp(A_log) softplus(a + dt_bias)``, its beta
        ``sigmoid(b)``, and Mamba-2's dt ``softplus(dt + dt_bias)`` within limits.
        """
        self._expect("rates x", x, None, None)
        tokens, width = x.shape
        if kind not in RATES:
            raise KernelError(f"rates kind: expected one of {', '.join(RATES)}, found {kind!r}")
        if bias is not None:
            expect("rates bias", bias, torch.float32, width)
        if factor is not None:
            expect("rates factor", factor, torch.float32, None)
            if not factor.shape[0] or width % factor.shape[0]:
                raise KernelError(
                    f"rates factor: expected one for equal runs of {width} columns, found "
                    f"{factor.shape[0]}"
                )
        if limits is not None and not limits[0] <= limits[1]:
            raise KernelError(f"rates limits: expected the lower one first, found {limits}")
        out = self._context.empty(tokens, width)
        if out.numel():
            like = (x, kind, bias, factor, limits)
            self._kernel("rates", like, format=kind).run(*like, out)
        return out

    def gated_norm(
        self, x: Tensor, gate: Tensor, norm: Norm, kind: NormGate = "silu", *, first: bool = False
    ) -> Tensor:
        """An RMSNorm of each head or group, times a function of its gate: ``[T, H, D]``.

        ``norm(x) * f(gate)``, or with ``first`` ``norm(x * f(gate))``; x, gate ``[T, H, D]``, f
        ``silu`` or ``sigmoid``. The norm's weight is ``[D]``, ``[H, D]`` or none.
        """
        self._expect("gated_norm x", x, None, None, None)
        self._expect("gated_norm gate", gate, *x.shape)
        expect_norm("gated_norm", norm, x)
        if norm.centred or norm.bias is not None:
            raise KernelError("gated_norm: expected an RMSNorm without a bias, found another norm")
        if kind not in NORM_GATES:
            raise KernelError(
                f"gated_norm kind: expected one of {', '.join(NORM_GATES)}, found {kind!r}"
            )
        out = self._context.empty(*x.shape, dtype=x.dtype)
        if out.numel():
            like = (x, gate, norm, kind, first)
            kernel = self._kernel("gated_norm", like, format=f"{kind} first" if first else kind)
            kernel.run(*like, out)
        return out

    def _expect(self, what: str, x: Tensor, *shape: int | None) -> None:
        expect_floats(what, x, self._context.activations, *shape)
        _expect_rows(what, x)

    def _kernel(self, op: str, like: tuple[Any, ...], **fields: Any) -> Any:
        return self._context.kernel(op, like, **fields)


def _states(op: str, batch: AttentionBatch) -> Any:
    batch.check()
    if batch.states is None:
        raise KernelError(f"{op}: expected a step with states, found none (batch.states)")
    batch.states.check(batch.num_requests)
    return batch.states


def _expect_rows(what: str, x: Tensor) -> None:
    """:raises KernelError: unless the numbers of the last dimension are next to each other."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise KernelError(f"{what}: expected contiguous rows, found strides {x.stride()}")


def _expect_state(op: str, state: Tensor, *shape: int) -> None:
    """:raises KernelError: unless slots of this shape are contiguous and do not overlap."""
    expect(f"{op} state", state, torch.float32, None, *shape)
    wanted: list[int] = []
    size = 1
    for n in reversed(shape):
        wanted.insert(0, size)
        size *= n
    found = state.stride()
    inner = zip(found[1:], wanted, shape, strict=True)
    if found[0] < size or any(step != want for step, want, n in inner if n > 1):
        raise KernelError(
            f"{op} state: expected contiguous slots of {size} numbers, found strides {found}"
        )
