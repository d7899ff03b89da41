"""docs/examples/rag_service.py over HTTP, with the real small models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM
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


@pytest.mark.parametrize("question", ["", "x" * 2001])
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
