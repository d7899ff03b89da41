"""The time mixing of RWKV-7, whose state follows a generalized delta rule.

Every projection of time mixing has an input of its own, ``x + mu (x' - x)`` with the token before,
x': convolutions over two tokens. Decays, learning rates, the mix of values with those of the first
layer, and the gate are projections over few features (low rank). Then comes
:meth:`sdk.kernels.operators.state_ops.StateOps.rwkv`, and a LayerNorm of each head. Peng et al.,
"RWKV-7 Goose" (2025), arXiv 2503.14456; flash-linear-attention's rwkv7.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, cast

from sdk.models.mixers.mixer import range_of, share_of, shift_weight
from sdk.quant.caches import StateCache, StatePart
from sdk.quant.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.kernels.operators.states import LayerState
    from sdk.models.mixers.attention import Step
    from sdk.models.source import Source

#: What is divided over ranks.
_HEADS = "heads of RWKV-7"
#: The largest decay is ``e^-e^-0.5`` per token.
_DECAY = -math.exp(-0.5)
#: What each projection reads, in the order of files that hold all in one tensor.
_INPUTS = "rwkvag"


class RwkvSpec(NamedTuple):
    """``heads`` of ``dim`` features; features of the decay, the learning rate, the mix of values
    and the gate, 0 for none.

    ``norm_eps``: of the LayerNorm of heads; ``None``: there is none. ``shifts_mlp``: the MLP reads
    the token before, too.
    """

    heads: int
    dim: int
    decay: int
    rate: int
    mix: int
    gate: int
    norm_eps: float | None
    shifts_mlp: bool = True
    name: str = "rwkv"

    @property
    def hidden(self) -> int:
        return self.heads * self.dim

    @property
    def step_width(self) -> int:
        """See :class:`~sdk.models.configs.recurrent.RecurrentSpec`: inputs of projections, r, k and
        v, rates and what they come from, both results, the gate; the first layer's values."""
        return 19 * self.hidden + 2 * max(self.decay, self.rate, self.mix, self.gate)

    def cache(self, ranks: int = 1) -> StateCache:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        heads = share_of(_HEADS, self.heads, ranks)
        parts = [StatePart("shift", (1, self.hidden))]
        if self.shifts_mlp:
            parts.append(StatePart("mlp_shift", (1, self.hidden)))
        return StateCache((*parts, StatePart("wkv", (heads, self.dim, self.dim))))

    def mixer(self, source: Source, path: str, *, reduce: bool) -> TimeMix:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        return TimeMix(source, path, self, reduce=reduce)


class TimeMix:
    """The mixer of one layer: see the module."""

    def __init__(self, source: Source, path: str, spec: RwkvSpec, *, reduce: bool) -> None:
        self.ops, self.spec = source.ops, spec
        self.first = int(path.split(".")[2]) == 0
        hidden, dim = spec.hidden, spec.dim
        start, self.heads = range_of(_HEADS, spec.heads, source.mesh)
        own = (start * dim, self.heads * dim)
        self.inputs = _INPUTS if spec.gate else _INPUTS[:-1]
        self._pull_shift(source, path)
        self.r, self.k, self.v = (
            source.columns(path, f"{name}_proj", [(f"{name}_proj", hidden, *own)]) for name in "rkv"
        )
        ranks = {"w": spec.decay, "a": spec.rate}
        if not self.first:
            ranks["v"] = spec.mix
        if spec.gate:
            ranks["g"] = spec.gate
        self.narrow = {
            name: source.matrix(f"{path}.{name}_in", rank, hidden) for name, rank in ranks.items()
        }
        self.wide = {
            name: source.columns(
                path,
                f"{name}_out",
                [(f"{name}_out", hidden, *own)],
                bias=name != "g",
                accurate=True,
                inputs=rank,
            )
            for name, rank in ranks.items()
        }
        self._pull_vectors(source, path, own)
        self.out = source.row(f"{path}.o_proj", hidden, *own, reduce=reduce)

    def _pull_shift(self, source: Source, path: str) -> None:
        """The mixes of all inputs: one tensor, or one for each."""
        from sdk.kernels.lazy_torch import torch

        names, hidden = [f"{path}.shift"], self.spec.hidden
        if not source.has(names[0]):
            names = [f"{path}.shift_{name}" for name in self.inputs]
        values = torch.cat([source.plain(name).reshape(-1) for name in names])
        self.shift = shift_weight(source, values, len(self.inputs), hidden, names[0])

    def _pull_vectors(self, source: Source, path: str, own: tuple[int, int]) -> None:
        """What is made of keys, and the norm of heads."""
        from sdk.kernels.lazy_torch import torch
        from sdk.kernels.operators.norm import Norm
        from sdk.kernels.operators.states import RwkvKeys

        (start, count), spec = own, self.spec

        def of_heads(name: str) -> Tensor:
            found = source.plain(f"{path}.{name}").reshape(-1)
            if len(found) != spec.hidden:
                raise CheckpointError(
                    f"{path}.{name}: expected {spec.hidden} numbers, found {len(found)}"
                )
            found = found[start : start + count].clone().to(source.ops.device)
            return found.view(self.heads, spec.dim)

        self.keys = RwkvKeys(of_heads("key_norm"), of_heads("key_mix"), of_heads("key_read"))
        self.decay = torch.full((1,), _DECAY).to(source.ops.device)
        self.norm: Norm | None = None
        if spec.norm_eps is not None:
            self.norm = Norm(of_heads("norm.weight"), spec.norm_eps, None, centred=True)
            self.norm_bias = of_heads("norm.bias").view(-1)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`: tokens are mixed first."""
        return None

    def __call__(self, x: Rows, step: Step, cache: LayerState) -> Tensor:
        states, tokens = self.ops.states, x.shape[0]
        x = cast("Tensor", x)  # see `rounding`
        mixed = states.causal_conv(x, self.shift, None, cache["shift"], step.batch)
        inputs = {name: mixed.select(0, i) for i, name in enumerate(self.inputs)}
        shape = (tokens, self.heads, self.spec.dim)
        assert step.first_values is not None
        decay = states.rates(self.narrow["w"](inputs["w"]), "tanh")
        decay = states.rates(self.wide["w"](decay), "sigmoid", factor=self.decay)
        rate = states.rates(self.wide["a"](self.narrow["a"](inputs["a"])), "sigmoid")
        r, k, v = (
            projection(inputs[name]).view(shape)
            for name, projection in (("r", self.r), ("k", self.k), ("v", self.v))
        )
        first = None
        if self.first:
            step.first_values.append(v)
        else:
            mix = states.rates(self.wide["v"](self.narrow["v"](inputs["v"])), "sigmoid")
            first = step.first_values[0].view(shape), mix.view(shape)
        gate = self._gate(inputs)
        del inputs, mixed
        given = (r, k, v, decay.view(shape), rate.view(shape), self.keys, cache["wkv"], step.batch)
        y, own = states.rwkv(*given, first=first)
        if self.norm is not None:
            y = self.ops.norm(y, self.norm)
        y = y.view(tokens, -1)
        if self.norm is not None:
            y = self.ops.add_bias(y, self.norm_bias)
        y = self.ops.add(y, own.view(tokens, -1))
        return self.out(y if gate is None else self.ops.gate(y, gate, "linear"))

    def _gate(self, inputs: dict[str, Tensor]) -> Tensor | None:
        if not self.spec.gate:
            return None
        narrow = self.ops.states.rates(self.narrow["g"](inputs["g"]), "sigmoid")
        return self.wide["g"](narrow)
