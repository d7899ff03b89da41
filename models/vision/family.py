"""How the project describes a family of vision models, and where it finds the descriptions.

Every family has a module in ``models/vision`` with a constant ``FAMILY``: what its config says, the
names of its tensors and its projector. :mod:`sdk.models.vision.tower` builds the encoder from them.

torch is not imported, as in :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sdk.models.architecture import LayerRules
from sdk.models.config_fields import Fields, without_null
from sdk.quant.checkpoint import VISION_ROOT

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.models.layers import Source
    from sdk.models.vision.config import VisionConfig

#: What a config has beside its text part and its vision part: the keys of the whole model.
WHOLE = "multimodal_config"
VISION = "vision_config"
#: A key of the former: what the folder says of preprocessing.
PROCESSOR = "image_processor"


class Projector(Protocol):
    """Makes tokens of text of what a tower computes."""

    def __call__(self, x: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """x float32 ``[patches, width]`` of tiles with ``shapes`` (rows and columns of patches),
        one after the other -> float32 ``[tokens, hidden]``."""


class VisionNames(NamedTuple):
    """The names of a family's tensors in a folder.

    ``tower``: what those of the tower begin with, ``projector``: those after it; several spellings.
    ``layers``: what comes before the number of a layer. ``whole``: names of the tower, of the
    projector (``projector.…``), and ``layer``: inside a layer, ours to the file's.
    ``turned``: our names of matrices that the file has as ``[in, out]``.
    """

    tower: tuple[str, ...]
    projector: tuple[str, ...]
    layers: str
    whole: Mapping[str, str]
    layer: Mapping[str, str]
    turned: tuple[str, ...] = ()

    def ours(self, name: str, layers: int) -> str | None:
        """Our name of a folder's tensor; ``None``: it is not one that the tower uses. ``layers``:
        how many of them run."""
        inside = name.removeprefix("model.")
        found = next((p for p in (*self.tower, *self.projector) if inside.startswith(p)), None)
        if found is None:
            return None
        rest = inside.removeprefix(found)
        of_projector = found in self.projector
        number = re.fullmatch(rf"{re.escape(self.layers)}\.(\d{{1,4}})\.(.+)", rest)
        if number is not None and not of_projector:
            if int(number[1]) >= layers:
                return None
            own = _renamed(number[2], self.layer)
            return own and f"{VISION_ROOT}layers.{number[1]}.{own}"
        names = {
            ours: theirs
            for ours, theirs in self.whole.items()
            if ours.startswith("projector.") == of_projector
        }
        own = _renamed(rest, names)
        return own and VISION_ROOT + own


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    for ours, theirs in names.items():
        if name == theirs:
            return ours
        if name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return None


class Family(NamedTuple):
    """A family of vision models.

    ``layer``: what the layers of its tower compute. ``read(whole, vision, hidden)``: its config,
    from the keys of the whole model and those of the vision part; ``hidden``: of the text.
    ``projector(source, config)``: built from ``model.projector.…``.
    ``norm_before``, ``norm_after``: the tower has a norm before its first layer
    (``model.norm_before``) or after its last one (``model.norm``).
    """

    model_types: tuple[str, ...]
    layer: LayerRules
    names: VisionNames
    read: Callable[[Fields, Fields, int], VisionConfig]
    projector: Callable[[Source, VisionConfig], Projector]
    norm_before: bool = False
    norm_after: bool = False


#: The modules of families, by the ``model_type`` of the whole model.
FAMILIES: Mapping[str, str] = MappingProxyType({"gemma3": "gemma3"})


def family(model_type: object) -> Family | None:
    """The family of the vision model with this type; ``None``: its images are not supported."""
    module = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if module is None:
        return None
    found: Family = import_module(f"sdk.models.vision.{module}").FAMILY
    return found


def vision_of(config: Mapping[str, Any]) -> VisionConfig | None:
    """The vision part of a checkpoint's config or of a config.json; ``None``: it has none, or one
    that is not supported.

    :raises CheckpointError: names the field, what was expected and what was found.
    """
    whole, vision = config.get(WHOLE, config), config.get(VISION)
    if not isinstance(whole, Mapping) or not isinstance(vision, Mapping):
        return None
    own = family(whole.get("model_type"))
    if own is None:
        return None
    text = config.get("text_config", config)
    hidden = Fields(text).count("hidden_size", 1 << 20)
    facts = Fields(without_null(vision), "config: vision_config")
    found = own.read(Fields(without_null(whole)), facts, hidden)
    return _with_colors(found, whole.get(PROCESSOR) or {})


def _with_colors(config: VisionConfig, processor: Mapping[str, Any]) -> VisionConfig:
    """With what a processor does to the numbers of pixels."""
    from sdk.models.vision.config import color

    fields = Fields(without_null(processor), "preprocessor_config.json")
    scale = fields.positive("rescale_factor", default=config.scale)
    mean, std = color(fields, "image_mean", config.mean), color(fields, "image_std", config.std)
    if not fields.flag("do_rescale", default=True):
        scale = 1.0
    if not fields.flag("do_normalize", default=True):
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return replace(config, scale=scale, mean=mean, std=std)
