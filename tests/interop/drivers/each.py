"""The jobs of a driver, one after another: what fails is told beside its result."""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def each(work: Callable[[dict[str, Any]], None]) -> None:
    """``work(job)`` for all jobs of the file that the command line names."""
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            work(job)
        except Exception:
            Path(job["out"] + ".error").write_text(traceback.format_exc())
