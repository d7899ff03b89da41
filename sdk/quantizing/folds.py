"""AWQ and SmoothQuant on a layer: factors per input channel, folded into what precedes a matrix.

The input of q, k and v, and that of gate and up, is the output of a norm: its weight and its bias
take the factors, unless it has no weight or others read it too (parallel blocks, Mamba). The input
of the output projection is linear in the values, that of down is linear in up if there is a gate:
there the rows of the preceding matrix take them (AWQ only, and only if it is a separate matrix).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sdk.models.architecture import architecture
from sdk.models.configs.config import ModelConfig
from sdk.quant.calibration import InputStatistics
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.methods.awq import clip_and_round, stretch
from sdk.quant.methods.integers import round_to_nearest
from sdk.quant.methods.smooth import smoothing
from sdk.quant.quantize import Packed, check_finite
from sdk.quant.scheme import Scheme

#: Matrices that read what a norm has written, if there is one.
_FIRST_OF_ATTENTION = ("q_proj", "qkv_proj")
_FIRST_OF_MLP = ("gate_proj", "gate_up_proj")
_ONLY_OF_MLP = "up_proj"
#: The matrix in whose rows a projection's input is linear.
_AFTER_ROWS = {"o_proj": "self_attn.v_proj", "down_proj": "mlp.up_proj"}


class Folding:
    """Copies of one layer's weights and plain tensors, to which factors are applied.

    ``path``: of the layer, ``model.layers.0``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        scheme: Scheme,
        config: ModelConfig,
        path: str,
        inputs: Mapping[tuple[str, ...], InputStatistics],
    ) -> None:
        self.checkpoint = checkpoint
        self.scheme = scheme
        self.config = config
        self.path = path
        known = architecture(config.model_type)
        assert known is not None
        self.rules, self.layer = known.tensors, known.layer
        self.norms = known.layer.norms_of(config.parallel_blocks)
        self.values_unchanged = not known.layer.v_norm and config.qkv_clip is None
        self.inputs = inputs
        self.weights = {n: checkpoint.weight(n).dequantize() for names in inputs for n in names}
        self.tensors: dict[str, Tensor] = {}
        #: The divisors of each input, by the first name.
        self.factors: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            check_finite(name, weight)
            scheme.check(name, weight.shape[1])

    def run(self) -> tuple[dict[str, Packed], dict[str, Tensor]]:
        """The packed matrices, and the plain tensors that were changed."""
        for names, statistics in self.inputs.items():
            self._fold(names, statistics)
        packed: dict[str, Packed] = {}
        for names, statistics in self.inputs.items():
            gram = statistics.gram
            s = self.factors.get(names[0])
            if s is not None:
                gram = gram / s / s.unsqueeze(1)
            for name in names:
                packed[name] = self._packed(name, gram)
        return packed, self.tensors

    def _packed(self, name: str, gram: Tensor) -> Packed:
        weight = self.weights.pop(name)
        # Clipping queries and keys would distort the products of both; the paper does not either.
        if self.scheme.method == "smoothquant" or name.endswith(("q_proj", "k_proj", "qkv_proj")):
            return round_to_nearest(weight, self.scheme.spec)
        return clip_and_round(weight, gram, self.scheme.spec)

    def _fold(self, names: tuple[str, ...], statistics: InputStatistics) -> None:
        last = names[0].rsplit(".", 1)[1]
        of_mlp = _FIRST_OF_MLP if self.layer.gated else (_ONLY_OF_MLP,)
        if last in (*_FIRST_OF_ATTENTION, *of_mlp):
            first = last in _FIRST_OF_ATTENTION
            norm = self.norms.before_attention if first else self.norms.before_mlp
            shared = self.config.parallel_blocks and self.norms.before_mlp is None
            shared |= self._others_read(names, statistics)
            if norm is not None and self.layer.norm.weight and not shared:
                self._into_norm(f"{self.path}.{norm}", names, statistics)
            return
        if last == "down_proj" and not self.layer.gated:
            return
        before = f"{self.path}.{_AFTER_ROWS.get(last)}"
        if last == "o_proj" and not self.values_unchanged:
            return  # what it reads does not grow with the rows of v
        if self.scheme.method == "awq" and before in self.weights:
            self._into_rows(before, names[0], statistics)

    def _others_read(self, names: tuple[str, ...], statistics: InputStatistics) -> bool:
        """Whether other matrices read the same numbers, or these times a factor: Mamba beside
        attention, up beside a gate that has a factor of its own."""
        own = statistics.mean_square
        for other, found in self.inputs.items():
            if other != names and len(found.mean_square) == len(own):
                scaled = found.mean_square * (own.sum() / found.mean_square.sum())
                if torch.allclose(scaled, own, rtol=1e-3):
                    return True
        return False

    def _into_norm(self, norm: str, names: tuple[str, ...], statistics: InputStatistics) -> None:
        joined = torch.cat([self.weights[name] for name in names])
        if self.scheme.method == "smoothquant":
            s = smoothing(joined, statistics.largest)
        else:
            s = stretch(joined, statistics, self.scheme.spec)
        one = self.rules.norm_offset(norm)
        weight, bias = f"{norm}.weight", f"{norm}.bias"
        self.tensors[weight] = (self.checkpoint.tensor(weight) + one) / s - one
        if self.layer.norm.bias:
            self.tensors[bias] = self.checkpoint.tensor(bias) / s
        self._stretched(names, s)

    def _into_rows(self, before: str, name: str, statistics: InputStatistics) -> None:
        weight, rows = self.weights[name], self.weights[before]
        columns = torch.arange(weight.shape[1])
        shared = weight.shape[1] // rows.shape[0]  # neighbouring query heads share values
        width = self.config.head_dim if shared > 1 else 1
        of = columns // (shared * width) * width + columns % width
        s = stretch(weight, statistics, self.scheme.spec, of)
        own = torch.ones(rows.shape[0]).scatter_(0, of, s)
        self.weights[before] = rows / own.unsqueeze(1)
        bias = f"{before}.bias"
        if self.checkpoint.has(bias):
            self.tensors[bias] = self.checkpoint.tensor(bias) / own
        self._stretched((name,), s)

    def _stretched(self, names: tuple[str, ...], s: Tensor) -> None:
        for name in names:
            self.weights[name] = self.weights[name] * s
        self.factors[names[0]] = s
