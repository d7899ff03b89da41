"""``embedlm run`` with a schema, a pattern, a grammar or choices."""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from sdk.cli import build_parser, main, structure_arguments
from sdk.structured import library

Captured = pytest.CaptureFixture[str]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}},
          "required": ["name"], "additionalProperties": False}  # fmt: skip


def parse(*argv: str) -> argparse.Namespace:
    return build_parser("run").parse_args(["run", *argv])


def found(*argv: str) -> Any:
    form = structure_arguments.structure(parse(*argv))
    return None if form is None else (form.kind, getattr(form, form.kind))


def test_texts_and_files_give_the_structure(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "a: grammar"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text("start: /a+/")
    assert found() is None
    assert found("--json-schema", str(schema)) == ("json", SCHEMA)
    assert found("--json-schema", " " + json.dumps(SCHEMA)) == ("json", SCHEMA)
    assert found("--regex", "a+") == ("regex", "a+")
    assert found("--choice", "yes", "--choice", "no: never") == ("choice", ("yes", "no: never"))
    assert found("--grammar", str(grammar)) == ("grammar", "start: /a+/")
    assert found("--grammar", 'root ::= "a"') == ("grammar", 'root ::= "a"')
    long = 'start: "' + "a" * 5000 + '"'
    assert found("--grammar", long) == ("grammar", long)


def test_a_schema_may_come_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(json.dumps(SCHEMA),))
    writer.start()
    assert found("--json-schema", str(pipe)) == ("json", SCHEMA)
    writer.join()


def test_a_real_answer_has_the_structure(smollm2: Path, tmp_path: Path, capsys: Captured) -> None:
    ask = ["run", str(smollm2), "-p", "Name a city.", "--memory", "1GiB", "--max-model-len", "256"]
    assert main([*ask, "--json-schema", json.dumps(SCHEMA), "--max-tokens", "9"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["name"] and len(answer["name"]) <= 8
    assert main([*ask, "--choice", "Paris", "--choice", "Rome", "--raw"]) == 0
    assert capsys.readouterr().out in ("Paris\n", "Rome\n")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--json-schema", "none.json"], "--json-schema: expected a file or JSON .* 'none.json'"),
        (["--json-schema", "{"], "--json-schema: it is not valid JSON"),
        (["--json-schema", "."], "which cannot be read"),
        (["--json-schema", "LIST"], "--json-schema: expected a JSON object"),
        (["--json-schema", "LATIN"], "--json-schema: expected text in UTF-8"),
        (["--json-schema", "HUGE"], "--json-schema: expected a file of at most 4194304 bytes"),
        (["--json-schema", "\0"], "cannot be read .embedded null byte"),
        (["--grammar", "my.gbnf"], "--grammar: expected a file or the text of a grammar"),
        (["--grammar", ""], "--grammar: expected a file or the text of a grammar, found ''"),
        (["--regex", ""], "--regex: expected a non-empty string"),
        (["--choice", ""], "--choice: expected non-empty strings"),
        (["--choice", "a"] * 10_001, "--choice: expected 1 to 10000 strings"),
    ],
)
def test_mistakes_are_one_line_before_the_model_is_loaded(
    argv: list[str],
    words: str,
    golden: Path,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "LIST").write_text("[]")
    (tmp_path / "LATIN").write_bytes(b"\xff")
    (tmp_path / "HUGE").write_bytes(b" " * (2**22 + 1))
    assert main(["run", str(golden / "gguf-Q8_0" / "model.gguf"), "-p", "x", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("embedlm: ") and error.count("\n") == 1
    assert re.search(words, error), error


def test_a_structure_that_is_not_supported_is_one_line(smollm2: Path, capsys: Captured) -> None:
    ask = ["run", str(smollm2), "-p", "x", "--memory", "1GiB", "--max-model-len", "256"]
    assert main([*ask, "--regex", "(?=a)b"]) == 2
    assert "regex" in capsys.readouterr().err


def test_only_one_structure_may_be_given(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "-p", "x", "--regex", "a", "--choice", "b"])
    assert ended.value.code == 2
    assert "argument --choice: not allowed with argument --regex" in capsys.readouterr().err


def test_a_missing_library_is_named(
    golden: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    library.library.cache_clear()
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    assert main(["run", str(golden / "gguf-Q8_0" / "model.gguf"), "-p", "x", "--regex", "a"]) == 2
    assert "--regex: structured output needs the package llguidance" in capsys.readouterr().err
    library.library.cache_clear()
