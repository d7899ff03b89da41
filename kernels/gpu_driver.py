"""Whether a driver of a GPU is loaded, found out without torch: importing it takes a second."""

from __future__ import annotations

import re
from pathlib import Path


def gpu_driver(proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> str | None:
    """The vendor of the loaded driver, and NVIDIA's version; ``None``: there is none."""
    if (proc / "driver/nvidia").exists():
        try:
            text = (proc / "driver/nvidia/version").read_text()
        except OSError:
            text = ""
        version = re.search(r"\s(\d+(?:\.\d+)+)\s", text)
        return f"NVIDIA {version[1]}" if version else "NVIDIA, its version cannot be read"
    if (dev / "nvidiactl").exists():  # in some containers only this is there
        return "NVIDIA, its version cannot be read"
    if (dev / "dxg").exists():
        return "of Windows (WSL)"
    return "AMD" if (dev / "kfd").exists() else None
