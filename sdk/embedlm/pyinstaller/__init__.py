"""Where PyInstaller finds our hooks: what a frozen application needs of embedlm."""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    return [str(Path(__file__).parent)]
