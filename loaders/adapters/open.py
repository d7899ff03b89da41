"""Opens an adapter: a folder of PEFT, a GGUF file of llama.cpp, or a hub id of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sdk.loaders.adapters.adapter_file import AdapterFile
from sdk.loaders.adapters.gguf_adapter import open_gguf_adapter
from sdk.loaders.adapters.peft_folder import PICKLE, WEIGHTS, open_peft_folder
from sdk.loaders.adapters.token_types import EMBEDDING, TYPES, in_the_embedding, with_one_type
from sdk.loaders.hub.hub import HubAccess, HubModel, check_no_url, download, parse_hub_id
from sdk.loaders.open import existing_path
from sdk.loaders.other_kinds import ADAPTER_CONFIG
from sdk.quant.errors import CheckpointError, UnsupportedError


def open_adapter(
    path: Path,
    config: Mapping[str, Any],
    matrices: Mapping[str, tuple[int, int]],
    scale: float = 1.0,
) -> AdapterFile:
    """Open an existing adapter for a model; only headers are read. ``scale`` multiplies it.

    ``config``: the model's, with Hugging Face's names. ``matrices``: those that an adapter may
    change, with their shapes (``ModelAdapters.matrices``).

    :raises CheckpointError: it is damaged, no adapter, or was made for another model.
    :raises UnsupportedError: it holds something that is not supported; names it.
    """
    known = with_one_type(config, matrices)
    found = _opened(path, config, known, scale)
    if TYPES in known:
        found.matrices = in_the_embedding(found.matrices, matrices[EMBEDDING][0])
    return found


def _opened(
    path: Path,
    config: Mapping[str, Any],
    matrices: Mapping[str, tuple[int, int]],
    scale: float,
) -> AdapterFile:
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if not (path / ADAPTER_CONFIG).is_file() and len(found) == 1:
            return open_gguf_adapter(found[0], config, matrices, scale)
        return open_peft_folder(path, config, matrices, scale)
    if path.suffix == ".safetensors" and path.name == WEIGHTS:
        return open_peft_folder(path.parent, config, matrices, scale)
    if path.suffix == ".gguf":
        return open_gguf_adapter(path, config, matrices, scale)
    raise UnsupportedError(
        f"{path}: expected a LoRA adapter: a folder with {ADAPTER_CONFIG} and {WEIGHTS}, or a "
        ".gguf file"
    )


def locate_adapter(name: str | Path, hub: HubAccess) -> Path:
    """The path of an adapter, downloaded if ``name`` is a hub id.

    :raises CheckpointError: it exists neither here nor on the hub.
    """
    path = existing_path(name)
    if path is not None:
        return path
    if not isinstance(name, str):
        raise CheckpointError(f"{name}: no such file or folder")
    check_no_url(name)
    found = parse_hub_id(name)
    if found is None or found.tag is not None:
        raise CheckpointError(f"{name}: no such file or folder")
    return download(found, hub, _choose)


def _choose(model: HubModel, names: Sequence[str], fetch: Callable[[Sequence[str]], Path]) -> Path:
    """Fetch the files of an adapter's repository that are needed."""
    if ADAPTER_CONFIG in names and WEIGHTS in names:
        return fetch([ADAPTER_CONFIG, WEIGHTS])
    gguf = [name for name in names if name.endswith(".gguf") and "/" not in name]
    if ADAPTER_CONFIG not in names and len(gguf) == 1:
        return fetch(gguf) / gguf[0]
    found = ", ".join(names[:8]) or "nothing"
    if PICKLE in names:
        found = f"{PICKLE}, a pickle, which is not opened: load it with peft and save it again"
    raise CheckpointError(
        f"{model}: expected a LoRA adapter in it ({ADAPTER_CONFIG} and {WEIGHTS}), found {found}"
    )
