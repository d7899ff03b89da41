"""Models named by their id on the Hugging Face hub (``org/name``): downloaded once, then local."""

from __future__ import annotations

import re
from pathlib import Path

from sdk.quant.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
#: Everything but weights in other formats; no code (.py) and no pickles.
_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def is_hub_id(name: str) -> bool:
    """Whether ``name`` can be a hub id: one slash between two names, and no model file's ending."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith((".gguf", ".safetensors"))


def download(
    name: str, revision: str | None, local_files_only: bool, folder: str | None = None
) -> Path:
    """The local folder of a hub model, downloaded when it is not there yet: into the hub's own
    cache, or into one in ``folder``.

    Raises:
        CheckpointError: no connection, no such model, not in the cache with ``local_files_only``,
            or a repository without a config (of GGUF files, say).
    """
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=folder,
            local_files_only=local_files_only,
            allow_patterns=_PATTERNS,
            ignore_patterns=["original/*", "consolidated*", "*/*"],
        )
    except Exception as error:  # the hub's own, requests', httpx' and OS errors
        wanted = "in the local cache" if local_files_only else "on the hub"
        raise CheckpointError(
            f"{name}: not a local path, and not found {wanted}: {type(error).__name__}: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else 'no details'}"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(
            f"{name}: no config.json in it. Of a GGUF model download one file "
            f"(`hf download {name} FILE.gguf --local-dir .`) and open that"
        )
    return Path(folder)
