"""Layers over several residual streams: AltUp (Baykal et al. 2023, arXiv 2301.13310) of Gemma 3n,
with LAuReL beside attention (Menghani et al. 2024, arXiv 2411.07501) and sparse MLPs.

A layer predicts all streams from all of them, runs on the first one, and corrects every stream by
what that has changed. The factors of both steps depend on the token. transformers'
modeling_gemma3n.py.

torch is imported for type checkers only: see :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.norm import Norm
from sdk.models.layer_inputs import LayerInput
from sdk.models.mixers.attention import Attention
from sdk.models.mlp import MLP
from sdk.quant.errors import AlignmentError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.kv.pages import KVPages
    from sdk.kernels.operators.ops import Ops
    from sdk.models.architecture import LayerRules
    from sdk.models.mixers.attention import Step
    from sdk.models.projections import Projection
    from sdk.models.source import Source

#: In the place of an eps that a sum of squares does not have. transformers limits mean squares of
#: streams to 1e-5 from below instead; those of embeddings that mean something are around 1.
_TINY = 1e-30
#: The factors of streams are the product of a matrix with as many columns as there are streams;
#: zeros follow them, because kernels read more at a time.
_PADDED = 32


class MeanProducts:
    """For each token the mean of the products of two vectors: what has no operator of its own."""

    def __init__(self, source: Source, path: str, width: int) -> None:
        self.ops = source.ops
        ones = source.given(f"{path}.mean_products", lambda: torch.full((1, width), 1.0 / width))
        self._mean: Projection = ones

    def __call__(self, x: Tensor, other: Tensor) -> Tensor:
        """float32 ``[T, 1]``; x is overwritten."""
        return self._mean(self.ops.gate(x, other, "linear"))


def copied(ops: Ops, x: Tensor) -> Tensor:
    """x in memory of its own."""
    return ops.add(ops.zeros(*x.shape), x)


class Streams:
    """The layers of a model, with what makes streams of the embedding and one vector of them."""

    def __init__(self, source: Source, rules: LayerRules) -> None:
        c = source.config
        assert c.streams is not None
        self.ops, self.count = source.ops, c.streams.count
        numbers, width = range(self.count - 1), c.hidden_size
        self.into, self.out = (
            [source.matrix(f"model.{name}.{i}", width, width) for i in numbers]
            for name in ("altup_projections", "altup_unembed_projections")
        )
        self.mean = MeanProducts(source, "model", width)
        self.unit = Norm(None, _TINY)
        self.layers: list[StreamLayer] = []
        for i in source.layers:
            with source.ops.layers.load(i):
                self.layers.append(StreamLayer(source, f"model.layers.{i}", i, rules))

    def __call__(
        self,
        x: Tensor,
        step: Step,
        kv: Sequence[Any],
        places: Mapping[int, tuple[int, ...]],
    ) -> Tensor:
        """x: the embeddings ``[T, hidden]`` -> the mean of the streams. ``places``: for each layer
        those of its caches in ``kv``."""
        streams = [x, *(self._sized(project(x), self._size(x)) for project in self.into)]
        for i, layer in enumerate(self.layers):
            [place] = places[i]
            with self.ops.layers.run(i):
                streams = layer(streams, step, kv[place])
        first, *others = streams
        size, total = self._size(first), copied(self.ops, first)
        for project, one in zip(self.out, others, strict=True):
            total = self.ops.add(total, self._sized(project(one), size))
        return self.ops.scale(total, 1.0 / self.count)

    def _size(self, x: Tensor) -> Tensor:
        """The root of the mean square, ``[T, 1]``."""
        return self.mean(self.ops.norm(x, self.unit), x)

    def _sized(self, x: Tensor, size: Tensor) -> Tensor:
        """x with this root of its mean square."""
        return self.ops.gate(self.ops.norm(x, self.unit), size, "linear")


class AltUp:
    """The factors of one layer."""

    def __init__(self, source: Source, path: str) -> None:
        c = source.config
        assert c.streams is not None
        count = c.streams.count
        self.ops, self.count = source.ops, count
        norm = source.norm(f"{path}.router_norm")
        assert norm.weight is not None
        self.norm = Norm(norm.weight / c.hidden_size, norm.eps)
        router = f"{path}.modality_router"
        self.router = source.given(
            f"{router}.padded", lambda: _padded(source, router, count, c.hidden_size, rows=_PADDED)
        )
        self.predictions, self.corrections = (
            source.given(f"{path}.{name}.padded", self._factors(source, f"{path}.{name}", rows))
            for name, rows in (("prediction_coefs", count**2), ("correction_coefs", count))
        )
        #: Each stream predicts itself, and all of what has changed corrects it, besides.
        self.itself = torch.eye(count).reshape(-1).to(self.ops.device)
        self.whole = torch.ones(count, device=self.ops.device)
        self.scale: Tensor | None = None
        if c.streams.scaled:
            self.scale = source.vector(f"{path}.correct_output_scale", c.hidden_size)

    def _factors(self, source: Source, path: str, rows: int) -> Callable[[], Tensor]:
        return lambda: _padded(source, path, rows, self.count, columns=_PADDED)

    def _kinds(self, x: Tensor) -> Tensor:
        """What the factors depend on, ``[T, padded]``."""
        return self.ops.softcap(self.router(self.ops.norm(x, self.norm)), 1.0)

    def predict(self, streams: Sequence[Tensor]) -> list[Tensor]:
        """Of each stream what it will be; the streams are overwritten."""
        ops, count = self.ops, self.count
        factors = ops.add_bias(self.predictions(self._kinds(streams[0])), self.itself)
        found: list[Tensor] = []
        for i in range(count):
            total = ops.zeros(*streams[0].shape)
            for j, x in enumerate(streams):
                part = x if i == count - 1 else copied(ops, x)
                at = i * count + j
                total = ops.add(total, ops.gate(part, factors[:, at : at + 1], "linear"))
            found.append(total)
        return found

    def correct(self, predicted: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        """The streams, of which the first one has become x, which is overwritten; so are they."""
        ops = self.ops
        factors = ops.add_bias(self.corrections(self._kinds(x)), self.whole)
        change = ops.add(x, ops.scale(copied(ops, predicted[0]), -1.0))
        return [
            ops.add(one, ops.gate(copied(ops, change), factors[:, i : i + 1], "linear"))
            for i, one in enumerate(predicted)
        ]


def _padded(
    source: Source, path: str, rows_of: int, columns_of: int, *, rows: int = 0, columns: int = 0
) -> Tensor:
    """A matrix of the checkpoint with zeros after its rows or columns, float32."""
    values = source.pull(path, (rows_of, columns_of)).dequantize().to(torch.float32)
    found = torch.zeros(max(rows, rows_of), max(columns, columns_of))
    found[:rows_of, :columns_of] = values
    return found


class SparseMLP:
    """``down(act(relu(gate(x) - limit)) * up(x))``: the limit is so many standard deviations above
    the mean of a token's ``gate(x)`` that a share of it remains.

    :raises AlignmentError: with ranks, which would have parts of it.
    """

    def __init__(self, source: Source, path: str, width: int, deviations: float) -> None:
        if source.mesh.size > 1:
            raise AlignmentError(
                f"{path}: cannot split an MLP whose activations are chosen together over "
                f"{source.mesh.size} ranks: expected a tensor parallel size of 1"
            )
        self.ops, self.activation = source.ops, source.config.activation
        names = "gate_proj", "up_proj"
        self.gate, self.up = (
            source.columns(path, name, [(name, width, 0, width)]) for name in names
        )
        self.down = source.row(f"{path}.down_proj", width, 0, width)
        self.mean = MeanProducts(source, path, width)
        self.spread = Norm(None, _TINY, None, True)
        self.limit = torch.full((width,), -deviations, device=self.ops.device)

    def __call__(self, x: Tensor) -> Tensor:
        ops, gate = self.ops, self.gate(x)
        even = ops.norm(gate, self.spread)  # mean 0, standard deviation 1
        kept = ops.activation(ops.add_bias(copied(ops, even), self.limit), "relu")
        kept = ops.gate(kept, self.mean(gate, even), "linear")
        y = ops.gate(self.up(x), ops.activation(kept, self.activation), "linear")
        return self.down(y)


class StreamLayer:
    """One decoder layer over several streams."""

    def __init__(self, source: Source, path: str, index: int, rules: LayerRules) -> None:
        c = source.config
        assert c.streams is not None
        self.ops = source.ops
        self.altup = AltUp(source, f"{path}.altup")
        names = rules.norms_of(False)
        norms = [None if name is None else source.norm(f"{path}.{name}") for name in names]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        self.attention = Attention(source, f"{path}.self_attn", index, rules)
        rank, width = c.streams.rank, c.hidden_size
        self.left = source.matrix(f"{path}.laurel.linear_left", rank, width)
        self.right = source.matrix(f"{path}.laurel.linear_right", width, rank)
        self.after_laurel = source.norm(f"{path}.laurel.post_laurel_norm")
        where, deviations = f"{path}.mlp", c.streams.deviations[index]
        self.mlp: MLP | SparseMLP = (
            MLP(source, where, c.width_of(index))
            if deviations is None
            else SparseMLP(source, where, c.width_of(index), deviations)
        )
        self.input = LayerInput(source, path, index)

    def __call__(self, streams: Sequence[Tensor], step: Step, pages: KVPages) -> list[Tensor]:
        """The streams after the layer; those before it are overwritten."""
        ops = self.ops
        assert self.before_attention is not None and self.after_attention is not None
        assert self.before_mlp is not None and self.after_mlp is not None
        predicted = self.altup.predict(streams)
        x = ops.norm(predicted[0], self.before_attention)
        total = ops.norm(self.right(self.left(x)), self.after_laurel)
        total = ops.add(total, x)
        y = ops.norm(self.attention(x, step, pages), self.after_attention)
        total = ops.scale(ops.add(ops.add(total, y), predicted[0]), math.sqrt(0.5))
        y = ops.norm(self.mlp(ops.norm(total, self.before_mlp)), self.after_mlp)
        found = self.altup.correct(predicted, ops.add(total, y))
        first = copied(ops, found[0])
        if self.altup.scale is not None:
            first = ops.gate(first, self.altup.scale.expand(len(first), -1), "linear")
        more = self.input(first, step)
        return [found[0], *(ops.add(one, more) for one in found[1:])]
