"""A short run of ``soak.py``; ``python -m tests.serving.soak`` sends 20,000 requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.soak import soak


@pytest.mark.slow
def test_requests_over_http_and_in_the_process_are_answered_once_and_as_alone(
    tmp_path: Path,
) -> None:
    report = soak(tmp_path, 600, seed=1)
    assert (report["lost"], report["errors"]) == (0, [])
    kinds = {"HTTP", "HTTP stream", "HTTP left", "HTTP 400", "generate", "astream", "cancelled"}
    assert kinds <= set(report["results"])
