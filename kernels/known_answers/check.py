"""Checks the operators of a card against known answers before an engine uses them.

A compiler or driver can make a wrong kernel that no test on another machine shows. So when an
engine chooses a kernel for an operator (:meth:`sdk.kernels.context.Context.kernel`), the kernel
runs on small inputs of the same types, widths and strides as those that it is chosen for, and the
result is compared with that of the reference on the CPU. What is right is written down
(``file.py``), so that the next engine on this card with this driver, Triton and torch
launches nothing. A kernel that is wrong is replaced by the next one that accepts the problem. So
is, in the next process, one that hung or ended the process that checked it.

Weights have checks of their own (``self_check.py``).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.context import Context
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu_driver import gpu_driver
from sdk.kernels.known_answers.cases import CASES, Place, distance
from sdk.kernels.known_answers.file import FAILED, Answer, AnswerFile
from sdk.kernels.known_answers.place import Found
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.reference import ReferenceBackend

#: Operators that a card's steps need in a form that the reference does not have: the sampler's
#: results stay on the card, and ``find_places`` also lists the work of decode attention.
NO_FALLBACK = ("sample", "find_places")


class KnownAnswers:
    """The checks of one engine, each of which runs once. ``file``: where results are kept."""

    def __init__(self, context: Context, file: AnswerFile | None) -> None:
        self._context = context
        self._file = file
        self._known: dict[str, Answer] = {} if file is None else file.read()
        self._reference = ReferenceBackend()
        #: Products of experts that run expert by expert, with the reason.
        self.declined: dict[str, str] = {}
        #: How many checks have launched kernels.
        self.ran = 0

    def reason(self, kernel: Any, problem: Problem, like: Sequence[Any]) -> str | None:
        """Why ``kernel`` must not run; ``None`` if it is right. ``like``: what it will run on.

        :raises KernelError: it is wrong, and nothing can replace it; or it broke the card.
        """
        case = CASES.get(problem.op)
        if case is None or not str(kernel.name).startswith("gpu.") or _capturing(self._context):
            return None
        wanted = self._reference.implementations(problem.op)[0]

        def check() -> Answer:
            short = self._context.activations
            place = Place(self._context.device, short, short)
            exact = problem.compute == "exact"
            with torch.inference_mode():
                right = case(wanted, place.on_host(), problem, like)
                found = case(kernel, place, problem, like)
            return _compared(found, right, exact)

        about = [*(f"{f.name}={getattr(problem, f.name)}" for f in fields(problem)), *_facts(like)]
        reason = self.ask(f"{kernel.name} {' '.join(about)}", kernel.name, check)
        if reason is not None and problem.op in NO_FALLBACK:
            raise KernelError(
                f"{kernel.name} {reason}, and no other kernel can replace it: use device='cpu', or "
                "other versions of torch, Triton or the driver"
            )
        return reason

    def ask(self, name: str, kernel: str, check: Any) -> str | None:
        """The reason that is known under ``name``, else that of ``check() -> Answer``.

        :raises KernelError: the card cannot be used any more.
        """
        name = f"{name} {self._context.activations}".replace("torch.", "")
        answer = self._known.get(name)
        if answer is None:
            self.ran += 1
            broken: Exception | None = None
            if self._file is not None:
                self._file.begin(name)
            try:
                answer = check()
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    self._forget(name)
                    raise
                answer = Answer(math.nan, f"{FAILED}: {type(error).__name__}: {error}"[:2000])
                broken = error if "CUDA error" in str(error) else None
            except BaseException:  # the user's Ctrl-C says nothing about the kernel
                self._forget(name)
                raise
            self._known[name] = answer
            if self._file is not None:
                self._file.add({name: answer})
            if broken is not None:  # every later call of CUDA in this process fails too
                raise KernelError(
                    f"{kernel} {answer.reason}; this process cannot use the card any more"
                ) from broken
        return answer.reason or None

    def _forget(self, name: str) -> None:
        if self._file is not None:
            self._file.forget(name)

    def failures(self) -> list[str]:
        """A line for each kernel that failed its check: what, why, and what runs instead."""
        lines = [
            f"{name} {why}; {choice.name} runs {problem.op}"
            for problem, choice in self._context.chosen()
            for name, why in choice.declined
            if why.startswith(FAILED)
        ]
        alone = "each expert is multiplied alone"
        lines += [f"{name} {why}; {alone}" for name, why in self.declined.items()]
        return list(dict.fromkeys(lines))


def _capturing(context: Context) -> bool:
    """Whether launches are recorded: then nothing can be read, and a first run came before."""
    return context.card is not None and context.card.is_capturing


def _compared(found: Found, right: Found, exact: bool) -> Answer:
    """Both have the same results in the same order."""
    most = 0.0
    for (what, values, limit), (_, wanted, _) in zip(found, right, strict=True):
        limit = min(limit, EXACT) if exact else limit
        away = distance(values.cpu(), wanted)
        if not away <= limit:
            why = f"{FAILED}: {what} is {away:.3g} from the reference, allowed are {limit:.2g}"
            return Answer(away, why)
        most = max(most, away)
    return Answer(most)


#: The largest distance with ``compute="exact"``: see ``cases.py``.
EXACT = 2.0**-11


def _facts(like: Sequence[Any]) -> list[str]:
    """Words for what kernels are compiled for: types, widths and strides; no sizes of a step."""
    found = []
    for x in like:
        if isinstance(x, Tensor):
            found.append(f"{x.dtype}{list(x.shape[1:])}{list(x.stride())}".replace(" ", ""))
        elif isinstance(x, KVPages):
            parts = (x.k, x.v, x.k_scale, x.v_scale, x.k_centre)
            found.append(f"{x.dtype}({','.join(_facts(parts))})")
        elif is_dataclass(x) and not isinstance(x, type):
            values = [getattr(x, f.name) for f in fields(x)]
            found.append(f"{type(x).__name__}({','.join(_facts(values))})")
        elif isinstance(x, tuple):
            found.append(f"({','.join(_facts(x))})")
        elif isinstance(x, float):
            found.append("float")
        else:
            found.append(re.sub(r"\s", "", str(x)))
    return found


def machine(device: torch.device) -> dict[str, str]:
    """Everything that decides which machine code a card runs, and on what."""
    import triton

    from sdk.kernels.gpu import tuning_of

    card = torch.cuda.get_device_properties(device)
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "driver": gpu_driver() or "unknown",
        "triton": triton.__version__,
        "torch": str(torch.__version__),
        "kernels": digest.hexdigest()[:24],
        "tuning": hashlib.sha256(repr(tuning_of(str(device))).encode()).hexdigest()[:24],
    }


def known(folder: Path | None, device: torch.device) -> Mapping[str, Answer]:
    """What is written down for a card."""
    return {} if folder is None else AnswerFile(folder, machine(device)).read()
