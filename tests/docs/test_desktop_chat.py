"""docs/examples/gui.py in a window on a virtual display, driven by keys and buttons."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
import tkinter as tk
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import SamplingParams
from tests.docs.test_examples import load

GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    """The name of a display that nobody sees."""
    found = shutil.which("Xvfb")
    assert found is not None, "Xvfb is missing: run `make browser`"
    reader, writer = os.pipe()
    command = [found, "-displayfd", str(writer), "-screen", "0", "1024x768x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[writer], stderr=subprocess.DEVNULL)
    os.close(writer)
    with os.fdopen(reader) as numbers:
        name = f":{numbers.readline().strip()}"
    yield name
    server.terminate()
    server.wait()


@pytest.fixture
def window(display: str) -> Iterator[Callable[..., Any]]:
    """``window(model, params)``: the application's window."""
    opened = []

    def make(model: Path, params: SamplingParams | None = None) -> Any:
        gui = load("gui")
        made = gui.Window(tk.Tk(screenName=display), gui.Chat(model, params))
        opened.append(made)
        return made

    yield make
    for one in opened:
        if one.chat.running:
            one.close()


def until(window: Any, true: Callable[[], bool]) -> None:
    """Run the window until something is true."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, shown(window)
        window.root.update()
        time.sleep(0.002)


def shown(window: Any) -> str:
    return str(window.shown.get("1.0", "end")).strip()


def type_in(window: Any, text: str) -> None:
    """Type a question and Return."""
    window.line.focus_force()
    window.root.update()
    for character in text:
        window.line.event_generate("<Key>", keysym="space" if character == " " else character)
    window.line.event_generate("<Return>")


def test_a_typed_question_gets_an_answer_behind_a_bar_that_fills(
    window: Callable[..., Any], smollm2: Path
) -> None:
    opened = window(smollm2, GREEDY)
    assert opened.busy and str(opened.button["state"]) == "disabled"
    parts = []

    def ready() -> bool:
        parts.append(float(opened.bar["value"]))
        return not opened.busy

    until(opened, ready)
    assert parts[0] == 0 and max(parts) == 1 and parts == sorted(parts)
    assert not opened.bar.winfo_ismapped() and opened.button["text"] == "Ask"
    type_in(opened, "What is a river")
    assert opened.busy and opened.button["text"] == "Stop"
    until(opened, lambda: not opened.busy)
    first = shown(opened)
    assert first.startswith("> What is a river\n") and len(first) > len("> What is a river\n") + 10
    type_in(opened, "Why")
    until(opened, lambda: not opened.busy)
    assert shown(opened).startswith(first) and "> Why\n" in shown(opened)
    opened.new.invoke()
    assert shown(opened) == ""
    type_in(opened, "What is a river")
    until(opened, lambda: not opened.busy)
    assert shown(opened) == first  # nothing of the old conversation


def test_the_button_stops_an_answer_and_the_next_question_runs(
    window: Callable[..., Any], smollm2: Path
) -> None:
    opened = window(smollm2, ENDLESS)
    until(opened, lambda: not opened.busy)
    type_in(opened, "Tell me a story")
    until(opened, lambda: len(shown(opened)) > 60)
    opened.button.invoke()
    until(opened, lambda: not opened.busy)
    assert len(shown(opened).split()) < 600
    before = shown(opened)
    type_in(opened, "Go on")
    until(opened, lambda: len(shown(opened)) > len(before) + 40)
    opened.close()  # in the middle of the answer
    assert not opened.chat.running


def test_a_question_that_is_too_long_is_answered_by_its_error(
    window: Callable[..., Any], smollm2: Path
) -> None:
    opened = window(smollm2, SamplingParams(temperature=0, max_tokens=12))
    until(opened, lambda: not opened.busy)
    opened.line.insert(0, "word " * 5000)
    opened.button.invoke()
    until(opened, lambda: not opened.busy)
    assert "[" in shown(opened) and "4096" in shown(opened)
    type_in(opened, "Hello")  # the conversation goes on without it
    until(opened, lambda: not opened.busy)
    assert "[" not in shown(opened).split("> Hello")[1]


def test_what_is_not_a_model_is_told_in_the_window(
    window: Callable[..., Any], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    opened = window(broken)
    until(opened, lambda: shown(opened) != "")
    assert "broken.gguf" in shown(opened) and opened.busy
    opened.close()


def test_ctrl_c_in_the_terminal_closes_the_window_and_ends_the_process(
    display: str, smollm2: Path
) -> None:
    code = (
        "import runpy, sys, threading, os, signal, tkinter\n"
        "tkinter.Tk.mainloop = lambda root, main=tkinter.Tk.mainloop: (root.after(300, lambda: "
        "os.kill(os.getpid(), signal.SIGINT)), main(root))\n"
        "sys.argv = ['gui.py', sys.argv[1]]\n"
        "runpy.run_path('docs/examples/gui.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(smollm2)],
        env={**os.environ, "DISPLAY": display},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_window_that_is_closed_while_its_model_loads_cancels_the_load(
    display: str, smollm2: Path
) -> None:
    gui = load("gui")

    class Slow(gui.Chat):  # type: ignore[misc]  # of a module that is loaded by its path
        def _progress(self, *news: Any) -> bool:
            while not self._closed:
                time.sleep(0.001)
            return bool(super()._progress(*news))

    before = threading.active_count()
    opened = gui.Window(tk.Tk(screenName=display), Slow(smollm2))
    opened.close()
    assert not opened.chat.running and threading.active_count() == before
    kinds = []
    while not opened.chat.events.empty():
        kinds.append(opened.chat.events.get().kind)
    assert set(kinds) == {"loading"}
