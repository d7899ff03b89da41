"""Results of known-answer checks, kept in the user's cache folder.

One file for each kind of machine: everything that decides what machine code a card runs (its name
and compute capability, driver, Triton, torch, our kernels). It holds the distance that was found,
or why the operator cannot run, by the name of the check. A file that is missing, damaged or cannot
be written only means that the checks run again.

A check is noted while it runs. If its process has ended since, the kernel hung until somebody ended
it, or brought the process down, and the next process does not try it again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.kernels.dataclass import dataclass
from sdk.kernels.system import SYSTEM
from sdk.kernels.whole_file import replace_file

#: The version of what is written; a file of another one is not read.
VERSION = 1
#: Our files are smaller: a check takes 200 bytes, and an engine has about 40 checks.
_MOST_BYTES = 1 << 22
#: The beginning of the reason of a kernel that failed, and of a check that was not done when it was
#: written down, with the process that runs it.
FAILED, RUNNING = "failed its known-answer check", "running"
logger = logging.getLogger("sdk")


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one check. ``reason``: why the kernel must not run; empty if it is right."""

    distance: float
    reason: str = ""


class AnswerFile:
    """The results for one kind of machine in ``folder``, which is made when it is needed."""

    def __init__(self, folder: Path, machine: Mapping[str, str]) -> None:
        self._machine = dict(machine)
        digest = hashlib.sha256(json.dumps(self._machine, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{digest[:24]}.json"
        self._warned = False

    def read(self) -> dict[str, Answer]:
        """What is known; nothing if the file is missing or damaged.

        What another process checks now is not known. A check whose process has ended is a failure.
        """
        found: dict[str, Answer] = {}
        for name, answer in self._written().items():
            if not answer.reason.startswith(f"{RUNNING} "):
                found[name] = answer
            elif _has_ended(answer.reason):
                why = "the process ended during it, or was ended because it hung"
                found[name] = Answer(
                    answer.distance, f"{FAILED}: {why} (delete {self.path} to check again)"
                )
        return found

    def _written(self) -> dict[str, Answer]:
        try:
            with self.path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            found: Any = json.loads(data) if len(data) <= _MOST_BYTES else None
            if found is None or found["version"] != VERSION or found["machine"] != self._machine:
                return {}
            return {name: _answer(one) for name, one in found["answers"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            logger.debug("%s: cannot be read, checks run again: %s", self.path, error)
            return {}

    def add(self, answers: Mapping[str, Answer]) -> None:
        """Write what is new beside what another process has written meanwhile.

        The file is replaced as a whole and readable by its owner only. If two processes write at
        the same moment, the results of one may be lost, and are found again.
        """
        if not answers:
            return
        self._replace(self._written() | dict(answers))

    def begin(self, name: str) -> None:
        """Note that this process runs a check; :meth:`add` or :meth:`forget` ends that."""
        self.add({name: Answer(float("nan"), f"{RUNNING} {os.getpid()} {socket.gethostname()}")})

    def forget(self, name: str) -> None:
        """Leave out a check that was begun."""
        left = self._written()
        if left.pop(name, None) is not None:
            self._replace(left)

    def _replace(self, answers: Mapping[str, Answer]) -> None:
        content = {
            "version": VERSION,
            "machine": self._machine,
            "answers": {
                name: [one.distance, one.reason]
                if one.distance == one.distance
                # JSON has no NaN
                else [None, one.reason]
                for name, one in answers.items()
            },
        }
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = json.dumps(content, allow_nan=False).encode()
            replace_file(self.path, data, sync=False)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s cannot be written, so the kernels are checked at every load: %s",
                    self.path,
                    error,
                )


def _has_ended(reason: str) -> bool:
    """Whether the process that :meth:`AnswerFile.begin` noted is gone. Those of other hosts, which
    may share the folder, are not known."""
    _, process, host = (*reason.split(" ", 2), "", "")[:3]
    if host != socket.gethostname() or not process.isdecimal():
        return False
    return not SYSTEM.is_alive(int(process))


def _answer(written: Any) -> Answer:
    """:raises TypeError: it is not what :meth:`AnswerFile.add` writes."""
    distance, reason = written
    if not isinstance(reason, str) or not (
        distance is None or (isinstance(distance, float | int) and not isinstance(distance, bool))
    ):
        raise TypeError("expected a number and a text")
    return Answer(float("nan") if distance is None else float(distance), reason)
