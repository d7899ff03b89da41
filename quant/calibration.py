"""Statistics of a layer's inputs, by which quantizers weight their errors.

A weight that is pulled through :class:`Observer` records its inputs. Weights that a model joins
because they read the same input (q, k and v) are recorded once, together.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdk.kernels.backend import Choice
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.rounding import Rows
from sdk.quant.errors import QuantizationError
from sdk.quant.spec import QuantSpec
from sdk.quant.weight import Side, Weight, concat


class InputStatistics:
    """Sums over the input rows ``x`` of a layer with ``features`` input features.

    ``gram`` is the mean of ``x x^T``, float32 ``[K, K]``. Its diagonal, the mean square of each
    input channel, is llama.cpp's importance matrix.
    """

    def __init__(self, features: int) -> None:
        self.count = 0
        self._gram = torch.zeros(features, features)
        self._sizes = torch.zeros(features, dtype=torch.float64)
        self.largest = torch.zeros(features)

    def add(self, x: Tensor) -> None:
        """Add rows ``x``, float32 ``[T, K]``. :raises QuantizationError: a value is not finite."""
        sizes = x.abs()
        total = sizes.sum(0, dtype=torch.float64)
        if not bool(total.isfinite().all()):
            raise QuantizationError("expected finite inputs, found an infinity or NaN")
        self._gram.addmm_(x.t(), x)
        self._sizes += total
        torch.maximum(self.largest, sizes.amax(0), out=self.largest)
        self.count += x.shape[0]

    @property
    def gram(self) -> Tensor:
        return self._gram / max(self.count, 1)

    @property
    def mean_square(self) -> Tensor:
        return self._gram.diagonal() / max(self.count, 1)

    @property
    def mean_size(self) -> Tensor:
        """The mean of ``|x|`` of each input channel, float32 ``[K]``."""
        return (self._sizes / max(self.count, 1)).to(torch.float32)


class Observer:
    """Wraps weights to record their inputs; ``inputs`` holds the statistics by weight names."""

    def __init__(self) -> None:
        self.inputs: dict[tuple[str, ...], InputStatistics] = {}

    def watch(self, name: str, weight: Weight) -> Weight:
        return ObservedWeight((name,), weight, self)

    def of(self, names: tuple[str, ...], features: int) -> InputStatistics:
        return self.inputs.setdefault(names, InputStatistics(features))


class ObservedWeight(Weight):
    """``inner``, whose inputs are recorded; ``names`` are the matrices joined in it."""

    def __init__(self, names: tuple[str, ...], inner: Weight, observer: Observer) -> None:
        self.shape = inner.shape
        self.names = names
        self.inner = inner
        self.observer = observer

    @property
    def spec(self) -> QuantSpec:
        return self.inner.spec

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def dequantize(self) -> Tensor:
        return self.inner.dequantize()

    def narrow(self, side: Side, start: int, count: int) -> Weight:
        return ObservedWeight(self.names, self.inner.narrow(side, start, count), self.observer)

    def joined(self, others: Sequence[Weight]) -> Weight | None:
        names, inner = self.names, [self.inner]
        for other in others:
            if not isinstance(other, ObservedWeight):
                return None
            names += other.names
            inner.append(other.inner)
        return ObservedWeight(names, concat(inner), self.observer)

    def bind(self, ops: Ops, activation_bits: int = 8) -> None:
        self.inner.bind(ops, activation_bits)

    def shared(self, ops: Ops) -> Weight:
        return self.inner.shared(ops)

    @property
    def gates(self) -> bool:
        return self.inner.gates

    def matmul(self, x: Rows, out: Tensor | None = None, activation: str = "") -> Tensor:
        assert isinstance(x, Tensor), "statistics are those of floats"
        try:
            self.observer.of(self.names, self.shape[1]).add(x)
        except QuantizationError as error:
            raise QuantizationError(f"{' and '.join(self.names)}: {error}") from error
        return self.inner.matmul(x, out, activation)

    def rows(self, ids: Tensor, part: tuple[int, int] | None = None) -> Tensor:
        return self.inner.rows(ids, part)

    def choices(self) -> list[Choice]:
        return self.inner.choices()
