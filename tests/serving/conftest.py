from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from sdk.serving import create_app
from sdk.testing import FakeLLM
from tests.serving.serving import Serve, running


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(answers, **options)``: a client of a server with a fake model named "tiny"."""
    with contextlib.ExitStack() as stack:

        def make(answers: Any = "Fine, thanks.", app: Any = None, **options: Any) -> Any:
            llm = stack.enter_context(FakeLLM(answers, **options))
            served = create_app({"tiny": llm}, **(app or {}))
            return stack.enter_context(running(served)), llm

        yield make
