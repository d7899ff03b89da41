"""Finds files with the encoder of images of a GGUF model by their names."""

from __future__ import annotations

from pathlib import Path


def beside(file: Path) -> list[Path]:
    """The mmproj files in the folder of a model, best first: 16 bits, as folders have towers."""
    found = [path for path in file.parent.glob("*.gguf") if is_mmproj(path) and path != file]

    def rank(path: Path) -> tuple[int, str]:
        kinds = ("bf16", "f16", "f32")
        name = path.name.lower()
        return next((i for i, kind in enumerate(kinds) if kind in name), len(kinds)), name

    return sorted(found, key=rank)


def is_mmproj(path: Path) -> bool:
    """Whether a file's name says that it is one."""
    return "mmproj" in path.name.lower()
