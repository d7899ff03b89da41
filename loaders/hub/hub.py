"""Models on the Hugging Face hub, ``org/name`` or ``org/name:Q4_K_M``, downloaded once."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from sdk.kernels.dataclass import dataclass
from sdk.kernels.packages import package
from sdk.loaders.hub.files import gguf_files, has_gguf, small_files, weight_files
from sdk.quant.errors import CheckpointError, SdkError

logger = logging.getLogger("sdk")
#: ``(done, total)`` in bytes.
Report = Callable[[int, int], None]

_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_REFERENCE = re.compile(rf"({_NAME}/{_NAME})(?::([\w.-]+))?")
_FILE_IN_REPO = re.compile(rf"({_NAME}/{_NAME})/(.+\.gguf)")
_URL = re.compile(r"([a-z][a-z0-9+.-]*://|hf\.co/|huggingface\.co/|www\.huggingface\.co/)", re.I)
_HUB_URL = re.compile(
    rf"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/({_NAME}/{_NAME})"
    r"(?::([\w.-]+))?(?:/(?:resolve|blob|raw|tree)/([^/?#]+)(?:/([^?#]+))?)?/?(?:[?#].*)?"
)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository, and in ``tag`` the type of a GGUF file in it (``Q4_K_M``) or None."""

    repo: str
    tag: str | None = None
    filename: str | None = None

    def __str__(self) -> str:
        return self.repo if self.tag is None else f"{self.repo}:{self.tag}"


def parse_hub_id(name: str) -> HubModel | None:
    """Parse ``org/name`` or ``org/name:TYPE``; None for anything else, such as a path."""
    found = _REFERENCE.fullmatch(name)
    if found is None or name.endswith((".gguf", ".safetensors")):
        return None
    return HubModel(found[1], found[2])


def check_no_url(name: str) -> None:
    """:raises CheckpointError: ``name`` is a URL; the message says what to write instead."""
    if _URL.match(name) is None:
        return
    found = _HUB_URL.fullmatch(name)
    if found is not None:
        raise CheckpointError(f"{name}: a URL of the Hugging Face hub; write {_written(found)}")
    if name.startswith("file://"):
        raise CheckpointError(f"{name}: a URL; write the file's path, {name[7:]!r}")
    raise CheckpointError(
        f"{name}: a URL; models are local files, folders, or ids on the Hugging Face hub "
        "('org/name:Q4_K_M'): download the file and open that"
    )


def hint_at_hub(name: str) -> str:
    """A hint for a path that does not exist but may name a file of a repository, or ''."""
    found = _FILE_IN_REPO.fullmatch(name)
    return "" if found is None else f"; on the hub? LLM({found[1]!r}, filename={found[2]!r})"


def _written(url: re.Match[str]) -> str:
    repo, tag, revision, path = url.groups()
    if path is not None and path.endswith(".gguf"):
        options = f", filename={path!r}"
    else:
        options = ""
    if revision not in (None, "main"):
        options += f", revision={revision!r}"
    return f"LLM({repo if tag is None else f'{repo}:{tag}'!r}{options})"


@dataclass(frozen=True, slots=True)
class HubAccess:
    """How to fetch a model: ``cache`` is a folder to use instead of the hub's cache."""

    revision: str | None = None
    local_files_only: bool = False
    cache: str | None = None
    report: Report = lambda done, total: None

    @property
    def cache_folder(self) -> Path:
        from huggingface_hub import constants

        return Path(self.cache or constants.HF_HUB_CACHE)


#: Chooses the files of a repository by their names, fetches them into a folder with the given
#: function, and returns the path to open. :raises CheckpointError: it has no such files.
Choose = Callable[[HubModel, Sequence[str], Callable[[Sequence[str]], Path]], Path]


def download(model: HubModel, hub: HubAccess, choose: Choose | None = None) -> Path:
    """The local GGUF file (of a split model the first) or folder, downloaded if it is missing.

    Without a connection, a model in the cache is used. ``choose``: for repositories of other
    files than models.

    Raises:
        CheckpointError: no connection, no such model or several, no access, or (with
            ``local_files_only``) not in the cache.
    """
    package("huggingface_hub", f"{model}: expected a local path; a model of the hub needs")
    why: Exception | None = None
    choose = choose or _choose
    if not hub.local_files_only:
        try:
            commit, sizes = _listing(model.repo, hub.revision)
        except Exception as error:  # the hub's own, its HTTP library's and OS errors
            why = error
        else:
            files = _Online(model, hub, commit, sizes)
            return choose(model, list(sizes), files.fetch)
    folder = _cached_snapshot(model.repo, hub)
    if folder is None:
        raise _explained(model, hub, why) from why
    if why is not None:
        logger.warning("%s: the hub cannot be reached, using the cached files: %s", model, why)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        return choose(model, sorted(names), lambda wanted: folder)
    except CheckpointError as error:
        raise CheckpointError(f"{error} (in the local cache, {folder})") from why


def _choose(model: HubModel, names: Sequence[str], fetch: Callable[[Sequence[str]], Path]) -> Path:
    named = model.tag is not None or model.filename is not None
    safetensors = any("/" not in name and name.endswith(".safetensors") for name in names)
    if named or (has_gguf(names) and not safetensors):
        parts = gguf_files(model.repo, names, model.tag, model.filename)
        return fetch(parts) / parts[0]
    if not safetensors or not {"config.json", "params.json"} & set(names):
        raise CheckpointError(
            f"{model.repo}: no model found in it: expected a .gguf file, or "
            f"config.json and safetensors files, found {', '.join(names[:8]) or 'nothing'}"
        )
    folder = fetch(small_files(names))
    return fetch(weight_files(names, folder))


def _listing(repo: str, revision: str | None) -> tuple[str, Mapping[str, int]]:
    """The commit, and every file with its size."""
    from huggingface_hub import HfApi, constants

    timeout = constants.HF_HUB_ETAG_TIMEOUT
    info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=timeout)
    if info.sha is None:
        raise CheckpointError(f"{repo}: the hub returned no commit; try again later")
    return info.sha, {file.rfilename: file.size or 0 for file in info.siblings or ()}


def _cached_snapshot(repo: str, hub: HubAccess) -> Path | None:
    home = hub.cache_folder / f"models--{repo.replace('/', '--')}"
    try:
        commit = (home / "refs" / (hub.revision or "main")).read_text(encoding="utf-8").strip()
    except OSError:
        commit = hub.revision or ""
    folder = home / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


@dataclass(slots=True)
class _Online:
    """Downloads files of one commit to the hub's cache, and counts their bytes."""

    model: HubModel
    hub: HubAccess
    commit: str
    sizes: Mapping[str, int]
    _done: int = 0
    _total: int = 0

    def fetch(self, names: Sequence[str]) -> Path:
        """Download ``names``; returns their folder."""
        from huggingface_hub import try_to_load_from_cache

        repo, cache, folder = self.model.repo, self.hub.cache_folder, Path()
        found = {
            name: try_to_load_from_cache(repo, name, cache_dir=cache, revision=self.commit)
            for name in names
        }
        missing = [name for name, path in found.items() if not isinstance(path, str)]
        self._total += sum(self.sizes[name] for name in missing)
        for name in names:
            with _translated(self.model, self.hub):
                from sdk.loaders.hub.download import RemoteFile, fetch_file

                remote = RemoteFile(repo, name, self.commit, self.sizes[name])
                local = fetch_file(remote, cache, self._advance)
            folder = local.parents[name.count("/")]
        self._note_revision(folder)
        return folder

    def _advance(self, count: int) -> None:
        self._done += count
        try:
            self.hub.report(min(self._done, self._total), self._total)
        except Exception as error:  # the caller's own: not an error of the download
            raise _Callback from error

    def _note_revision(self, folder: Path) -> None:
        """Record the branch's or tag's commit as the hub's library does, for use offline."""
        note = folder.parents[1] / "refs" / (self.hub.revision or "main")
        if note.name != self.commit:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(self.commit, encoding="utf-8")


class _Callback(Exception):
    """Carries an exception raised by the caller's progress callback."""


@contextmanager
def _translated(model: HubModel, hub: HubAccess) -> Iterator[None]:
    try:
        yield
    except _Callback as carrier:
        assert carrier.__cause__ is not None
        raise carrier.__cause__ from None
    except SdkError:
        raise
    except Exception as error:
        raise _explained(model, hub, error) from error


def _explained(model: HubModel, hub: HubAccess, why: Exception | None) -> CheckpointError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    site, access = constants.ENDPOINT, "log in with `hf auth login` or set HF_TOKEN"
    if why is None:
        text = "not a local path, and not found in the local cache (local_files_only)"
    elif isinstance(why, OfflineModeIsEnabled):
        text = "not a local path, and not found in the local cache (HF_HUB_OFFLINE is set)"
    elif isinstance(why, GatedRepoError):
        text = f"gated: accept its terms at {site}/{model.repo}, then {access} of that account"
    elif isinstance(why, RevisionNotFoundError):
        text = f"it has no revision {hub.revision or 'main'!r} on {site}"
    elif isinstance(why, RepositoryNotFoundError):
        text = f"not a local path, and no repository on {site}; for a private one {access}"
    elif isinstance(why, OSError) and why.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        text = f"cannot be written to {hub.cache_folder}: {why}"
    else:
        said = next(iter(str(why).strip().splitlines()), "no details")
        text = f"not a local path, and {site} cannot be reached: {type(why).__name__}: {said}"
    return CheckpointError(f"{model}: {text}")
