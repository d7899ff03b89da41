"""Progress of loading and of batches: the caller's callback, or a bar where a person looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from sdk.config import ProgressCallback
from sdk.errors import LoadCancelled

#: A bar appears only when the work takes longer: short loads and batches stay silent.
_DELAY_SECONDS = 1.0


@contextmanager
def reporting(
    stage: str, unit: str, callback: ProgressCallback | None, *, bar: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """Yields ``report(done, total)``.

    With a callback, ``report`` calls it and raises :class:`LoadCancelled` when it returns
    ``False``; otherwise a tqdm bar goes to standard error if that is a terminal or the output of a
    notebook's cell.
    """
    if callback is not None:

        def call(done: int, total: int) -> None:
            if callback(stage, done, total) is False:
                raise LoadCancelled(f"{stage} was cancelled by on_progress at {done} of {total}")

        yield call
        return
    make = _bar() if bar else None
    if make is None:
        yield lambda done, total: None
        return
    with make(
        desc=stage, unit=unit, unit_scale=unit == "B", delay=_DELAY_SECONDS, leave=False
    ) as shown:

        def draw(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield draw


def is_terminal(stream: object) -> bool:
    """Whether somebody reads ``stream`` as it is written. What stands for standard error may be
    None (a daemon), closed, or an object with few methods (a window's log)."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except Exception:
        return False


def _bar() -> Any:
    """The kind of bar that standard error shows; None where nobody would see it."""
    if type(sys.stderr).__module__.partition(".")[0] == "ipykernel":
        # tqdm.auto would choose the same, but warn where the widgets are not installed.
        if find_spec("ipywidgets") is not None:
            from tqdm.notebook import tqdm as widget

            return widget
    elif not is_terminal(sys.stderr):
        return None
    from tqdm import tqdm

    return tqdm
