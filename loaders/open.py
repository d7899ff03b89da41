"""Opens a model, whatever it is: a GGUF file, a folder, one safetensors file, or a hub id."""

from __future__ import annotations

from pathlib import Path

from sdk.loaders.gguf_checkpoint import GgufCheckpoint
from sdk.loaders.hub import download, is_hub_id
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_checkpoint(
    model: str | Path, *, revision: str | None = None, local_files_only: bool = False
) -> Checkpoint:
    """Open a model from its headers; weights are read when they are pulled.

    Args:
        model: a ``.gguf`` file (the first one of a split model), a folder with ``config.json`` and
            safetensors files (or with one GGUF model), a ``.safetensors`` file beside its
            ``config.json``, or, when no such path exists, a hub id ``org/name``.
        revision: branch, tag or commit of a hub id.
        local_files_only: never download.

    Raises:
        CheckpointError: what is there is damaged, incomplete or missing.
        UnsupportedError: it is sound but holds something that is not run.
    """
    path = Path(model).expanduser()
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:  # a NUL in the name, a name too long
        raise CheckpointError(f"{str(model)[:200]!r}: not a usable path: {error}") from None
    if not exists and isinstance(model, str) and is_hub_id(model):
        path, is_folder = download(model, revision, local_files_only), True
    elif not exists:
        raise CheckpointError(f"{path}: no such file or folder")
    return _open_folder(path) if is_folder else _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == ".safetensors":
        return _hf_folder(path.parent, path)
    if path.suffix in _PICKLES:
        raise UnsupportedError(
            f"{path}: a pickle, which can run any code when read, is not opened; open a folder "
            "with config.json and safetensors files (save_pretrained writes one) or a GGUF file"
        )
    return GgufCheckpoint(path)


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / "config.json").is_file():
        return _hf_folder(folder)
    models = sorted(folder.glob("*.gguf"))
    first = [path for path in models if "-of-" not in path.name or "-00001-of-" in path.name]
    if len(first) == 1:
        return GgufCheckpoint(first[0])
    if first:
        names = ", ".join(path.name for path in first[:5])
        raise CheckpointError(f"{folder}: several GGUF models in it, name one: {names}")
    raise CheckpointError(f"{folder}: neither config.json nor a .gguf file in it")


def _hf_folder(folder: Path, file: Path | None = None) -> Checkpoint:
    from sdk.loaders.hf_folder import HfFolder  # five modules that a GGUF file does not need

    return HfFolder(folder, file)
