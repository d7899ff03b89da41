"""The format, size and kernel of every linear layer of a loaded model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sdk.api.sizes import format_bytes
from sdk.kernels.dataclass import dataclass
from sdk.quant.expert_weights import ExpertWeights
from sdk.quant.weight import StackedWeight, Weight

if TYPE_CHECKING:
    from sdk.models.projections import Linear


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One matrix. A fused layer whose projections have different formats has one report per
    projection; all experts of a layer have one together.

    ``bits_per_weight`` counts the bytes in memory, including scales and padding. ``inputs``: how
    the file says to quantize activations, empty if it does not. ``declined``: the kernels before
    the chosen one that reject this matrix, and why.
    """

    name: str
    shape: tuple[int, int]
    format: str
    inputs: str
    bits_per_weight: float
    nbytes: int
    kernel: str
    declined: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class QuantReport:
    """See :meth:`sdk.LLM.quant_report`; ``str()`` is a summary, ``layers`` has every matrix.

    ``kv_scales``: the number of scales for an 8-bit KV cache in the file. They are not used: pages
    of fewer than 16 bits have a scale per token and head, computed from the values themselves.
    """

    layers: tuple[LayerReport, ...]
    kv_scales: int = 0

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def num_weights(self) -> int:
        return sum(layer.shape[0] * layer.shape[1] for layer in self.layers)

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / max(self.num_weights, 1)

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return {
            "bits_per_weight": round(self.bits_per_weight, 4),
            "bytes": self.nbytes,
            "weights": self.num_weights,
            "kv_scales": self.kv_scales,
            "layers": [asdict(layer) for layer in self.layers],
        }

    def _groups(self) -> Iterator[tuple[QuantReport, str]]:
        """The layers of one format and kernel, and what they are called together."""
        groups: dict[tuple[Any, ...], list[LayerReport]] = {}
        for layer in self.layers:
            groups.setdefault((layer.format, layer.kernel, layer.declined), []).append(layer)
        for members in groups.values():
            name = members[0].name
            names = name if len(members) == 1 else f"{len(members)} x {name} ..."
            yield QuantReport(tuple(members)), names

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_html_(self) -> str:
        from sdk.api.display import html_table

        rows = []
        for part, names in self._groups():
            layer = part.layers[0]
            why = "\n".join(f"not {name}: {reason}" for name, reason in layer.declined)
            sizes = f"{part.bits_per_weight:.2f}", format_bytes(part.nbytes)
            rows.append((layer.format, *sizes, layer.kernel, names, why))
        rows.append(("all", f"{self.bits_per_weight:.2f}", format_bytes(self.nbytes), "", "", ""))
        if self.kv_scales:
            rows.append(("kv cache", "", "", "", f"{self.kv_scales} scales, not used", ""))
        header = ("format", "bits", "memory", "kernel", "layers", "faster kernels")
        return html_table(rows, header=header)

    def __str__(self) -> str:
        lines = []
        for part, names in self._groups():
            layer, size = part.layers[0], format_bytes(part.nbytes)
            bits = f"{part.bits_per_weight:5.2f} bits"
            lines.append(f"{layer.format:<12} {bits}  {layer.kernel:<18} {size:>10}  {names}")
            lines += [f"{'':<12} not {name}: {reason}" for name, reason in layer.declined]
        total = format_bytes(self.nbytes)
        lines.append(f"{'all':<12} {self.bits_per_weight:5.2f} bits  {'':<18} {total:>10}")
        if self.kv_scales:
            lines.append(f"{'kv cache':<12} {self.kv_scales} scales in the file, not used")
        return "\n".join(lines)


def quant_report(
    linears: Iterable[tuple[str, Linear]],
    kv_scales: int = 0,
    others: tuple[LayerReport, ...] = (),
) -> QuantReport:
    """The report of a model's linear layers; with several ranks, of this rank's share. ``others``:
    the layers of other stages."""
    return QuantReport(
        others
        + tuple(
            LayerReport(
                name,
                weight.shape,
                str(weight.spec),
                weight.inputs,
                weight.nbytes * 8 / (weight.shape[0] * weight.shape[1]),
                weight.nbytes,
                "+".join(dict.fromkeys(choice.name for choice in weight.choices())),
                tuple(dict.fromkeys(why for c in weight.choices() for why in c.declined)),
            )
            for path, linear in linears
            for name, weight in _matrices(path, linear.weight)
        ),
        kv_scales,
    )


def _matrices(path: str, weight: Weight) -> Iterator[tuple[str, Weight]]:
    if not isinstance(weight, StackedWeight) or isinstance(weight, ExpertWeights):
        yield path, weight
        return
    start = 0
    for part in weight.parts:
        stop = start + part.shape[0]
        yield f"{path}[{start}:{stop}]", part
        start = stop
