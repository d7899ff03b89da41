"""The parts of a folder that belong to the images of a vision model: config, tensors, processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.loaders.folders.folder_file import folder_file
from sdk.loaders.folders.safetensors_reader import StoredTensor
from sdk.loaders.json_file import read_json
from sdk.models.vision.family import VISION, WHOLE, family, family_in, vision_of
from sdk.quant.checkpoint import VISION_ROOT

#: Files of preprocessing: of transformers 4, and of transformers 5, in which it is a part.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_MAX_PROCESSOR = 1 << 20


def parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the config of a vision model beside its text part; nothing if its images are
    not supported."""
    vision = config.get(VISION)
    if not isinstance(vision, Mapping) or family(config.get("model_type")) is None:
        return {}
    whole = {key: value for key, value in config.items() if key not in ("text_config", VISION)}
    return {VISION: vision, WHOLE: whole}


def processor_of(folder: Path) -> dict[str, Any]:
    """The keys of a folder's image processor; empty if it has none.

    :raises CheckpointError: a file cannot be read.
    """
    found: dict[str, Any] = {}
    for name in _PROCESSORS:
        path = folder_file(folder, name)
        if path is None:
            continue
        values = read_json(path, _MAX_PROCESSOR)
        own = values.pop("image_processor", None)
        found = {**found, **values, **(own if isinstance(own, dict) else {})}
    return found


def named(
    config: Mapping[str, Any], tensors: dict[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors with our names for those of the tower, and these names by the files'."""
    vision = vision_of(config)
    if vision is None:
        return tensors, {}
    own = family_in(vision.family)
    found, renamed = dict[str, StoredTensor](), dict[str, str]()
    for name, stored in tensors.items():
        ours = own.names.ours(stored.name, vision.tower.num_layers)
        if ours is not None:
            renamed[stored.name] = ours
        found[ours or name] = stored
    return found, renamed


def turned(config: Mapping[str, Any]) -> frozenset[str]:
    """Our names of the tower's matrices that files have as ``[in, out]``."""
    if WHOLE not in config:
        return frozenset()
    own = family(config[WHOLE]["model_type"], config[VISION].get("model_type"))
    return frozenset(() if own is None else (VISION_ROOT + name for name in own.names.turned))
