"""The retrieval guide's search on our own pages, with questions whose pages are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdk import LLM
from tests.docs.pages import DOCS, PAGES, blocks, name_of

QUESTIONS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("questions.json").read_text("utf-8")
)
#: Not a page for readers: what was measured.
LEFT_OUT = "docs/log"


def test_questions_name_pages_that_exist() -> None:
    known = {path.relative_to(DOCS.parent).as_posix() for path in DOCS.rglob("*")} | {"README.md"}
    assert len(QUESTIONS) == 32
    assert not [page for one in QUESTIONS for page in one["pages"] if page not in known]


@pytest.fixture(scope="module")
def guide(minilm: Path) -> Any:
    """The names of the guide's code, over our pages."""
    names: dict[str, Any] = {}
    code = [block.code for block in blocks((DOCS / "guides" / "rag.md").read_text("utf-8"))]
    for source in code[:4]:
        source = source.replace('"all-MiniLM-L6-v2"', repr(str(minilm)))
        if source.startswith("import re"):  # the guide's own folder
            source = source[: source.index("pages = {")]
            exec(compile(source, "rag.md", "exec"), names)
            names["passages"] = [
                part
                for page in PAGES
                if not name_of(page).startswith(LEFT_OUT)
                for part in names["passages_of"](page.read_text("utf-8"), name_of(page))
            ]
        else:
            exec(compile(source.partition("best = ")[0], "rag.md", "exec"), names)
    yield names
    llm: LLM = names["embedder"]
    llm.close()


def hits(names: Any, search: Callable[[str], Sequence[int]]) -> tuple[float, float]:
    """hit@1 and hit@5: a page counts once, at its best passage."""
    first = five = 0
    for one in QUESTIONS:
        pages = list(dict.fromkeys(names["passages"][i][0] for i in search(one["question"])))
        first += pages[0] in one["pages"]
        five += bool(set(pages[:5]) & set(one["pages"]))
    return first / len(QUESTIONS), five / len(QUESTIONS)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_search_by_meaning_finds_pages_that_words_do_not(
    guide: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    count = len(guide["passages"])

    def order(scores: Any) -> Sequence[int]:
        return np.argsort(-np.asarray(scores), kind="stable").tolist()  # type: ignore[no-any-return]

    found = {
        "BM25": hits(guide, lambda text: order(guide["words"].scores(text))),
        "all-MiniLM-L6-v2": hits(
            guide, lambda text: order(guide["vectors"] @ guide["embedded"]([text])[0])
        ),
        "both, fused": hits(guide, lambda text: guide["find"](text, count)),
    }
    with capsys.disabled():
        print(f"\n{count} passages")
        for name, (first, five) in found.items():
            print(f"| {name} | {first:.2f} | {five:.2f} |")
    assert all(five >= 3 / 4 for _, five in found.values())
    assert found["both, fused"][0] > found["BM25"][0]
