"""outlines on openai's client of a model in this process, with pytest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import outlines
import pytest
from pages import run_section
from pydantic import BaseModel

from sdk import LLM
from sdk.integrations.openai import client
from sdk.testing import FakeLLM


class City(BaseModel):
    name: str
    capital: bool


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(os.environ["CHAT_MODEL"], max_model_len=1024) as opened:
        yield opened


def test_answers_have_the_type(llm: LLM) -> None:
    own = client(llm)
    model = outlines.from_openai(own, "model")
    text = model("Which city has the Eiffel Tower?", City, max_tokens=64, temperature=0)
    City.model_validate_json(text)
    own.close()


def test_texts_stream() -> None:
    with FakeLLM("The Rhine flows north.") as fake:
        own = client(fake)
        pieces = list(outlines.from_openai(own, "fake").stream("A river?"))
        own.close()
    assert len(pieces) > 3 and "".join(pieces) == "The Rhine flows north."


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_section("## outlines", 1, tmp_path, monkeypatch)
