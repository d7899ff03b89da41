"""The program of the batch guide loses no answer when it is interrupted or killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks

ROWS = 12
SAVED = 5

#: Stops when the program has got, and therefore written, ``SAVED`` answers.
HARNESS = """
import sys, threading
class Stops(LLM):
    def as_completed(self, *args, **kwargs):
        for count, pair in enumerate(super().as_completed(*args, **kwargs)):
            if count == {saved}:
                print("stopped", flush=True)
                threading.Event().wait()
            yield pair
if __name__ == "__main__":
    kind = Stops if "stop" in sys.argv else LLM
    with kind({model!r}, max_model_len=256, max_num_seqs=2) as llm:
        print(run(Path("reviews.jsonl"), Path("moods.jsonl"), llm))
"""


@pytest.fixture
def program(tmp_path: Path, golden: Path) -> Path:
    """The guide's own definitions, with a small model and more rows."""
    code = [block.code for block in blocks((DOCS / "guides" / "batch.md").read_text())]
    [defined] = [i for i, text in enumerate(code) if "def run(" in text]
    model = str(golden / "arch-llama3" / "hf")
    source = "\n".join(code[: defined + 1]) + HARNESS.format(saved=SAVED, model=model)
    path = tmp_path / "batch.py"
    # more than the three rows that the guide writes
    path.write_text(
        source.replace("reviews = [", f"reviews = [f'Row {{i}}' for i in range({ROWS})] or [")
    )
    return path


def start(program: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(program), *words],
        cwd=program.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(program: Path) -> dict[int, str]:
    """The rows of the result, each of which is there once."""
    lines = (program.parent / "moods.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    found = {row["row"]: json.dumps([row["text"], row["mood"], row["end"]]) for row in rows}
    assert len(found) == len(rows), "a row was answered twice"
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL], ids=["SIGINT", "SIGKILL"])
def test_the_guide_goes_on_where_it_was_stopped(program: Path, kind: signal.Signals) -> None:
    whole = start(program)
    out, err = whole.communicate(timeout=200)
    assert out.split() == [str(ROWS)], err
    expected = answers(program)
    (program.parent / "moods.jsonl").unlink()

    stopped = start(program, "stop")
    assert stopped.stdout is not None and stopped.stdout.readline() == "stopped\n"
    stopped.send_signal(kind)
    _, err = stopped.communicate(timeout=100)
    assert stopped.returncode == -kind, err
    saved = answers(program)
    assert len(saved) == SAVED and saved.items() <= expected.items()

    with (program.parent / "moods.jsonl").open("a") as out_file:
        out_file.write('{"row": 11, "text": "Row 1')  # as if it was killed while it wrote
    rest = start(program)
    out, err = rest.communicate(timeout=200)
    assert out.split() == [str(ROWS - SAVED)], err
    assert answers(program) == expected
