"""Everything public stands in docs/api.md, and the index of the docs leads somewhere."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from sdk import (
    LLM,
    Alternative,
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    LLMTokenizer,
    MemoryPlan,
    PoolingRequestOutput,
    RequestOutput,
    RerankOutput,
)
from sdk.api.config import EngineConfig
from sdk.api.outputs import PoolingOutput, ScoringOutput

DOCS = Path(__file__).parents[2] / "docs"
#: Fields that hold nothing in this release, and those that say how a GPU's plan was made.
UNSAID = {"tokenizer_mode", "layers_away", "read"}


@pytest.fixture(scope="module")
def api() -> str:
    return (DOCS / "api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "kind",
    [
        RequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        PoolingRequestOutput,
        PoolingOutput,
        ClassificationOutput,
        RerankOutput,
        ScoringOutput,
        MemoryPlan,
        Alternative,
    ],
)
def test_every_field_of_an_output_is_documented(kind: type, api: str) -> None:
    part = api.partition("## What comes back")[2].partition("## Quantizing")[0]
    tuples: tuple[str, ...] = getattr(kind, "_fields", ())
    names = set(tuples or [field.name for field in fields(kind)]) - UNSAID
    assert [name for name in names if not re.search(rf"\b{name}\b", part)] == []


def test_every_option_is_documented(api: str) -> None:
    part = api.partition("## `LLM(model, **options)`")[2].partition("## Methods")[0]
    names = {field.name for field in fields(EngineConfig)} - {"model", *UNSAID}
    assert (
        sorted(name for name in names if f"`{name}`" not in part and f"{name}=" not in part) == []
    )


@pytest.mark.parametrize("kind", [LLM, LLMTokenizer])
def test_every_method_is_documented(kind: type, api: str) -> None:
    names = [name for name in dir(kind) if not name.startswith("_")]
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", api)) == []


def test_the_index_leads_to_pages_and_headings_that_exist() -> None:
    for page in (DOCS / "README.md", DOCS / "api.md", DOCS / "glossary.md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in link:
                continue
            name, _, heading = link.partition("#")
            target = DOCS / name if name else page
            assert target.exists(), link
            if heading:
                titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                assert heading in {_anchor(title) for title in titles}, link
    listed = (DOCS / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert [page for page in sorted(pages) if f"]({page})" not in listed] == []


def test_the_source_files_that_pages_name_exist() -> None:
    root = DOCS.parent
    pages = [*DOCS.rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    # dated entries name files as they were
    pages = [page for page in pages if page.parent.name != "log"]
    folders = "sdk|kernels|models|loaders|quant|tests"
    found = [
        (page.name, name)
        for page in pages
        for name in re.findall(
            rf"\b((?:{folders})/[\w/.-]+\.(?:py|hpp|cpp|json))\b", page.read_text(encoding="utf-8")
        )
    ]
    assert len(found) > 50
    assert [one for one in found if not (root / one[1]).exists()] == []


def _anchor(title: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
