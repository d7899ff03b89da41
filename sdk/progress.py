"""Progress of loading and of batches: the caller's callback, or a bar on a terminal, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    ``False``; otherwise a tqdm bar goes to standard error if that is a terminal.
    """
    if callback is not None:

        def call(done: int, total: int) -> None:
            if callback(stage, done, total) is False:
                raise LoadCancelled(f"{stage} was cancelled by on_progress at {done} of {total}")

        yield call
        return
    if not bar or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from tqdm import tqdm

    with tqdm(
        desc=stage, unit=unit, unit_scale=unit == "B", delay=_DELAY_SECONDS, leave=False
    ) as shown:

        def draw(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield draw
