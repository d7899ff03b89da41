"""Damaged model files end in exceptions of ours; `make fuzz` goes on for ten minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loaders.fuzz import fuzz


@pytest.mark.parametrize("files", [90, pytest.param(300, marks=pytest.mark.slow)])
def test_damaged_files_run_or_are_refused_soon_and_in_little_memory(
    tmp_path: Path, files: int
) -> None:
    ends = fuzz(7, lambda count: count < files, tmp_path / "case")
    assert ends["CheckpointError"] > files / 5 and ends["answered"] > files / 5
