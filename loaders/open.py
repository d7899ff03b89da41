"""Opens a model: a GGUF file, a folder, a safetensors file or a hub id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sdk.kernels.dataclass import dataclass
from sdk.loaders.gguf_files.config import build_config
from sdk.loaders.gguf_files.mmproj_files import is_mmproj
from sdk.loaders.gguf_files.reader import read_gguf
from sdk.loaders.hub.files import gguf_files
from sdk.loaders.hub.hub import (
    HubAccess,
    HubModel,
    Report,
    check_no_url,
    download,
    hint_at_hub,
    parse_hub_id,
)
from sdk.loaders.other_kinds import PICKLES, check_adapter, no_model
from sdk.quant.checkpoint import Checkpoint, TensorEntry
from sdk.quant.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from sdk.loaders.folders.hf_folder import HfFolder


def open_checkpoint(
    model: str | Path,
    *,
    filename: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    download_dir: str | None = None,
    on_download: Report = lambda done, total: None,
    pre_tokenizer: str | None = None,
    mmproj: str | Path | Literal[False] | None = None,
) -> Checkpoint:
    """Open a model by its headers; weights are read when they are pulled.

    Args:
        model: a ``.gguf`` file (the first one of a split model), a folder with ``config.json`` and
            safetensors files (or Mistral's params.json, or one GGUF model), a ``.safetensors`` file
            next to its ``config.json``, or, if no such path exists, a hub id ``org/name``, or
            ``org/name:Q4_K_M`` with the type of a GGUF file.
        filename: the GGUF file of a hub repository or folder; may be a pattern, ``*q4_k_m.gguf``.
        revision: branch, tag or commit of a hub id.
        local_files_only: never download.
        download_dir: the cache for downloads; default: the hub's own.
        on_download: called with bytes done and total bytes.
        pre_tokenizer: the word split of a GGUF file's tokenizer, instead of the one it names.
        mmproj: the GGUF file with the encoder of images of a GGUF file. Default: one beside it that
            fits, if there is any; ``False``: none.

    Raises:
        CheckpointError: the model is damaged, incomplete or missing.
        UnsupportedError: it is valid but holds something that is not supported.
    """
    hub = HubAccess(revision, local_files_only, download_dir, on_download)
    path = locate(model, filename, hub)
    file = _gguf_at(path)
    if file is None:
        if mmproj:
            raise UnsupportedError(
                f"mmproj: {mmproj}: expected with a GGUF file, found {path}: a folder has its own "
                "encoder of images"
            )
        return _hf_folder(path)
    images = None if mmproj is None or mmproj is False else _existing(mmproj)
    from sdk.loaders.gguf_files.checkpoint import GgufCheckpoint

    return GgufCheckpoint(file, pre_tokenizer, images, text_only=mmproj is False)


def _existing(mmproj: str | Path) -> Path:
    try:
        path = existing_path(mmproj)
    except CheckpointError as error:
        raise CheckpointError(f"mmproj: {error}") from None
    if path is None or path.is_dir():
        raise CheckpointError(f"mmproj: {mmproj}: expected a GGUF file, found none")
    return path


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of a model; see :class:`sdk.quant.checkpoint.Checkpoint`."""

    path: Path
    format: str
    config: Mapping[str, Any]
    entries: Sequence[TensorEntry]
    kv_scales: Mapping[str, float]


def read_headers(model: str | Path, on_download: Report = lambda done, total: None) -> Headers:
    """The headers that :func:`open_checkpoint` reads; for GGUF files without importing torch.

    Raises:
        CheckpointError: as there.
        UnsupportedError: as there.
    """
    path = locate(model, hub=HubAccess(report=on_download))
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


def locate(model: str | Path, filename: str | None = None, hub: HubAccess | None = None) -> Path:
    """The path of an existing file or folder, downloaded if ``model`` is a hub id.

    Raises:
        CheckpointError: it exists neither here nor on the hub; see :func:`open_checkpoint`.
    """
    path = existing_path(model)
    if path is not None:
        if filename is not None and not path.is_dir():
            raise CheckpointError(f"{path}: filename={filename!r} with a file; leave it out")
        return path if filename is None else _in_folder(path, filename)
    found = _hub_id(model)
    if filename is not None:
        if found.tag is not None:
            raise CheckpointError(f"{model}: filename={filename!r} with a type; give one of them")
        found = replace(found, filename=filename)
    return download(found, hub or HubAccess())


def check_there(model: str | Path) -> None:
    """Check that a file or folder holds a model, by its headers. Of a hub id only the form is
    checked.

    Raises:
        CheckpointError: it is missing, empty, damaged or cannot be read.
        UnsupportedError: it holds something that is not supported.
    """
    path = existing_path(model)
    if path is None:
        _hub_id(model)
        return
    file = _gguf_at(path)
    (_hf_folder(path) if file is None else read_gguf(file)).close()


def _hub_id(model: str | Path) -> HubModel:
    """The hub model that a name means. :raises CheckpointError: nothing can have this name."""
    if not isinstance(model, str):
        raise CheckpointError(f"{model}: no such file or folder")
    check_no_url(model)
    found = parse_hub_id(model)
    if found is None:
        raise CheckpointError(f"{model}: no such file or folder{hint_at_hub(model)}")
    return found


def is_remote(model: str | Path) -> bool:
    """Whether opening it may access the hub."""
    return (
        isinstance(model, str) and existing_path(model) is None and parse_hub_id(model) is not None
    )


def existing_path(model: str | Path) -> Path | None:
    """The path if it exists. :raises CheckpointError: no path can have this name."""
    if model == "":  # to Path it is the working directory
        raise CheckpointError("model: expected a path or a hub id, found '' (an unset variable?)")
    path = Path(model).expanduser()
    try:
        return path if path.exists() else None
    except (OSError, ValueError) as error:  # a NUL in the name, a name too long
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{str(model)[:200]!r}: expected a usable path: {reason}") from None


def _in_folder(folder: Path, filename: str) -> Path:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    return folder / gguf_files(str(folder), names, None, filename)[0]


def _gguf_at(path: Path) -> Path | None:
    """The GGUF file that a path is or contains; None if it has safetensors files to read."""
    if not path.is_dir():
        if path.suffix in PICKLES:
            raise UnsupportedError(
                f"{path}: pickles are not supported, because they can run any code; open a folder "
                "with config.json and safetensors files (save_pretrained writes one) or a GGUF file"
            )
        return None if path.suffix == ".safetensors" else path
    check_adapter(path)
    if any((path / name).is_file() for name in ("config.json", "params.json")) and (
        not (path / "model_index.json").is_file()  # diffusers' pipelines may hold both
    ):
        return None
    models = sorted(model for model in path.glob("*.gguf") if not is_mmproj(model))
    first = [model for model in models if "-of-" not in model.name or "-00001-of-" in model.name]
    if len(first) == 1:
        return first[0]
    if first:
        names = ", ".join(model.name for model in first[:5])
        raise CheckpointError(f"{path}: several GGUF models in it; name one: {names}")
    raise no_model(path)


def _hf_folder(path: Path) -> HfFolder:
    from sdk.loaders.folders.hf_folder import (
        HfFolder,  # five modules that a GGUF file does not need
    )

    if path.is_dir():
        return HfFolder(path)
    if not any((path.parent / name).is_file() for name in ("config.json", "params.json")):
        check_adapter(path.parent)
        raise CheckpointError(
            f"{path}: expected config.json next to the weights, found none; "
            "download the whole folder"
        )
    return HfFolder(path.parent, path)
