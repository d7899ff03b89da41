"""A checkpoint over another one whose weights are observed, replaced or repacked when pulled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdk.kernels.lazy_torch import Tensor
from sdk.quant.checkpoint import Checkpoint, TensorEntry
from sdk.quant.weight import Weight

#: ``(name, the original weight) -> weight``.
Change = Callable[[str, Weight], Weight]


class RewrittenCheckpoint:
    """A :class:`sdk.quant.checkpoint.Checkpoint` whose weights pass through ``change``.

    ``tensors`` replace the plain tensors of those names. ``pulled`` lists the names that were
    pulled, in order: first those of matrices, then those of plain tensors.
    """

    def __init__(
        self, inner: Checkpoint, change: Change, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        self.inner = inner
        self.path: Path = inner.path
        self.format = inner.format
        self.config: Mapping[str, Any] = inner.config
        self.generation_config: Mapping[str, Any] = inner.generation_config
        self.kv_scales: Mapping[str, float] = inner.kv_scales
        self.processor: Mapping[str, Any] = inner.processor
        self.pulled: tuple[list[str], list[str]] = ([], [])
        self._change = change
        self._tensors = tensors or {}

    @property
    def on_bytes(self) -> Callable[[int, int], None] | None:
        return self.inner.on_bytes

    @on_bytes.setter
    def on_bytes(self, report: Callable[[int, int], None] | None) -> None:
        self.inner.on_bytes = report

    @property
    def tokenizer(self) -> Any:
        return self.inner.tokenizer

    def weight(self, name: str) -> Weight:
        self.pulled[0].append(name)
        return self._change(name, self.inner.weight(name))

    def tensor(self, name: str) -> Tensor:
        self.pulled[1].append(name)
        found = self._tensors.get(name)
        return self.inner.tensor(name) if found is None else found.clone()

    def has(self, name: str) -> bool:
        return self.inner.has(name)

    def alike(self, one: str, other: str) -> bool:
        return self.inner.alike(one, other)

    def entries(self) -> Sequence[TensorEntry]:
        return self.inner.entries()

    def unused(self) -> list[str]:
        return self.inner.unused()

    def close(self) -> None:
        self.inner.close()
