"""An input that cannot be read is one line with the option, the path and what was expected."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from sdk.cli import COMMANDS, build_parser, main

Captured = pytest.CaptureFixture[str]

#: A command line for each option that names a file to read, PATH; MODEL is a tiny model.
INPUTS = {
    ("run", "--image"): "run MODEL hi --image PATH",
    ("run", "--json-schema"): "run MODEL hi --json-schema PATH",
    ("run", "--grammar"): "run MODEL hi --grammar PATH",
    ("run", "--mmproj"): "run MODEL hi --mmproj PATH",
    ("run", "--lora"): "run MODEL hi --lora a=PATH",
    ("plan", "--mmproj"): "plan MODEL --mmproj PATH",
    ("quantize", "--calibration"): "quantize MODEL out --calibration PATH",
    ("eval", "--reference"): "eval MODEL --reference PATH",
    ("eval", "--text"): "eval MODEL --text PATH",
    ("serve", "--mmproj"): "serve MODEL --port 0 --mmproj PATH",
    ("serve", "--lora"): "serve MODEL --port 0 --lora a=PATH",
    ("serve", "--options"): "serve MODEL --port 0 --options PATH",
    ("serve", "--keys"): "serve MODEL --port 0 --keys PATH",
    ("serve", "--usage-file"): "serve MODEL --port 0 --usage-file PATH",
    ("worker", "--token-file"): "worker MODEL --connect 127.0.0.1:9 --token-file PATH",
    ("bench", "--gguf"): "bench MODEL --suite embed --gguf PATH",
    ("bench", "--lora"): "bench MODEL --suite lora --lora PATH --streams 1 --rounds 1",
    ("bench serve", "--mmproj"): "bench serve MODEL --mmproj PATH",
    ("bench serve", "--options"): "bench serve MODEL --options PATH",
    ("bench serve", "--trace"): "bench serve MODEL --trace PATH",
    ("keys add", "--file"): "keys add bob --file PATH",
    ("keys list", "--file"): "keys list --file PATH",
    ("keys rotate", "--file"): "keys rotate bob --file PATH",
    ("keys revoke", "--file"): "keys revoke bob --file PATH",
    ("simulate", "--costs"): "simulate --costs PATH",
    ("simulate", "--trace"): "simulate --trace PATH",
    ("simulate", "--mmproj"): "simulate --measure OUT --model MODEL --mmproj PATH",
    ("tune serve", "--mmproj"): "tune serve MODEL --slo ttft=1 --mmproj PATH",
}
#: Files and folders that are written; ``--trace`` of ``tune serve`` is always refused.
OUTPUTS = {
    *(("eval", f"--{name}") for name in ("json", "markdown", "plot")),
    ("serve", "--audit-log"),
    *(("bench", f"--{name}") for name in ("log", "json", "markdown", "plots")),
    *(("bench serve", f"--{name}") for name in ("json", "markdown", "records", "plots")),
    ("tune", "--out"),
    ("simulate", "--json"),
    ("simulate", "--measure"),
    ("tune serve", "--write"),
    ("tune serve", "--trace"),
}
#: Those of which a missing file is made.
MADE = {("serve", "--usage-file"), ("keys add", "--file")}
#: What the system says of a path; "." stands for a folder.
PATHS = {"missing": "missing", "in a file": "file/x/y", "folder": ".", "too long": 300 * "x"}


def _options(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                yield from _options(sub, f"{name} {word}")
        metavar = str(action.metavar)
        named = any(word in metavar for word in ("FILE", "PATH", "FOLDER")) or action.type is Path
        if action.option_strings and named:
            yield name, action.option_strings[-1]


def test_all_options_with_a_path_are_known_here() -> None:
    found: set[tuple[str, str]] = set()
    for command in COMMANDS:
        [commands] = (
            action
            for action in build_parser(command)._actions
            if isinstance(action, argparse._SubParsersAction)
        )
        found |= set(_options(commands.choices[command], command))
    assert found | {("eval", "--reference")} == INPUTS.keys() | OUTPUTS


CASES = [
    pytest.param(option, path, id=f"{' '.join(option)} {kind}")
    for option in INPUTS
    for kind, path in PATHS.items()
    if option not in MADE or kind != "missing"
]


@pytest.mark.quick_cases(40)
@pytest.mark.parametrize(("option", "path"), CASES)
def test_a_file_that_cannot_be_read_is_one_line(
    option: tuple[str, str],
    path: str,
    golden: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    given = str(tmp_path) if path == "." else path
    words = {"MODEL": str(golden / "gguf-Q8_0" / "model.gguf"), "OUT": "out"}
    line = [words.get(word, word).replace("PATH", given) for word in INPUTS[option].split()]
    assert main(line) == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("embedlm: ") and "Errno" not in said, said
    assert option[1].lstrip("-").replace("-", "_") in said.replace("-", "_"), said
    assert given[:200] in said and "expected" in said, said
