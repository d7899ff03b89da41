"""How the project describes a family of vision models, and where it finds the descriptions.

Every family has a module in ``models/vision`` with a constant ``FAMILY``: what its config says, the
names of its tensors and its projector. :mod:`sdk.models.vision.tower` builds the encoder from them.

torch is not imported, as in :mod:`sdk.models.architecture`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from sdk.models.architecture import LayerRules
from sdk.models.configs.fields import Fields, without_null
from sdk.quant.checkpoint import VISION_ROOT
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from sdk.models.vision.config import VisionConfig
    from sdk.models.vision.patches import Places
    from sdk.models.vision.positions import Array

#: What a config has beside its text part and its vision part: the keys of the whole model.
WHOLE = "multimodal_config"
VISION = "vision_config"
#: Among the metadata that rules for mmproj files read: the shape of each tensor by its name there.
SHAPES = "shapes of tensors"
#: A key of the former: what the folder says of preprocessing.
PROCESSOR = "image_processor"


class Projector(Protocol):
    """Makes tokens of text of what a tower computes."""

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 ``[patches, width]``, those of a token one after the other -> float32
        ``[tokens, hidden]``."""


@runtime_checkable
class Queries(Protocol):
    """Makes a fixed number of tokens of each tile (``VisionConfig.queries``)."""

    def of_tile(self, x: Tensor, where: Places) -> Iterator[Tensor | None]:
        """x float32 ``[patches, width]`` -> for each part of the work, before it, ``None``; then
        float32 ``[queries, hidden]``."""


class VisionNames(NamedTuple):
    """The names of a family's tensors in a folder.

    ``prefixes``: how names begin there, and how below; of several that fit the first one counts.
    ``layers``: what comes before the number of a layer. ``whole``: names outside layers, ``layer``:
    inside, ours to the file's. ``turned``: ours of matrices that the file has as ``[in, out]``.
    """

    prefixes: Mapping[str, str]
    layers: str
    whole: Mapping[str, str]
    layer: Mapping[str, str]
    turned: tuple[str, ...] = ()

    def ours(self, name: str, layers: int) -> str | None:
        """Our name of a folder's tensor; ``None``: it is not one that the tower uses. ``layers``:
        how many of them run."""
        inside = name.removeprefix("model.")
        found = next((one for one in self.prefixes if inside.startswith(one)), None)
        if found is None:
            return None
        short = self.prefixes[found] + inside.removeprefix(found)
        number = re.fullmatch(rf"{re.escape(self.layers)}\.(\d{{1,4}})\.(.+)", short)
        if number is None:
            own = _renamed(short, self.whole)
            return own and VISION_ROOT + own
        own = _renamed(number[2], self.layer) if int(number[1]) < layers else None
        return own and f"{VISION_ROOT}layers.{number[1]}.{own}"


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    for ours, theirs in names.items():
        if name == theirs:
            return ours
        if name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return None


def _nothing(keys: Fields) -> Mapping[str, Any]:
    return {}


class MmprojRules(NamedTuple):
    """How a GGUF file of llama.cpp ("mmproj") holds the tower of a family.

    ``projectors``: the values of ``clip.projector_type``. ``text``: the types of the text models.
    ``tokens``: what the token of an image is called in their vocabularies.
    ``config(common, keys, text)``: the vision part of a config and the keys of the whole model,
    from what the metadata say of all towers, ``clip.vision.…`` and the config of the text model.
    ``names(keys)``: of tensors outside layers, ours to the file's, besides those of all towers.
    ``processor(keys)``: keys of the image processor, besides mean and deviation of colors.
    ``gelu``: what ``clip.use_gelu`` means. ``turned``: see :class:`VisionNames`.
    ``interleaved_qk``: rows of q and k are interleaved so that rotary pairs are adjacent.
    ``layer``: of tensors inside layers, as ``names``.
    ``last``: the matrix whose rows are the features of a token, where ``projection_dim`` is
    something else. ``unused``: tensors that are computed here.
    """

    projectors: tuple[str, ...]
    text: tuple[str, ...]
    tokens: tuple[str, ...]
    config: Callable[
        [dict[str, Any], Fields, Mapping[str, Any]], tuple[dict[str, Any], dict[str, Any]]
    ]
    names: Callable[[Fields], Mapping[str, str]]
    processor: Callable[[Fields], Mapping[str, Any]] = _nothing
    gelu: str = "gelu_pytorch_tanh"
    turned: tuple[str, ...] = ()
    interleaved_qk: bool = False
    layer: Mapping[str, str] = MappingProxyType({})
    last: str | None = None
    unused: tuple[str, ...] = ()


class Family(NamedTuple):
    """A family of vision models.

    ``layer``: what the layers of its tower compute. ``read(whole, vision, text)``: its config,
    from the keys of the whole model, of the vision part and of the text part.
    ``projector(source, config)``: built from ``model.projector.…`` of a
    :class:`sdk.models.source.Source`. ``deepstack``: the same for
    what comes out of the layer ``config.deepstack[number]``.
    ``positions(config, table, places)``: what is added to patches, of the table
    ``model.positions``. ``frequencies(config)``: of the rotation of queries and keys, float32, and
    for each one whether it turns by the row (0) or the column (1), int32.
    ``mmproj``: ``None`` where GGUF files of the tower are not supported.
    ``norm_after``: the tower has a norm after its last layer (``model.norm``).
    ``of_images``: keys of the text part of a config that are about prompts with images alone.
    ``recentred``: the model itself doubles what its processor makes of a pixel and subtracts 1.
    """

    model_types: tuple[str, ...]
    layer: LayerRules
    names: VisionNames
    read: Callable[[Fields, Fields, Fields], VisionConfig]
    projector: Callable[..., Projector | Queries]
    deepstack: Callable[..., Projector] | None = None
    positions: Callable[[VisionConfig, Array, Places], Array] | None = None
    frequencies: Callable[[VisionConfig], tuple[Array, NDArray[np.int32]]] | None = None
    mmproj: MmprojRules | None = None
    norm_after: bool = False
    recentred: bool = False
    of_images: tuple[str, ...] = ()


#: The modules of families, by the ``model_type`` of the whole model.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "clip": "clip_dual",
        "gemma3": "gemma3",
        "gemma4": "gemma4",
        "idefics3": "idefics3",
        "internvl": "internvl",
        "lfm2_vl": "lfm2_vl",
        "llava": "llava",
        "llava_next": "llava_next",
        "llava_onevision": "llava_onevision",
        "minicpmv": "minicpmv",
        "minicpmv4_6": "minicpmv4_6",
        "mistral3": "pixtral",
        "paligemma": "paligemma",
        "qwen2_5_vl": "qwen2_5_vl",
        "qwen3_vl": "qwen3_vl",
        "qwen3_vl_moe": "qwen3_vl",
        "qwen3_5": "qwen3_vl",
        "qwen3_5_moe": "qwen3_vl",
        "siglip": "siglip_dual",
        "siglip2": "siglip2_dual",
        "smolvlm": "idefics3",
    }
)


#: The modules of families whose towers have another type than the others of the same
#: ``model_type``: by both types.
OTHER_TOWERS: Mapping[tuple[str, str], str] = MappingProxyType(
    {("llava", "pixtral"): "llava_pixtral"}
)

#: The type of the text model by the version in a config of MiniCPM-V, which does not name it.
MINICPMV_TEXTS: Mapping[str, str] = MappingProxyType(
    {"2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}
)


def family(model_type: object, tower: object = None) -> Family | None:
    """The family of the vision model with this type, whose tower has that one; ``None``: its images
    are not supported."""
    if not isinstance(model_type, str):
        return None
    own = FAMILIES.get(model_type)
    module = OTHER_TOWERS.get((model_type, tower), own) if isinstance(tower, str) else own
    return None if module is None else family_in(module)


def family_in(module: str) -> Family:
    """The family of a module of ``models/vision``."""
    found: Family = import_module(f"sdk.models.vision.{module}").FAMILY
    return found


def families() -> list[Family]:
    """All families."""
    modules = dict.fromkeys((*FAMILIES.values(), *OTHER_TOWERS.values()))  # each once, in order
    return [family_in(module) for module in modules]


def text_part(whole: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The text part of the config of a whole model, as a model of text alone has it."""
    own = family(whole.get("model_type"))
    left_out = () if own is None else own.of_images
    return {key: value for key, value in text.items() if key not in left_out}


def vision_of(config: Mapping[str, Any]) -> VisionConfig | None:
    """The vision part of a checkpoint's config or of a config.json; ``None``: it has none, or one
    that is not supported.

    :raises CheckpointError: names the field, what was expected and what was found.
    """
    whole, vision = config.get(WHOLE, config), config.get(VISION)
    if not isinstance(whole, Mapping) or not isinstance(vision, Mapping) or not vision:
        return None
    own = family(whole.get("model_type"), vision.get("model_type"))
    if own is None:
        return None
    text = config.get("text_config", config)
    facts = Fields(without_null(vision), "config: vision_config")
    found = own.read(Fields(without_null(whole)), facts, Fields(without_null(text)))
    if own.layer.gated and found.tower.activation_slope != 1.0:
        raise UnsupportedError(
            "config: vision_config: hidden_act: expected an activation without a slope, found "
            f"{facts.text('hidden_act')!r}: the MLP of {found.tower.model_type} has a gate"
        )
    return _with_colors(found, whole.get(PROCESSOR) or {}, recentred=own.recentred)


def _with_colors(
    config: VisionConfig, processor: Mapping[str, Any], *, recentred: bool
) -> VisionConfig:
    """With what a processor does to the numbers of pixels. ``recentred``: see :class:`Family`."""
    from sdk.models.vision.config import RAW, color

    fields = Fields(without_null(processor), "preprocessor_config.json")
    scale = fields.positive("rescale_factor", default=config.scale)
    mean, std = color(fields, "image_mean", config.mean), color(fields, "image_std", config.std)
    if not fields.flag("do_rescale", default=True):
        scale = 1.0
    if not fields.flag("do_normalize", default=True):
        mean, std = RAW
    if recentred:
        mean = (mean[0] + std[0] / 2, mean[1] + std[1] / 2, mean[2] + std[2] / 2)
        std = (std[0] / 2, std[1] / 2, std[2] / 2)
    return replace(config, scale=scale, mean=mean, std=std)
