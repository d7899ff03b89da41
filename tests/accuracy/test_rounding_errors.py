"""docs/quantization.md says what rounding leaves of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accuracy import rounding_errors

PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"


def test_the_page_has_the_errors_that_the_methods_leave() -> None:
    """Bits are those in memory; they depend on layouts alone, not on methods."""
    page = PAGE.read_text(encoding="utf-8")
    assert rounding_errors.HEAD in page
    rows = page.partition(rounding_errors.HEAD)[2].strip().partition("\n\n")[0].splitlines()
    found = {cells[1].strip(): cells[3:5] for cells in (row.split("|") for row in rows)}
    assert list(found) == list(rounding_errors.SCHEMES)
    for name, cells in found.items():
        _, normal, heavy = rounding_errors.errors(name)
        assert [float(cell) for cell in cells] == pytest.approx([normal, heavy], rel=0.01), name
