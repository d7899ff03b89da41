"""Downloads one file of a hub repository to the hub's own cache.

Small files are left to ``hf_hub_download``. It does not resume interrupted downloads, so large
files are written to the cache's ``blobs`` here, continuing where the last call ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sdk.kernels.dataclass import dataclass

#: Files of at least this size are resumed.
_LARGE = 4 << 20
_CHUNK = 1 << 20
#: Attempts without a single new byte before giving up.
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository at one commit, and its size in bytes."""

    repo: str
    name: str
    commit: str
    size: int


def fetch_file(file: RemoteFile, cache: Path, advance: Callable[[int], None]) -> Path:
    """The file's path in ``cache``; ``advance(count)`` is called for bytes downloaded."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.utils import tqdm

    named: dict[str, Any] = {
        "repo_id": file.repo,
        "filename": file.name,
        "revision": file.commit,
        "cache_dir": cache,
    }
    cached = try_to_load_from_cache(**named)
    if isinstance(cached, str):
        return Path(cached)
    by_range = _LARGE <= file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE
    if by_range:
        _fill_blob(file, cache, advance)

    class Silent(tqdm):  # type: ignore[misc]
        """A silent replacement of the hub library's progress bar."""

        monitor_interval = 0  # no thread

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    local = Path(hf_hub_download(**named, tqdm_class=Silent))
    if not by_range:
        advance(file.size)
    return local


def _fill_blob(remote: RemoteFile, cache: Path, advance: Callable[[int], None]) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import WeakFileLock

    url = hf_hub_url(remote.repo, remote.name, revision=remote.commit)
    found = get_hf_file_metadata(url)
    if found.etag is None or found.size is None:
        return  # hf_hub_download reports what is wrong
    home = f"models--{remote.repo.replace('/', '--')}"
    blob = cache / home / "blobs" / found.etag
    lock = cache / ".locks" / home / f"{found.etag}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(f"{blob.name}.embedlm.incomplete")
    with WeakFileLock(lock):
        if blob.exists():
            advance(found.size)
            return
        partial.touch()
        with partial.open("r+b") as file:
            advance(file.seek(0, 2))
            for offset, chunk in _chunks(url, file.tell(), found.size):
                if offset != file.tell():
                    advance(offset - file.tell())
                    file.seek(offset)
                    file.truncate()
                file.write(chunk)
                advance(len(chunk))
        partial.replace(blob)


def _chunks(url: str, offset: int, size: int) -> Iterator[tuple[int, bytes]]:
    """The file from ``offset`` on, reconnecting if needed; from 0 if the server sends all of it."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    attempts = 0
    while offset < size:
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        headers["Range"] = f"bytes={offset}-"
        try:
            with get_session().stream(
                "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
            ) as response:
                hf_raise_for_status(response)
                offset = offset if response.status_code == 206 else 0
                for chunk in response.iter_bytes(_CHUNK):
                    yield offset, chunk
                    offset += len(chunk)
                    attempts = 0
        except OSError:  # from the hub (its errors are OSErrors) or the file system
            raise
        except Exception:  # from whichever HTTP library is in use
            if attempts >= _ATTEMPTS:
                raise
        attempts += 1
        if offset < size:
            if attempts > _ATTEMPTS:
                raise ConnectionError(f"{url}: ended after {offset} of {size} bytes")
            time.sleep(min(0.5 * attempts, 2))
