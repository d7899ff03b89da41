"""The options of an engine about images, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr

#: Gets a URL and returns the bytes of the file there: ``LLM(image_fetcher=...)``.
ImageFetcher: TypeAlias = Callable[[str], bytes]
#: Images of a prompt, as in vLLM.
MAX_IMAGES = 999


def image_options(limits: object, fetcher: object, folder: object) -> dict[str, Any]:
    """The canonical values of ``limit_mm_per_prompt``, ``image_fetcher`` and
    ``allowed_local_media_path``, as far as they are given.

    :raises RequestError: one is invalid.
    """
    made: dict[str, Any] = {}
    if limits is not None:
        made["limit_mm_per_prompt"] = _limits(limits)
    if fetcher is not None and not callable(fetcher):
        raise RequestError(
            "image_fetcher: expected a function from a URL to bytes, such as "
            f"sdk.ImageHosts([...]), found {safe_repr(fetcher)}"
        )
    if folder is None:
        made["allowed_local_media_path"] = ""
    elif folder != "":
        if not isinstance(folder, str | os.PathLike) or not Path(folder).is_dir():
            raise RequestError(
                f"allowed_local_media_path: expected a folder, found {safe_repr(folder)}"
            )
        made["allowed_local_media_path"] = str(Path(folder).resolve())
    return made


def _limits(given: object) -> dict[str, int]:
    shown = "limit_mm_per_prompt: expected {'image': N}, the images of a prompt"
    if not isinstance(given, Mapping) or set(given) - {"image", "video", "audio"}:
        raise RequestError(f"{shown}, found {safe_repr(given)}")
    for name, count in given.items():
        high = MAX_IMAGES if name == "image" else 0  # neither videos nor sounds are read
        number = isinstance(count, int) and not isinstance(count, bool)
        if not number or not 0 <= count <= high:
            raise RequestError(
                f"{shown}; expected {name} to be an integer in 0..{high}, found {safe_repr(count)}"
            )
    return dict(given)
