"""docs/formats.md says what the code does."""

from __future__ import annotations

import pytest

from tests.accuracy import support_matrix


def test_the_tables_of_the_formats_page_are_what_the_code_does() -> None:
    page = support_matrix.PAGE.read_text()
    if support_matrix.filled(page) != page:
        pytest.fail("docs/formats.md is stale: run python tests/accuracy/support_matrix.py")
