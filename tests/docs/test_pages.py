"""The code on the pages of docs/ and in README.md, with a real model."""

from __future__ import annotations

import ast
import gc
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sdk
from sdk import LLM, SamplingParams
from sdk.testing import tiny_adapter
from tests.docs.pages import DOCS, PAGES, Block, blocks, name_of
from tests.drafting_heads import untrained_eagle
from tests.next_token import NextToken
from tests.serving.serving import running

#: Pages whose code other tests run.
ELSEWHERE = {
    "docs/serving/openai.md": "tests/compat/test_openai.py",
    "docs/cluster/ray.md": "tests/cluster/integrations/test_ray_page.py",
    "docs/testing.md": "tests/testing/test_docs.py",
}
#: Pages that take more than a few seconds.
SLOW = {
    "docs/api.md",
    "docs/concepts/many_processes.md",
    "docs/cluster/distributed.md",
    "docs/cluster/hand_over.md",
    "docs/scheduling.md",
    "docs/speculation.md",
}
CODE = {name_of(page): blocks(page.read_text(encoding="utf-8")) for page in PAGES}
RUN = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name, found in CODE.items()
    if name not in ELSEWHERE and any(not block.not_run for block in found)
]
NOT_RUN = [(name, block) for name, found in CODE.items() for block in found if block.not_run]

Runner = Callable[[str], dict[str, Any]]


@pytest.fixture
def run_page(
    smollm2: Path,
    minilm: Path,
    golden: Path,
    tiny_next_token: NextToken,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Runner:
    """Runs a page's code in a folder with the files that pages name; returns its names."""
    for name in ("model.gguf", "large.gguf", "chat.gguf", "code.gguf"):
        (tmp_path / name).symlink_to(smollm2)
    (tmp_path / minilm.name).symlink_to(minilm)
    (tmp_path / "float16-model").symlink_to(golden / "arch-llama3" / "hf")
    for name, rank in (("sql", 8), ("style", 16)):
        tiny_adapter(tmp_path / f"{name}-adapter", smollm2, rank=rank, scale=0.1)
    (tmp_path / "glm-air").symlink_to(tiny_next_token.folder)
    untrained_eagle(tmp_path / "eagle-head", hidden=576, vocab=49152)
    monkeypatch.chdir(tmp_path)
    opened = LLM.__init__

    def short(self: LLM, model: Any = None, *, plan: Any = None, **options: Any) -> None:
        if plan is None:  # where a page sets no max_tokens, an answer ends here
            options.setdefault("max_model_len", 512)
        opened(self, model, plan=plan, **options)

    monkeypatch.setattr(LLM, "__init__", short)
    monkeypatch.setattr(sdk, "LLM", LLM)  # pages put a model of their own in its place

    def run(page: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": "__main__"}
        try:
            for block in CODE[page]:
                if block.not_run:
                    continue
                given = compile(block.given, f"{page}, given", "exec", dont_inherit=True)
                exec(given, names)
                code = "\n" * block.line + block.code
                exec(compile(code, page, "exec", dont_inherit=True), names)
        finally:
            for value in names.values():
                if isinstance(value, LLM):
                    value.close()
        return names

    yield run  # type: ignore[misc]
    gc.collect()  # engines that a page opened and did not close


@pytest.mark.quick_cases(3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_from_top_to_bottom(page: str, run_page: Runner) -> None:
    run_page(page)


@pytest.mark.slow
def test_the_application_of_the_guide_answers_streams_and_refuses(run_page: Runner) -> None:
    app = run_page("docs/guides/fastapi.md")["app"]
    with running(app) as client:
        question = {"text": "Name a river."}
        assert client.post("/answer", question).json["answer"]
        assert client.post("/stream", question).status == 200
        assert client.post("/answer", {"text": "river " * 5000}).status == 422


def known_options(call: ast.Call) -> set[str] | None:
    """The keywords that a call of ours may have; None for calls of something else."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name == "launched_llm":
        return {*inspect.signature(LLM).parameters} | {"token_file"}
    if name in ("LLM", "SamplingParams"):
        kind: Any = LLM if name == "LLM" else SamplingParams
        return set(inspect.signature(kind).parameters)
    return None


def unknown_options(code: str) -> list[str]:
    source = re.sub(r"^%.*$", "", code, flags=re.MULTILINE)  # commands of notebooks
    tree = compile(source, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
    return [
        f"{ast.unparse(node.func)}({word.arg}=)"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (known := known_options(node)) is not None
        for word in node.keywords
        if word.arg is not None and word.arg not in known
    ]


@pytest.mark.parametrize(
    ("page", "block"), NOT_RUN, ids=[f"{page}:{block.line}" for page, block in NOT_RUN]
)
def test_code_that_is_not_run_has_a_reason_and_is_still_python(page: str, block: Block) -> None:
    assert len(block.not_run.split()) >= 2, "say why"
    theirs = page.startswith("docs/coming_from/")  # code for the other library
    assert unknown_options(block.code) == [] or theirs


def test_the_check_of_code_that_is_not_run_notices_a_wrong_option() -> None:
    assert unknown_options("x = await f(LLM('m', memmory=3))") == ["LLM(memmory=)"]
    with pytest.raises(SyntaxError):
        unknown_options("x = (")


def test_most_code_runs() -> None:
    total = sum(len(found) for found in CODE.values())
    elsewhere = sum(block.not_run.startswith("make test-interop runs it") for _, block in NOT_RUN)
    assert total > 120 and len(NOT_RUN) - elsewhere < total / 6
    assert [page for page in ELSEWHERE if page not in CODE or not CODE[page]] == []
    for page, test in ELSEWHERE.items():
        text = (DOCS.parent / test).read_text(encoding="utf-8")
        assert Path(page).name in text and "exec(compile(" in text, page


def test_no_block_of_python_is_hidden_from_the_tests() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        written = re.findall(r"^\s*```\s*(?:python|py|pycon|python3)\b.*$", text, re.MULTILINE)
        assert len(written) == len(CODE[name_of(page)]), page
        words = re.findall(r"<!-- (?:given|not run):", text)
        used = [block for block in CODE[name_of(page)] if block.given or block.not_run]
        assert len(words) == len(used), f"{page}: a comment that does not stand before a block"
