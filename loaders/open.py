"""Opens a model, whatever it is: a GGUF file, a folder, one safetensors file, or a hub id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.loaders.gguf_config import build_config
from sdk.loaders.gguf_reader import read_gguf
from sdk.loaders.hub import download, is_hub_id
from sdk.loaders.other_kinds import PICKLES, check_adapter, no_model
from sdk.quant.checkpoint import Checkpoint, TensorEntry
from sdk.quant.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from sdk.loaders.hf_folder import HfFolder


def open_checkpoint(
    model: str | Path,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    download_dir: str | None = None,
) -> Checkpoint:
    """Open a model from its headers; weights are read when they are pulled.

    Args:
        model: a ``.gguf`` file (the first one of a split model), a folder with ``config.json`` and
            safetensors files (or Mistral's params.json, or one GGUF model), a ``.safetensors`` file
            beside its ``config.json``, or, when no such path exists, a hub id ``org/name``.
        revision: branch, tag or commit of a hub id.
        local_files_only: never download.
        download_dir: the cache for what is downloaded; default: the hub's own.

    Raises:
        CheckpointError: what is there is damaged, incomplete or missing.
        UnsupportedError: it is sound but holds something that is not run.
    """
    path = _located(model, revision, local_files_only, download_dir)
    file = _gguf_at(path)
    if file is None:
        return _hf_folder(path)
    from sdk.loaders.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(file)


@dataclass(frozen=True, slots=True)
class Headers:
    """What the headers of a model say; see :class:`sdk.quant.checkpoint.Checkpoint`."""

    path: Path
    format: str
    config: Mapping[str, Any]
    entries: Sequence[TensorEntry]
    kv_scales: Mapping[str, float]


def read_headers(model: str | Path) -> Headers:
    """What :func:`open_checkpoint` finds in the headers; of a GGUF file without importing torch.

    Raises:
        CheckpointError: as there.
        UnsupportedError: as there.
    """
    path = _located(model, None, False)
    file = _gguf_at(path)
    if file is not None:
        gguf = read_gguf(file)
        return Headers(file, "gguf", build_config(gguf), gguf.entries(), {})
    folder = _hf_folder(path)
    try:
        return Headers(
            folder.path, folder.format, folder.config, folder.entries(), folder.kv_scales
        )
    finally:
        folder.close()


def _located(
    model: str | Path,
    revision: str | None,
    local_files_only: bool,
    download_dir: str | None = None,
) -> Path:
    """A file or folder that exists, downloaded where ``model`` is a hub id."""
    path = Path(model).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # a NUL in the name, a name too long
        raise CheckpointError(f"{str(model)[:200]!r}: not a usable path: {error}") from None
    if exists:
        return path
    if isinstance(model, str) and is_hub_id(model):
        return download(model, revision, local_files_only, download_dir)
    raise CheckpointError(f"{path}: no such file or folder")


def _gguf_at(path: Path) -> Path | None:
    """The GGUF file that a path is or holds; None where safetensors files are to be read."""
    if not path.is_dir():
        if path.suffix in PICKLES:
            raise UnsupportedError(
                f"{path}: a pickle, which can run any code when read, is not opened; open a folder "
                "with config.json and safetensors files (save_pretrained writes one) or a GGUF file"
            )
        return None if path.suffix == ".safetensors" else path
    check_adapter(path)
    if any((path / name).is_file() for name in ("config.json", "params.json")) and (
        not (path / "model_index.json").is_file()  # diffusers' pipelines may hold both
    ):
        return None
    models = sorted(path.glob("*.gguf"))
    first = [model for model in models if "-of-" not in model.name or "-00001-of-" in model.name]
    if len(first) == 1:
        return first[0]
    if first:
        names = ", ".join(model.name for model in first[:5])
        raise CheckpointError(f"{path}: several GGUF models in it, name one: {names}")
    raise no_model(path)


def _hf_folder(path: Path) -> HfFolder:
    from sdk.loaders.hf_folder import HfFolder  # five modules that a GGUF file does not need

    if path.is_dir():
        return HfFolder(path)
    if not any((path.parent / name).is_file() for name in ("config.json", "params.json")):
        check_adapter(path.parent)
        raise CheckpointError(
            f"{path}: the weights of a model without its config.json, which must lie beside it; "
            "download the whole folder"
        )
    return HfFolder(path.parent, path)
