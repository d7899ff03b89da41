"""Progress of loading and of batches: the caller's callback, or a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from sdk.api.config import ProgressCallback
from sdk.api.errors import LoadCancelled

#: A bar appears only after this time: short loads and batches stay silent.
_DELAY_SECONDS = 1.0


@contextmanager
def reporting(
    stage: str, unit: str, callback: ProgressCallback | None, *, bar: bool = True
) -> Iterator[Callable[[int, int], None]]:
    """Yields ``report(done, total)``.

    With a callback, ``report`` calls it and raises :class:`LoadCancelled` if it returns ``False``.
    Otherwise it shows a tqdm bar on standard error, if that is a terminal or a notebook cell.
    """
    if callback is not None:

        def call(done: int, total: int) -> None:
            if callback(stage, done, total) is False:
                raise LoadCancelled(f"{stage} was cancelled by on_progress at {done} of {total}")

        yield call
        return
    with bar_of(stage, unit, bar=bar) as shown:
        if shown is None:
            yield lambda done, total: None
            return

        def draw(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield draw


@contextmanager
def bar_of(stage: str, unit: str, *, bar: bool = True) -> Iterator[Any]:
    """A bar of tqdm on standard error, if that is a terminal or a notebook cell; else ``None``."""
    make = _bar() if bar else None
    if make is None:
        yield None
        return
    scaled = unit == "B"
    with make(desc=stage, unit=unit, unit_scale=scaled, delay=_DELAY_SECONDS, leave=False) as shown:
        yield shown


def is_terminal(stream: object) -> bool:
    """Whether ``stream`` is a terminal. A process's standard error may be None (a daemon), closed,
    or an object with few methods (a GUI's log)."""
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except Exception:
        return False


def _bar() -> Any:
    """The kind of bar that standard error can show; None if it shows none."""
    if type(sys.stderr).__module__.partition(".")[0] == "ipykernel":
        # tqdm.auto would choose the same, but warns if the widgets are not installed.
        if find_spec("ipywidgets") is not None:
            from tqdm.notebook import tqdm as widget

            return widget
    elif not is_terminal(sys.stderr):
        return None
    if find_spec("tqdm") is None:  # a missing bar must not fail the call
        return None
    from tqdm import tqdm

    return tqdm
