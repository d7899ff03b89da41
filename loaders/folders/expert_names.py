"""How a Hugging Face folder names a mixture of experts, and where single experts' matrices are.

Our name of one is ``model.layers.0.mlp.experts.3.gate_proj``. Files have a tensor of that name, or
of Mixtral's first spelling of it (``block_sparse_moe.experts.3.w1``, by llm-compressor 0.14
``block_sparse_moe.experts.3.gate_proj``), or one tensor with all experts of a layer, gate above up:
``mlp.experts.gate_up_proj [E, 2I, H]``. Some architectures store it transposed (``[E, H, 2I]``)
unless it is packed, or with alternating rows of gate and up: see
:class:`~sdk.models.architecture.TensorRules`.

Around them every model has names of its own. Ours are ``mlp.gate`` for the router,
``mlp.gate.e_score_correction_bias`` for its bias of the choice, ``mlp.shared_experts`` for the MLP
of all tokens, and ``mlp.shared_expert_gate``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdk.kernels.lazy_torch import Tensor
from sdk.models.architecture import architecture

_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
#: Of an expert, theirs to ours: Mixtral's and SmallThinker's.
_PARTS = {**_MIXTRAL, "gate": "gate_proj", "down": "down_proj", "up": "up_proj"}
_BLOCK = re.compile(r"(.+?\.)(mlp|block_sparse_moe|shared_mlp)\.(.+)")
_FIRST_PART = re.compile(r"(experts\.\d+\.)(w[123]|gate|down|up)\b(.*)")
_OURS = re.compile(r"(.+\.)mlp\.(?:(experts\.\d+\.)(gate|up|down)_proj|(gate))\b(.*)")
_ONE = re.compile(r"(.+\.experts)\.(\d{1,4})\.(gate|up|down)_proj(\.bias)?")
_BIAS = "gate.e_score_correction_bias"
#: Names inside a block, theirs to ours. GraniteMoE has two tensors with all experts.
_WHOLE = {
    "input_linear.weight": "experts.gate_up_proj",
    "output_linear.weight": "experts.down_proj",
    **dict.fromkeys(
        (
            *("e_score_correction_bias", "expert_bias", "gate.expert_bias"),
            "experts.e_score_correction_bias",
            *(f"{path}moe_statics.e_score_correction_bias" for path in ("", "gate.")),
        ),
        _BIAS,
    ),
}
#: Beginnings of names.
_BEGINNINGS = {
    "shared_mlp.input_linear.": "shared_experts.gate_up_proj.",
    "shared_mlp.output_linear.": "shared_experts.down_proj.",
    "shared_mlp.": "shared_experts.",
    "shared_expert.": "shared_experts.",
    "router.layer.": "gate.",  # GraniteMoE's
    "router.gate.": "gate.",  # AFMoE's and Hy3's
    "gate.wg.": "gate.",  # Hunyuan's
    "primary_router.": "gate.",  # SmallThinker's
}


def spelled_as_ours(name: str) -> str:
    """Our name of a tensor of a mixture of experts; others unchanged."""
    found = _BLOCK.fullmatch(name)
    if found is None:
        return name
    path, block, part = found.groups()
    if block == "shared_mlp":
        part = f"shared_mlp.{part}"
    if part in _WHOLE and (block == "block_sparse_moe" or _WHOLE[part] == _BIAS):
        return f"{path}mlp.{_WHOLE[part]}"
    for theirs, ours in _BEGINNINGS.items():
        if f"{part}.".startswith(theirs):  # of a tensor, or the module itself
            return f"{path}mlp.{ours}{f'{part}.'.removeprefix(theirs)}".removesuffix(".")
    if block == "block_sparse_moe" and part.startswith("router."):
        part = f"gate.{part.removeprefix('router.')}"
    first = _FIRST_PART.fullmatch(part)
    if first is not None:
        part = f"{first[1]}{_PARTS[first[2]]}{first[3]}"
    return f"{path}mlp.{part}"


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
    known = architecture(config.get("model_type"))
    apart = known is not None and (
        known.tensors.experts_by_rows or known.tensors.experts_apart or not known.layer.gated
    )
    if part == "down" or apart:
        return JoinedPart(f"{path}.{part}_proj{suffix}", int(expert), 0, 1, False)
    interleaved = known is not None and known.tensors.gate_up_interleaved
    at = ("gate", "up").index(part)
    return JoinedPart(f"{path}.gate_up_proj{suffix}", int(expert), at, 2, interleaved)
