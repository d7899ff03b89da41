"""docs/examples/rag_service.py over HTTP, with the real small models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM
from sdk.testing import FakeLLM
from tests.docs.test_examples import load
from tests.serving.serving import running

PAGES = {
    "hours.md": "# Opening hours\n\nThe shop opens at nine and closes at six.\n\n"
    "Closed on Sundays.",
    "prices.md": "# Prices\n\n## Repairs\n\nA puncture costs eight euros.\n\n## Rental\n\n"
    "Electric bicycles cost thirty euros a day.",
    "about/history.txt": "The shop was founded in 1911 by two sisters.",
    "image.png": "no text",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("handbook")
    for name, text in PAGES.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text)
    return made


@pytest.fixture(scope="module")
def client(folder: Path, smollm2: Path, minilm: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOLDER", str(folder))
        patch.setenv("MODEL", str(smollm2))
        patch.setenv("EMBEDDER", str(minilm))
        patch.setenv("RERANKER", str(minilm))
        with running(load("rag_service").app) as made:
            yield made


def test_a_folder_becomes_passages_with_their_headings(folder: Path) -> None:
    passages = list(load("rag_service").passages_of(folder))
    assert [one.file for one in passages] == [
        *("about/history.txt", "hours.md", "prices.md", "prices.md")
    ]
    assert passages[1].text.startswith("Opening hours\nThe shop opens")
    assert [one.text.splitlines()[0] for one in passages[2:]] == ["Repairs", "Rental"]
    (folder / "long.txt").write_text("\n\n".join(["word " * 60] * 4))
    long = [p for p in load("rag_service").passages_of(folder) if p.file == "long.txt"]
    (folder / "long.txt").unlink()
    assert [len(one.text.split()) for one in long] == [120, 120]


@pytest.mark.slow
def test_an_answer_cites_passages_of_the_folder(client: Any) -> None:
    found = client.post("/ask", {"question": "What does an electric bicycle cost?"})
    assert found.status == 200 and found.json["answer"]
    citations = found.json["citations"]
    assert 1 <= len(citations) <= 3
    assert citations == sorted(citations, key=lambda one: -one["score"])
    for one in citations:
        words = one["text"].split("\n")[-1]
        assert words in PAGES[one["file"]]


@pytest.mark.slow
def test_questions_at_the_same_time_are_all_answered_as_alone(client: Any) -> None:
    questions = ["When does the shop open?", "Who founded the shop?", "What does a puncture cost?"]
    alone = [client.post("/ask", {"question": one}).json for one in questions]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda one: client.post("/ask", {"question": one}), questions))
    assert [one.json for one in together] == alone


@pytest.mark.parametrize("question", ["", " \n ", "x" * 2001])
def test_a_question_of_another_length_is_refused(client: Any, question: str) -> None:
    assert client.post("/ask", {"question": question}).status == 422


def test_the_best_passage_comes_first_and_an_empty_folder_is_named(
    folder: Path, minilm: Path, tmp_path: Path
) -> None:
    service = load("rag_service")
    with LLM(minilm) as embedder:
        library = service.Library(folder, None, embedder, None)
        found = asyncio.run(library.search("Who founded the shop?"))
        assert found[0][0].file == "about/history.txt" and found[0][1] > found[1][1]
        with pytest.raises(RuntimeError, match=r"has no \.md and no \.txt file"):
            service.Library(tmp_path, None, embedder, None)
        with pytest.raises(RuntimeError, match="nowhere: is not a folder"):
            service.Library(tmp_path / "nowhere", None, embedder, None)


def test_long_paragraphs_become_pieces_and_what_is_not_text_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service = load("rag_service")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "chinese.txt").write_text("商店九点开门。" * 1000, "utf-8")
    (tmp_path / "long.txt").write_text("alpha beta gamma delta " * 1000)
    passages = list(service.passages_of(tmp_path))
    assert {one.file for one in passages} == {"chinese.txt", "long.txt"}
    assert max(len(one.text) for one in passages) <= service.CHARACTERS
    for name in ("chinese.txt", "long.txt"):
        found = "".join(one.text for one in passages if one.file == name)
        text = (tmp_path / name).read_text("utf-8")
        assert "".join(found.split()) == "".join(text.split())
    [warning] = caplog.messages
    assert warning.endswith("binary.txt is not text in UTF-8")


def test_only_passages_that_fit_are_read(minilm: Path, tmp_path: Path) -> None:
    service = load("rag_service")
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"Shop {number} opens at nine. " * 25)
    reply = '{"answer": "At nine.", "sources": [1]}'
    with LLM(minilm) as embedder, FakeLLM(reply, max_model_len=700) as chat:
        library = service.Library(tmp_path, chat, embedder, None)
        answer = asyncio.run(library.answer("When does shop 1 open?"))
        asked = chat.requests[-1].prompt[-1]["content"]
    assert answer.answer == "At nine." and len(answer.citations) == 1
    assert 0 < asked.count("] Shop") < 3
