"""Damaged model files end in exceptions of ours; `make fuzz` goes on for ten minutes."""

from __future__ import annotations

from pathlib import Path

from tests.loaders.fuzz import fuzz


def test_damaged_files_run_or_are_refused_soon_and_in_little_memory(tmp_path: Path) -> None:
    ends = fuzz(7, lambda count: count < 300, tmp_path / "case")
    assert ends["CheckpointError"] > 60 and ends["answered"] > 60
