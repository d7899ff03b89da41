"""Which files of a model folder may be read.

The contents of a folder's text files may end up in a prompt or a message, so a link in a downloaded
folder must not expose a private file. Links that lead out of the folder are rejected, except in the
Hugging Face hub's cache, whose snapshots are folders of links to ``../../blobs``. Weights may also
be links to ``.safetensors`` files elsewhere: people link shards from other disks, and numbers leak
no text.
"""

from __future__ import annotations

from pathlib import Path

from sdk.quant.errors import CheckpointError


def folder_file(folder: Path, name: str) -> Path | None:
    """The file ``name`` of a model folder; None if there is none.

    Raises:
        CheckpointError: it is a link that leads out of the folder.
    """
    path = folder / name
    if not path.is_file():
        return None
    target = _outside(path, folder)
    if target is not None:
        raise _refused(path, target)
    return path


def weight_file(folder: Path, name: str) -> Path:
    """The same for a file of weights, which may be a link to such a file elsewhere."""
    path = folder / name
    target = _outside(path, folder)
    if target is not None and target.suffix != ".safetensors":
        raise _refused(path, target)
    return path


def _outside(path: Path, folder: Path) -> Path | None:
    """The target of a link that leads out of its folder, else None."""
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # a link to itself, before Python 3.13
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    blobs = home.parent.parent / "blobs"
    in_cache = home.parent.name == "snapshots" and target.is_relative_to(blobs)
    return None if target.is_relative_to(home) or in_cache else target


def _refused(path: Path, target: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: a link to {target}, outside its folder; put the file itself there"
    )
