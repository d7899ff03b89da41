"""instructor on openai's clients of a model in this process, with pytest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import instructor
import pytest
from pages import run_section
from pydantic import BaseModel

from sdk import LLM
from sdk.integrations.openai import async_client, client

ASK: Any = [{"role": "user", "content": "Which city has the Eiffel Tower?"}]


class City(BaseModel):
    name: str
    capital: bool


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(os.environ["CHAT_MODEL"], max_model_len=1024) as opened:
        yield opened


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_answers_are_values_of_a_class(llm: LLM, mode: Any) -> None:
    own = client(llm)
    typed = instructor.from_openai(own, mode=mode)
    options: dict[str, Any] = {"model": "model", "max_tokens": 64, "temperature": 0}
    found = typed.chat.completions.create(
        messages=ASK, response_model=City, max_retries=0, **options
    )
    assert isinstance(found, City)
    own.close()

    async def run() -> Any:
        other = instructor.from_openai(async_client(llm), mode=mode)
        return await other.chat.completions.create(
            messages=ASK, response_model=City, max_retries=0, **options
        )

    assert asyncio.run(run()).model_dump() == found.model_dump()


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_section("## instructor", 1, tmp_path, monkeypatch)
