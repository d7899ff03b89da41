"""The messages that docs/troubleshooting.md quotes are those of the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sdk import LLM, SamplingParams, SdkError
from tests.docs.pages import DOCS, ROOT

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^```text\n(.*?)\n", PAGE, re.MULTILINE)
#: Constant characters that a text of the source must have to count.
LEAST = 12


def texts(node: ast.AST) -> Iterator[str]:
    """The texts of a module as patterns: what is computed may be anything."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(
            re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+?"
            for part in node.values
        )
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.sub(r"\\\{\w+(?:!r)?\\\}", ".+?", re.escape(node.value))  # for format()
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


@cache
def known() -> list[tuple[list[str], str]]:
    """Every text: its constant parts, which a message must have, and the pattern."""
    folders = ("sdk", "models", "loaders", "quant", "kernels")
    files = [path for name in folders for path in sorted((ROOT / name).rglob("*.py"))]
    found = {text for path in files for text in texts(ast.parse(path.read_text(encoding="utf-8")))}
    parts = {text: re.sub(r"\\(.)", r"\1", text).split(".+?") for text in found}
    return [(kept, text) for text, kept in parts.items() if len("".join(kept)) >= LEAST]


def unknown(message: str) -> str:
    """What no text of the source explains, without the name of the file at the beginning."""
    explained = [False] * len(message)
    patterns = (text for parts, text in known() if all(part in message for part in parts))
    for pattern in patterns:
        for found in re.finditer(pattern, message, re.DOTALL):
            explained[found.start() : found.end()] = [True] * (found.end() - found.start())
    rest = "".join(one if not seen else "\0" for one, seen in zip(message, explained, strict=True))
    return re.sub(r"^(?:model\.gguf|FOLDER|org/name|config): ", "", rest).replace("\0", "")


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_source(message: str) -> None:
    assert len(unknown(message)) < LEAST, unknown(message)


def test_a_message_that_changed_is_noticed() -> None:
    assert len(MESSAGES) > 20
    for message in MESSAGES:
        words = message.split(" ")
        other = " ".join([*words[: len(words) // 2], "elsewhere entirely", *words[::-1]])
        assert len(unknown(other)) >= LEAST, other


def test_messages_are_printed_as_quoted(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2)
    printed = []

    def note(call: object) -> None:
        with pytest.raises((SdkError, TypeError)) as raised:
            call()  # type: ignore[operator]
        printed.append(str(raised.value).replace(f"{tmp_path}/", "").partition("\n")[0])

    note(lambda: LLM(smollm2, memory="100MiB", max_model_len=4096))
    note(lambda: LLM(smollm2, max_model_len=100000))
    note(lambda: SamplingParams(temperatur=1))  # type: ignore[call-arg]
    with LLM(smollm2, max_model_len=256) as llm:
        note(lambda: llm.generate("word " * 1000))
        note(lambda: llm.classify("word"))
        note(lambda: llm.add_lora("a", tmp_path))
    note(lambda: llm.generate("word"))
    assert [one for one in printed if one not in MESSAGES] == []
    assert len(set(printed)) == 7
