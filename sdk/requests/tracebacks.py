"""What an exception keeps alive after it was handled."""

from __future__ import annotations

import traceback


def let_go(error: BaseException) -> None:
    """Forget the variables of the calls in which an error was raised. They keep the engine, with
    its files and maps, in a reference cycle with the error that one of them holds."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += [one.__cause__, one.__context__]
