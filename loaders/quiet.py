"""Redirects transformers' log, which prints warnings to standard error by default."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("sdk")


@contextmanager
def transformers_to_our_log() -> Iterator[None]:
    """Redirect transformers' log records of this thread to the logger ``sdk`` at level INFO.

    Other threads' records, and transformers' handlers and levels, are not changed.
    """
    mine = threading.get_ident()
    last: logging.LogRecord | None = None

    def keep(record: logging.LogRecord) -> bool:
        nonlocal last
        # A host may have given the same handler to other loggers, ours among them.
        theirs = record.name.partition(".")[0] == "transformers"
        if not theirs or record.thread != mine:
            return True
        if record is not last:  # once, however many handlers transformers has
            last = record
            logger.info("transformers: %s", record.getMessage())
        return False

    handlers = list(logging.getLogger("transformers").handlers)
    for handler in handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(keep)
