"""Where a Hugging Face folder holds the matrices of single experts.

Our name of one is ``model.layers.0.mlp.experts.3.gate_proj``. Files have a tensor of that name, or
of Mixtral's first spelling of it (``block_sparse_moe.experts.3.w1``, by llm-compressor 0.14
``block_sparse_moe.experts.3.gate_proj``), or one tensor with all experts of a layer, gate above up:
``mlp.experts.gate_up_proj [E, 2I, H]``. Some architectures store it transposed (``[E, H, 2I]``)
unless it is packed, or with alternating rows of gate and up: see
:class:`~sdk.models.architecture.TensorRules`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdk.kernels.lazy_torch import Tensor
from sdk.models.architecture import architecture

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_FIRST_SPELLING = re.compile(
    r"(.+\.)block_sparse_moe\.(experts\.\d+\.)?(gate|w[123]|(?:gate|up|down)_proj)\b(.*)"
)
_OURS = re.compile(r"(.+\.)mlp\.(?:(experts\.\d+\.)(gate|up|down)_proj|(gate))\b(.*)")
_ONE = re.compile(r"(.+\.experts)\.(\d{1,4})\.(gate|up|down)_proj(\.bias)?")
#: GraniteMoE's names of the two tensors with all experts, and of the router.
_GRANITE = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
}


def spelled_as_ours(name: str) -> str:
    """Our name of a tensor in Mixtral's first spelling or in GraniteMoE's; others unchanged."""
    for theirs, ours in _GRANITE.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    found = _FIRST_SPELLING.fullmatch(name)
    if found is None:
        return name
    path, expert, part, ending = found.groups()
    return f"{path}mlp.{expert or ''}{_MIXTRAL.get(part, part)}{ending}"


def first_spelling(name: str) -> str:
    """Mixtral's first spelling of a tensor's name, if it has one, else the name."""
    found = _OURS.fullmatch(name)
    if found is None:
        return name
    path, expert, part, router, ending = found.groups()
    if expert is None:
        return f"{path}block_sparse_moe.{router}{ending}"
    theirs = next(theirs for theirs, ours in _MIXTRAL.items() if ours == f"{part}_proj")
    return f"{path}block_sparse_moe.{expert}{theirs}{ending}"


@dataclass(frozen=True, slots=True)
class JoinedPart:
    """One expert's matrix or bias inside ``whole``: the ``part``-th of ``parts`` in its rows.

    ``interleaved``: its rows alternate with those of the other parts.
    """

    whole: str
    expert: int
    part: int
    parts: int
    interleaved: bool

    def rows(self, total: int) -> tuple[int, int, int]:
        """First row, number of rows and step, if every expert has ``total`` rows."""
        count = total // self.parts
        begin = self.expert * total
        if self.interleaved:
            return begin + self.part, count, self.parts
        return begin + self.part * count, count, 1

    def of(self, values: Tensor) -> Tensor:
        """The rows among one expert's."""
        if self.interleaved:
            return values[self.part :: self.parts]
        count = len(values) // self.parts
        return values[self.part * count : (self.part + 1) * count]


def joined_part(name: str, config: Mapping[str, Any]) -> JoinedPart | None:
    """Where ``name`` is if the experts are joined; None for tensors that are not an expert's."""
    found = _ONE.fullmatch(name)
    if found is None:
        return None
    path, expert, part, bias = found.groups()
    suffix = "_bias" if bias else ""
    if part == "down":
        return JoinedPart(f"{path}.down_proj{suffix}", int(expert), 0, 1, False)
    known = architecture(config.get("model_type"))
    interleaved = known is not None and known.tensors.gate_up_interleaved
    at = ("gate", "up").index(part)
    return JoinedPart(f"{path}.gate_up_proj{suffix}", int(expert), at, 2, interleaved)
