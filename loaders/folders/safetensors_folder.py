"""Selects the safetensors files of a folder: those of the index, else the only one."""

from __future__ import annotations

import logging
from pathlib import Path

from sdk.loaders.folders.folder_file import weight_file
from sdk.loaders.folders.safetensors_reader import SafetensorsFiles, read_index
from sdk.loaders.other_kinds import no_model
from sdk.quant.errors import CheckpointError

logger = logging.getLogger("sdk")

INDEX_ENDING = ".safetensors.index.json"
INDEX_NAME = f"model{INDEX_ENDING}"
SINGLE_NAME = "model.safetensors"


def open_weights(folder: Path, weights: Path | None = None) -> SafetensorsFiles:
    """The tensors of a folder, or of its file ``weights``.

    Raises:
        CheckpointError: there is no such file, or several without an index.
        UnsupportedError: the folder holds another kind of model.
    """
    if weights is not None:
        return SafetensorsFiles([weight_file(folder, weights.name)])
    index = _index(folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if index is not None:
        files = read_index(index, folder)
        listed = {tensor.file.path.name for tensor in files.tensors.values()}
        stale = [name for name in found if name not in listed]
        if stale:
            logger.warning(
                "%s: not listed in %s, ignored: %s", folder, index.name, ", ".join(stale)
            )
        return files
    if SINGLE_NAME in found:
        others = [name for name in found if name != SINGLE_NAME]
        if others:
            logger.warning("%s: %s is used, ignored: %s", folder, SINGLE_NAME, ", ".join(others))
        return SafetensorsFiles([weight_file(folder, SINGLE_NAME)])
    models = [name for name in found if not name.startswith("adapter_")]
    if len(models) == 1:
        return SafetensorsFiles([weight_file(folder, models[0])])
    if models:
        raise CheckpointError(
            f"{folder}: {len(models)} safetensors files ({', '.join(models[:3])}, ...) but no "
            f"{INDEX_NAME} that lists their tensors; download the index too"
        )
    raise no_model(folder)


def _index(folder: Path) -> Path | None:
    """The index of the shards; AutoGPTQ names it after the model's bits and group size."""
    if (folder / INDEX_NAME).is_file():
        return folder / INDEX_NAME
    others = list(folder.glob(f"*{INDEX_ENDING}"))
    return others[0] if len(others) == 1 else None
