"""``.ci/gpu.py`` without a GPU: on a model of a machine with a clock of its own, and with real
processes that stand in for the interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "gpu.py"
MIB = 1 << 20


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_kit", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


kit = _load()
TEST = "tests/card/test_card_kernels.py::test_product"


class Card:
    """A machine with a card: what is run there takes its time on a clock that is only counted.

    ``trouble``: what fails (``exit``), hangs, or takes all its time after it has written results
    (``slow``), by a word of its command.
    """

    def __init__(self, **trouble: str) -> None:
        self.trouble, self.now = trouble, 1000.0
        self.commands: list[str] = []
        self.environments: list[dict[str, str]] = []  # what each command gets beside the call's own
        self.missing = ""
        self.tools = {"ncu", "compute-sanitizer"}
        self.ids = [f"{TEST}[{i}]" for i in range(3)]

    def clock(self) -> float:
        return self.now

    def cores(self) -> int:
        return 16

    def tool(self, name: str) -> str | None:
        return f"/cuda/{name}" if name in self.tools else None

    def run(self, commands: Sequence[Any], seconds: float, tick: Callable[[], None]) -> list[Any]:
        assert seconds > 0
        codes = [self._one(command, seconds) for command in commands]
        tick()
        self.now += max(took for _, took in codes)
        return [code for code, _ in codes]

    def _one(self, command: Any, seconds: float) -> tuple[int | None, float]:
        line = " ".join(map(str, command.argv))
        self.commands.append(line)
        self.environments.append(dict(command.more))
        how = next((how for word, how in self.trouble.items() if word in line), "")
        took = self._does(command, line, how)
        if how in ("hang", "slow") or took > seconds:
            return None, seconds
        return {"exit": 1}.get(how, 0), min(took, seconds)

    def _does(self, command: Any, line: str, how: str) -> float:
        """Write what the command writes; returns its seconds."""
        argv = [str(word) for word in command.argv]
        command.log.write_text("it ended\n")
        if "-c" in argv:
            command.log.write_text(f"missing: {self.missing}\npython 3.12\nlibtriton.so 12ab\n")
            return 2.0
        if "cache.py" in line:
            return 2.0
        if "pytest" in argv and "compute-sanitizer" not in line:
            text = "".join(f"{name} PASSED\n" for name in self.ids[:2])
            text += f"{self.ids[2]} {'FAILED' if how == 'exit' else '' if how else 'PASSED'}\n"
            command.log.write_text(text)
            return 150.0
        if "--json" in argv and how != "hang":
            for option in ("--json", "--markdown"):
                Path(argv[argv.index(option) + 1]).write_text("results")
        if "tune" in argv and how != "hang":
            folder = Path(argv[argv.index("--out") + 1])
            folder.mkdir(exist_ok=True)
            (folder / "card.json").write_text("{}")
        if "--seconds" in argv:
            return float(argv[argv.index("--seconds") + 1]) + 12  # Python starts and stops
        return 40.0


def call(folder: Path, card: Card, *names: str, seconds: str = "") -> Any:
    """One call; the folder of results is emptied before, as a machine lent for one would."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    parts = kit.chosen_parts(names)
    given = kit.chosen_seconds(seconds, parts)
    if "bench" in parts and "first" in parts:
        parts.remove("first")
    made = kit.Kit(parts, given, card, python="python3", out=folder / "out", build=folder / "build")
    begin = card.now
    made.run()
    assert card.now - begin <= given + 1e-6, made.failed
    files = [path for path in (folder / "out").rglob("*") if path.is_file()]
    assert len(files) <= 8, files
    assert all(path.stat().st_size < 16 * MIB for path in files)
    made.files = sorted(str(path.relative_to(folder / "out")) for path in files)
    return made


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


TROUBLE: dict[str, dict[str, str]] = {
    "nothing": {},
    "tests fail": {"tests/card": "exit"},
    "tests hang": {"tests/card": "hang"},
    "a row hangs": {"bench gpu": "slow"},
    "the benchmark hangs": {"bench gpu": "hang"},
    "the benchmark crashes": {"bench gpu": "exit"},
    "the card is lost": {"tests/card": "hang", "bench": "hang", "cuda": "hang", "tune": "hang"},
    "tuning crashes": {" tune ": "exit"},
    "ncu hangs": {"/cuda/ncu": "hang"},
    "the sanitizer hangs": {"tests/card": "exit", "compute-sanitizer": "hang"},
    "the cache hangs": {"cache.py": "hang"},
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_three_calls_end_in_time_with_few_files_whatever_fails(
    trouble: str, tmp_path: Path
) -> None:
    card = Card(**TROUBLE[trouble])
    begin, limits = card.now, {"A": 300, "B": 330, "C": 160}
    for name, limit in limits.items():
        at = card.now
        made = call(tmp_path, card, name)
        assert card.now - at <= limit
        assert made.files, "each call leaves something"
        assert bool(made.failed) == ((trouble, name) in FAILING) or trouble == "the cache hangs"
    assert card.now - begin <= 780


FAILING = {
    *(("tests fail", call) for call in "AC"),
    *(("tests hang", call) for call in "AC"),
    *((trouble, call) for call in "AB" for trouble in ("a row hangs", "the benchmark hangs")),
    *(("the benchmark crashes", call) for call in "AB"),
    *(("the card is lost", call) for call in "ABC"),
    ("tuning crashes", "C"),
    ("ncu hangs", "B"),
    *(("the sanitizer hangs", call) for call in "AC"),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_everything_in_one_call_ends_in_time_too(trouble: str, tmp_path: Path) -> None:
    made = call(tmp_path, Card(**TROUBLE[trouble]))
    assert "tests.txt" in made.files


def test_all_parts_together_leave_eight_files(tmp_path: Path) -> None:
    made = call(tmp_path, Card(**{"tests/card": "exit"}))
    assert made.files == [
        *("bench.json", "bench.md", "bench.txt", "ncu.txt", "sanitize.txt", "tests.txt"),
        *("tune.txt", "tuned/card.json"),
    ]


def test_results_that_were_there_stay_though_a_later_part_hangs(tmp_path: Path) -> None:
    made = call(tmp_path, Card(**{"bench gpu": "slow", "/cuda/ncu": "hang"}), "B")
    assert made.files == ["bench.json", "bench.md", "bench.txt", "ncu.txt"]
    assert (tmp_path / "out" / "bench.json").read_text() == "results"


def test_the_sanitizer_looks_at_what_failed_and_tuning_gets_the_time_otherwise(
    tmp_path: Path,
) -> None:
    card = Card(**{"tests/card": "exit"})
    call(tmp_path, card, "A")
    made = call(tmp_path, card, "C")
    ran = [line for line in card.commands if "/cuda/compute-sanitizer" in line]
    assert [line.split()[2] for line in ran] == ["memcheck", "racecheck"]
    assert all(f"{TEST}[2]" in line for line in ran)
    own = str(tmp_path / "build" / "sanitized")  # kernels that travelled name no lines
    more = dict(zip(card.commands, card.environments, strict=True))
    assert {more[line]["TRITON_CACHE_DIR"] for line in ran} == {own}
    assert "sanitize.txt" in made.files
    card = Card()
    call(tmp_path, card, "A")
    made = call(tmp_path, card, "C")
    assert not [line for line in card.commands if "/cuda/compute-sanitizer" in line]
    (tuned,) = [line for line in card.commands if " tune " in line]
    assert float(tuned.split()[-1]) > 125


def test_the_test_that_hung_counts_as_failed(tmp_path: Path) -> None:
    call(tmp_path, Card(**{"tests/card": "hang"}), "A")
    assert set((tmp_path / "build" / "failed-tests.txt").read_text().splitlines()) == {f"{TEST}[2]"}
    assert f"{TEST}[2]" in (tmp_path / "out" / "tests.txt").read_text()


def test_the_first_lines_say_what_the_machine_has(tmp_path: Path) -> None:
    call(tmp_path, Card(), "A")
    lines = (tmp_path / "out" / "tests.txt").read_text().splitlines()
    assert lines[:2] == ["python 3.12", "libtriton.so 12ab"]


def test_without_tools_and_pytest_the_rest_runs(tmp_path: Path) -> None:
    card = Card()
    card.missing, card.tools = "pytest transformers", set()
    made = call(tmp_path, card)
    assert made.failed == ["tests (no pytest)"]
    assert {"bench.json", "tuned/card.json"} <= set(made.files)


def test_tuning_goes_on_after_a_process_was_lost_and_gives_up_at_last(tmp_path: Path) -> None:
    card = Card(**{" tune ": "exit"})
    card._does = lambda command, line, how: (
        5.0
        if " tune " in line
        else Card._does(  # type: ignore
            card, command, line, how
        )
    )
    made = call(tmp_path, card, "tune", seconds="600")
    assert made.failed == [f"tune-{i} (exit code 1)" for i in (1, 2, 3, 4)]


def test_operators_come_before_engines_and_those_before_the_rest() -> None:
    files = kit.test_files()
    assert files[:2] == [f"tests/card/test_card_{name}.py" for name in ("kernels", "engine")]
    assert "tests/card/test_card_ranks.py" in files[2:]


def test_more_time_is_shared_in_the_same_proportions(tmp_path: Path) -> None:
    card = Card()
    call(tmp_path, card, seconds="3600")
    (bench,) = [line for line in card.commands if "bench gpu" in line]
    assert float(bench.split("--seconds ")[1].split()[0]) > 3 * 375


FAKE = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo "missing: $MISSING"; exit; fi
echo "$*" >>"$NOTED"
"""


def script(tmp_path: Path, *parts: str, **given: str) -> tuple[int, str, list[str]]:
    """The script as a process: exit status, what it printed, and the commands that it ran."""
    fake, noted = tmp_path / "python", tmp_path / "noted"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    own = {"PYTHON": str(fake), "NOTED": str(noted), "OUT": str(tmp_path / "out"), "MISSING": ""}
    own["GPU_LOGS"] = str(tmp_path / "logs")  # other tests run at the same time
    others = {k: v for k, v in os.environ.items() if k not in ("PARTS", "GPU_SECONDS", "ROWS")}
    done = subprocess.run(
        [sys.executable, SCRIPT, *parts],
        env={**others, **own, **given},
        capture_output=True,
        text=True,
    )
    commands = noted.read_text().splitlines() if noted.exists() else []
    return done.returncode, done.stdout + done.stderr, commands


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"PARTS": "A D"}, "expected parts of A, B, C, tests, first, bench, "),
        ({"GPU_SECONDS": "59"}, "GPU_SECONDS: expected seconds from 60 on, found '59'"),
        ({"GPU_SECONDS": "soon"}, "GPU_SECONDS: expected seconds from 60 on, found 'soon'"),
        ({"GPU_SECONDS": "nan"}, "GPU_SECONDS: expected seconds from 60 on, found 'nan'"),
        ({"GPU_SECONDS": "inf"}, "GPU_SECONDS: expected seconds from 60 on, found 'inf'"),
        ({"ROWS": "w4,w5"}, "ROWS: expected names of limits, w4, "),
        ({"ROWS": "w4", "PARTS": "A"}, "ROWS: expected the part bench, found tests, first"),
        ({"TESTS": "x", "PARTS": "A"}, "TESTS: expected the part sanitize, found tests, first"),
        ({"MISSING": "triton"}, "expected torch, triton, safetensors, numpy, found no triton; "),
        ({"PYTHON": "/no/python"}, "PYTHON: expected an interpreter, found /no/python: "),
        ({"PYTHON": "/bin/true"}, "PYTHON: expected an interpreter, found /bin/true: no message"),
        ({"OUT": "/dev/null/x"}, "expected a folder for results, found "),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_one_line_before_anything_runs(
    tmp_path: Path, given: dict[str, str], line: str
) -> None:
    status, text, commands = script(tmp_path, **given)
    assert (status, commands) == (2, [])
    assert text.startswith("gpu.py: ") and line in text and text.count("\n") == 1


def test_parts_are_named_by_arguments_or_the_environment(tmp_path: Path) -> None:
    status, _, commands = script(tmp_path, "tune", PARTS="bench")
    tunes = [line for line in commands if " tune " in line]
    assert (status, len(tunes)) == (0, 1)
    assert not [line for line in commands if "bench" in line]


def run_real(folder: Path, seconds: float, *scripts: str) -> tuple[list[int | None], list[str]]:
    commands = []
    for i, text in enumerate(scripts):
        commands.append(kit.Command(["bash", "-c", text], folder / f"{i}.log"))
    machine = kit.Processes(stopping=0.6, killing=0.3)
    begin = time.monotonic()
    codes = machine.run(commands, seconds, lambda: None)
    assert time.monotonic() - begin < seconds + 20  # not minutes; no more is said of a busy machine
    return codes, [command.log.read_text() for command in commands]


def test_a_process_that_is_late_may_write_what_it_has(tmp_path: Path) -> None:
    polite = "trap 'echo results; exit 3' INT; echo begins; while true; do sleep 0.1; done"
    codes, texts = run_real(tmp_path, 2.5, polite, "echo done; exit 4")
    assert codes == [None, 4]
    assert texts == ["begins\nresults\n", "done\n"]


def test_no_process_is_left_not_even_one_in_a_session_of_its_own(tmp_path: Path) -> None:
    stubborn = "trap '' INT TERM; setsid sleep 600 & echo $!; exec sleep 600"
    codes, (text,) = run_real(tmp_path, 2.5, stubborn)
    assert codes == [None]
    deadline = time.monotonic() + 20
    while Path(f"/proc/{text.strip()}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{text.strip()}/exe").exists()


def test_the_tree_that_travels_is_below_its_limit() -> None:
    """Tracked files, those that would be, and the cache of compiled kernels: 64 MiB may travel."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    paths = {ROOT / name for name in listed if name}
    paths |= set((ROOT / "build" / "aot-cache").glob("*"))
    sizes = {path: path.lstat().st_size for path in paths if path.is_file()}
    largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
    assert sum(sizes.values()) < 62 * MIB, largest


def run_share(folder: Path, **environment: str) -> tuple[int, str]:
    """Seven tests of a fifth of a second under the hooks of tests/card."""
    source = (ROOT / "tests" / "card" / "conftest.py").read_text()
    (folder / "conftest.py").write_text(source)
    (folder / "test_them.py").write_text(
        "import time, pytest\n"
        "@pytest.mark.parametrize('n', range(7))\n"
        "def test_n(n):\n    time.sleep(0.2)\n    assert n != 4\n"
    )
    inherited = {**os.environ, "TRITON_INTERPRET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull, folder],
        env=inherited,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_shares_have_every_test_once_and_end_in_time(tmp_path: Path) -> None:
    found = [run_share(tmp_path, CARD_TESTS_SHARE=f"{i}/3") for i in range(3)]
    seen = [
        line.split()[0] for _, text in found for line in text.splitlines() if "::test_n[" in line
    ]
    ran = [name for name in seen if not name.startswith("FAILED")]
    assert len([name for name in ran if "[" in name]) == len(set(ran)) == 7
    assert [code for code, _ in found] == [0, 1, 0]
    code, text = run_share(tmp_path, CARD_TESTS_SECONDS="0")
    assert code == 2
    assert "the time is over before test_them.py::test_n[1]" in text


@pytest.mark.slow
def test_tests_of_engines_on_a_card_hold_with_the_kernels_of_a_cpu() -> None:
    """Seconds on a card are few: a test that is wrong itself must show before."""
    arguments = ["-q", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu", "tests/card"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env={**os.environ, "CARD_TESTS_ENGINES": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^2\d passed", done.stdout, re.MULTILINE), done.stdout
