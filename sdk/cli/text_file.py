"""Files given on the command line: options to read, results to write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.input_files import read_text


def read_options(path: str | Path | None) -> dict[str, Any]:
    """Options of ``LLM`` in the JSON file of ``--options``, as ``embedlm tune serve --write`` makes
    it; none without a file. :raises RequestError: it is not a JSON object, or cannot be read."""
    if path is None:
        return {}
    text = read_text("--options", path, "a file with a JSON object of options of LLM")
    expected = f"--options {path}: expected a JSON object of options of LLM"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{expected}: {error}") from error
    if not isinstance(found, dict):
        raise RequestError(f"{expected}, found {found!r:.80}")
    return found


def check_writable(option: str, path: str | None) -> None:
    """Call before the work whose result goes there. :raises RequestError: it is not writable."""
    if path is None:
        return
    target = Path(path)
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise RequestError(f"{option}: expected a file that can be written, found {path}")
