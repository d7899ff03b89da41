"""The operators a sampler draws with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sdk.kernels.operators.ops import Ops


@pytest.fixture(scope="session", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """Two threads of the native kernels, and the reference."""
    opened = Ops(num_threads=2, backends=[request.param])
    yield opened
    opened.close()
