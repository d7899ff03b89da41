"""The folder of an unfinished quantization, ``OUT.partial``.

It holds a description of the job (``job.json``), one part per finished layer and, for methods that
need data, the inputs of the next layer. A file gets its name only when it is complete. A continued
job trusts nothing in the folder: parts that are damaged or from another job are made again, and
files that no job has written are not touched.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from torch import Tensor

from sdk.api.errors import CheckpointError, QuantizationError
from sdk.loaders.folders.safetensors_reader import SafetensorsFiles
from sdk.loaders.writers.parts import free_space, new_file, write_part

logger = logging.getLogger("sdk")

_OURS = re.compile(r"(job\.json|(part-\d{5}|rope)\.safetensors|inputs-\d{5}\.bin|made)(\.part)?")
#: The key in a part's notes that identifies the part and its job.
_MARK = "job"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class JobFolder:
    """The folder of the job that makes ``out``.

    Args:
        out: the result.
        facts: identify the job: an unfinished one with equal facts is continued.
        needed: about how many bytes the job writes in total.
    """

    def __init__(self, out: Path, facts: Mapping[str, object], needed: int) -> None:
        self.out = out
        self.path = out.with_name(out.name + ".partial")
        self._facts = json.dumps(facts, indent=2, sort_keys=True)
        self._digest = hashlib.sha256(self._facts.encode()).hexdigest()[:16]
        self._needed = needed

    def part(self, index: int) -> Path:
        return self.path / f"part-{index:05d}.safetensors"

    def inputs(self, index: int) -> Path:
        return self.path / f"inputs-{index:05d}.bin"

    def enter(self) -> None:
        """Find or create the folder, with its description of the job.

        :raises QuantizationError: OUT exists, there is too little space, or the folder belongs to
            another job or to no job.
        """
        self._expect_no_result()
        if os.path.lexists(self.path):
            self._check_entries()
        self._check_note()
        self.path.mkdir(parents=True, exist_ok=True)
        free, needed = free_space(self.path), self._missing()
        if free < needed:
            with contextlib.suppress(OSError):  # fails, as it should, if parts are in it
                self.path.rmdir()
            raise QuantizationError(
                f"{self.out}: expected {needed // 10**6} MB of free space, found {free // 10**6} MB"
            )
        with new_file(self.path / "job.json") as note:
            note.write(self._facts.encode())

    def first_missing(self, count: int, inputs_bytes: int | None) -> int:
        """The first of ``count`` parts that must be made; it and all later parts are deleted.

        ``inputs_bytes``: the size of the inputs that a part is made from; None: none are needed.
        """
        sound = (index for index in range(count) if not self._is_sound(index))
        first = next(sound, count)
        if inputs_bytes is not None and 0 < first < count:
            inputs = self.inputs(first)
            if not inputs.is_file() or inputs.stat().st_size != inputs_bytes:
                logger.warning("%s: missing or damaged; the job starts over", inputs)
                first = 0
        for index in range(first, count):
            self.part(index).unlink(missing_ok=True)
        if first == 0:
            self.inputs(0).unlink(missing_ok=True)
        return first

    def write_part(
        self, index: int, tensors: Mapping[str, Tensor], notes: Mapping[str, str]
    ) -> None:
        write_part(self.part(index), tensors, {**notes, _MARK: self._mark(index)})

    def finish(self, make: Callable[[Path], None]) -> None:
        """Move the result that ``make(path)`` writes to OUT, and remove the folder."""
        made = self.path / "made"
        _remove(made)
        try:
            make(made)
            self._expect_no_result()
            made.rename(self.out)
        except BaseException:
            with contextlib.suppress(OSError):  # free its space, which may have been lacking
                _remove(made)
            raise
        shutil.rmtree(self.path)

    def failed(self, error: OSError) -> QuantizationError:
        """The error for a file that cannot be written."""
        if error.errno not in _FULL:
            return QuantizationError(f"{self.out}: cannot be written: {error}")
        with contextlib.suppress(OSError):
            free, missing = free_space(self.path), self._missing()
            return QuantizationError(
                f"{self.out}: the disk is full ({error}): about {missing} more bytes are needed, "
                f"{free} are free in {self.path.parent}. Finished parts stay in {self.path}; free "
                "some space, and the same call continues from there"
            )
        return QuantizationError(f"{self.out}: the disk is full: {error}")

    # -- inside --------------------------------------------------------------------------------

    def _expect_no_result(self) -> None:
        if os.path.lexists(self.out):
            raise QuantizationError(f"{self.out}: exists already; name another path, or remove it")

    def _check_entries(self) -> None:
        if self.path.is_symlink() or not self.path.is_dir():
            raise QuantizationError(
                f"{self.path}: expected a folder for the unfinished job, found something else; "
                "remove it, or name another path"
            )
        for entry in os.scandir(self.path):
            if entry.is_symlink() or not _OURS.fullmatch(entry.name):
                found = "a link" if entry.is_symlink() else "another file"
                raise QuantizationError(
                    f"{entry.path}: expected only files of an unfinished job, found {found}; "
                    f"remove {self.path}, or name another path"
                )

    def _check_note(self) -> None:
        note = self.path / "job.json"
        found = note.read_text(encoding="utf-8", errors="replace") if note.is_file() else ""
        with contextlib.suppress(ValueError):  # truncated: the parts identify their job
            json.loads(found)
            if found != self._facts:
                raise QuantizationError(
                    f"{self.path}: holds an unfinished job of another model, scheme or "
                    "calibration; remove it, or name another path"
                )

    def _missing(self) -> int:
        """About how many bytes are still to be written."""
        written = 0
        if self.path.is_dir():
            written = sum(entry.lstat().st_size for entry in self.path.iterdir())
        return max(self._needed - written, 0)

    def _mark(self, index: int) -> str:
        return f"{self._digest} {index}"

    def _is_sound(self, index: int) -> bool:
        """Whether a part exists, is complete and belongs to this job."""
        path = self.part(index)
        if not path.is_file():
            return False
        try:
            with closing(SafetensorsFiles([path])) as found:
                if found.metadata.get(_MARK) == self._mark(index):
                    return True
            logger.warning("%s: belongs to another job or layer; making it again", path)
        except CheckpointError as error:
            logger.warning("%s; making it again", error)
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
