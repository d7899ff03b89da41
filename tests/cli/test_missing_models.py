"""A model that is missing or broken is named by every command before anything else."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from sdk.cli import COMMANDS, build_parser, main

Captured = pytest.CaptureFixture[str]
#: Every command that takes a model, with something else that is wrong or missing.
COMMAND_LINES = [
    ["run", "MODEL"],
    ["run", "--model", "MODEL"],
    ["run", "MODEL", "--raw"],
    ["inspect", "MODEL", "--kernels"],
    ["plan", "MODEL", "--memory", "much"],
    ["quantize", "MODEL", "out", "--scheme", "q4_k_m"],
    ["quantize", "MODEL", "out", "--calibration", "/nowhere.txt"],
    ["eval", "MODEL", "--text", "/nowhere.txt"],
    ["eval", "--text", "/nowhere.txt", "--reference", "MODEL", "GOOD"],
    ["serve", "MODEL", "--kept-responses", "much"],
    ["serve", "GOOD", "other=MODEL", "--drain-seconds", "-1"],
    ["worker", "MODEL", "--connect", "nowhere", "--token-file", "/nowhere.txt"],
    ["bench", "MODEL", "--output-len", "1"],
    ["bench", "GOOD", "--gguf", "MODEL", "--output-len", "1"],
    ["bench serve", "MODEL"],
    ["tune", "MODEL"],
    ["tune serve", "MODEL"],
    ["simulate", "--measure", "/nowhere/costs.json", "--model", "MODEL"],
]


def missing(folder: Path) -> Path:
    return folder / "missing.gguf"


def empty_file(folder: Path) -> Path:
    (folder / "empty.gguf").touch()
    return folder / "empty.gguf"


def empty_folder(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def folder_without_config(folder: Path) -> Path:
    (folder / "weights").mkdir()
    (folder / "weights" / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    return folder / "weights"


def pipe(folder: Path) -> Path:
    """As unreadable as a file without permissions, which root reads anyway."""
    os.mkfifo(folder / "pipe.gguf")
    return folder / "pipe.gguf"


def other_file(folder: Path) -> Path:
    (folder / "picture.gguf").write_bytes(b"\x89PNG\r\n" * 100)
    return folder / "picture.gguf"


@pytest.mark.parametrize(
    "make", [missing, empty_file, empty_folder, folder_without_config, pipe, other_file]
)
def test_a_model_that_is_not_there_is_named_first(
    make: Callable[[Path], Path],
    tmp_path: Path,
    golden: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))  # run has no prompt either
    monkeypatch.chdir(tmp_path)
    words = {
        "MODEL": str(path),
        "GOOD": str(golden / "arch-llama3" / "hf"),
        "other=MODEL": f"other={path}",
    }
    for command in COMMAND_LINES:
        assert main([words.get(word, word) for word in command]) == 2, command
        out, err = capsys.readouterr()
        [line] = err.splitlines()
        said = re.sub("--(reference|gguf): expected a model; ", "", line)
        assert said.startswith(f"embedlm: {path}: ") and not out, command


def test_an_empty_name_is_not_the_working_directory(capsys: Captured) -> None:
    for command in (["run", ""], ["inspect", ""], ["bench", ""], ["plan", ""]):
        assert main(command) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line == "embedlm: model: expected a path or a hub id, found '' (an unset variable?)"


def test_every_command_that_takes_a_model_looks_for_it() -> None:
    with_models = {line[0] for line in COMMAND_LINES}
    assert with_models == COMMANDS.keys() - {"doctor", "keys", "fetch-demo", "cache"}
    for command in with_models:
        assert hasattr(import_module(COMMANDS[command]), "model_arguments")


def test_random_weights_and_names_of_servers_are_no_files() -> None:
    def names(*line: str) -> list[str]:
        args = build_parser(line[0]).parse_args(line)
        found: list[str] = args.model_arguments(args)
        return found

    assert names("bench", "gpu") == names("bench", "random-1b") == names("bench") == []
    assert names("bench serve", "gpt-4o", "--url", "http://127.0.0.1:1") == []
    assert names("run") == names("serve") == names("tune serve") == []


def test_a_prompt_without_a_model_gets_the_right_call(capsys: Captured) -> None:
    assert main(["run", "What is the capital of France?"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("to ask the demo model: embedlm run --prompt TEXT")


def test_options_may_stand_between_positional_arguments() -> None:
    line = ["run", "model.gguf", "--max-tokens", "9", "hi"]
    args = build_parser("run").parse_args(line)
    assert (args.file, args.text, args.max_tokens) == ("model.gguf", "hi", 9)
    line = ["serve", "a.gguf", "--port", "1", "b.gguf"]
    assert build_parser("serve").parse_args(line).models == ["a.gguf", "b.gguf"]
    line = ["run", "model.gguf", "--seed", "1", "--", "-hi"]
    assert build_parser("run").parse_args(line).text == "-hi"
