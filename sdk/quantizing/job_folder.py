"""What an unfinished quantization leaves on the disk: the folder ``OUT.partial``.

It holds what the job is (``job.json``), a part per finished layer and, for methods that need data,
the input of the next layer. Every file appears under its name when it is complete, and nothing in
the folder is trusted when a job goes on: a part that is damaged or another job's is made again, and
files that no job has put there are not touched.
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

from sdk.errors import CheckpointError, QuantizationError
from sdk.loaders.safetensors_reader import SafetensorsFiles
from sdk.loaders.writers.parts import free_space, new_file, write_part

logger = logging.getLogger("sdk")

_OURS = re.compile(r"(job\.json|(part-\d{5}|rope)\.safetensors|inputs-\d{5}\.bin|made)(\.part)?")
#: The key of a part's notes that says which part of which job it is.
_MARK = "job"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class JobFolder:
    """The folder of the job that makes ``out``.

    Args:
        out: what will be made.
        facts: what makes this job the same as one begun before.
        needed: about how many bytes the job writes in all.
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
        """Find or make the folder, with its note of what the job is.

        :raises QuantizationError: OUT exists, there is too little space, or the folder is another
            job's or not a job's at all.
        """
        self._expect_no_result()
        if os.path.lexists(self.path):
            self._check_entries()
        self._check_note()
        self.path.mkdir(parents=True, exist_ok=True)
        free, needed = free_space(self.path), self._missing()
        if free < needed:
            with contextlib.suppress(OSError):  # an unfinished job's stays
                self.path.rmdir()
            raise QuantizationError(
                f"{self.out}: expected {needed // 10**6} MB of free space, found {free // 10**6} MB"
            )
        with new_file(self.path / "job.json") as note:
            note.write(self._facts.encode())

    def first_missing(self, count: int, inputs_bytes: int | None) -> int:
        """The first of ``count`` parts that has to be made; it and what follows are thrown away.

        ``inputs_bytes``: of the input that a part is made from, None where none is needed.
        """
        sound = (index for index in range(count) if not self._is_sound(index))
        first = next(sound, count)
        if inputs_bytes is not None and 0 < first < count:
            inputs = self.inputs(first)
            if not inputs.is_file() or inputs.stat().st_size != inputs_bytes:
                logger.warning("%s: missing or damaged: the job begins anew", inputs)
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
        """Put what ``make`` makes at the path it is given into OUT's place; the folder goes."""
        made = self.path / "made"
        _remove(made)
        try:
            make(made)
            self._expect_no_result()
            made.rename(self.out)
        except BaseException:
            with contextlib.suppress(OSError):  # it takes the room that may have been lacking
                _remove(made)
            raise
        shutil.rmtree(self.path)

    def failed(self, error: OSError) -> QuantizationError:
        """What a file that cannot be written means to the user."""
        if error.errno not in _FULL:
            return QuantizationError(f"{self.out}: cannot be written: {error}")
        with contextlib.suppress(OSError):
            free, missing = free_space(self.path), self._missing()
            return QuantizationError(
                f"{self.out}: the disk is full ({error}): about {missing} bytes are still to be "
                f"written, {free} are free in {self.path.parent}. What is finished stays in "
                f"{self.path}, and the same call goes on from there"
            )
        return QuantizationError(f"{self.out}: the disk is full: {error}")

    # -- inside --------------------------------------------------------------------------------

    def _expect_no_result(self) -> None:
        if os.path.lexists(self.out):
            raise QuantizationError(f"{self.out}: exists already; name another place, or remove it")

    def _check_entries(self) -> None:
        if self.path.is_symlink() or not self.path.is_dir():
            raise QuantizationError(
                f"{self.path}: expected a folder for the unfinished job, found something else; "
                "remove it, or name another place"
            )
        for entry in os.scandir(self.path):
            if entry.is_symlink() or not _OURS.fullmatch(entry.name):
                what = "a link" if entry.is_symlink() else "not of an unfinished job"
                raise QuantizationError(
                    f"{entry.path}: {what}; remove {self.path}, or name another place"
                )

    def _check_note(self) -> None:
        note = self.path / "job.json"
        found = note.read_text(encoding="utf-8", errors="replace") if note.is_file() else ""
        with contextlib.suppress(ValueError):  # cut off: the parts say whose they are
            json.loads(found)
            if found != self._facts:
                raise QuantizationError(
                    f"{self.path}: holds an unfinished job of another model, scheme or "
                    "calibration; remove it, or name another place"
                )

    def _missing(self) -> int:
        """Bytes that are still to be written, about."""
        there = 0
        if self.path.is_dir():
            there = sum(entry.lstat().st_size for entry in self.path.iterdir())
        return max(self._needed - there, 0)

    def _mark(self, index: int) -> str:
        return f"{self._digest} {index}"

    def _is_sound(self, index: int) -> bool:
        """Whether a part is there, whole and this job's."""
        path = self.part(index)
        if not path.is_file():
            return False
        try:
            with closing(SafetensorsFiles([path])) as found:
                if found.metadata.get(_MARK) == self._mark(index):
                    return True
            logger.warning("%s: of another job or layer: made again", path)
        except CheckpointError as error:
            logger.warning("%s: made again", error)
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
