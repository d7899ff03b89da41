"""Files that readers see whole: as they were, or as they are now."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from sdk.kernels.system import SYSTEM


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write ``data`` to ``path``, readable by its owner only (mode 0600).

    Readers see the old file or the new one, never a part. ``sync``: wait until it is on the disk.
    """
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with open(number, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        SYSTEM.replace_file(Path(name), path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    if sync:
        SYSTEM.sync_folder(path.parent)
