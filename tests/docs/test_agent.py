"""docs/examples/agent.py: its tools keep to one folder, and it answers with a real model."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM
from sdk.testing import FakeAnswer, FakeLLM
from tests.docs.test_examples import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "notes"
    (made / "more").mkdir(parents=True)
    (made / "more" / "trip.md").write_text("We go to Rome.\nThe train leaves at nine.")
    (made / "picture.png").write_bytes(b"\x89PNG\xff")
    (made / ".hidden").write_text("secret")
    (tmp_path / "outside.txt").write_text("not yours")
    (made / "link.txt").symlink_to(tmp_path / "outside.txt")
    return made


class Confirm:
    """Answers what the user is asked, and keeps it."""

    def __init__(self, answer: bool) -> None:
        self.answer = answer
        self.shown: list[str] = []

    def __call__(self, change: str) -> bool:
        self.shown.append(change)
        return self.answer


def files(folder: Path, answer: bool = True, say: Any = print) -> tuple[Any, Confirm]:
    confirm = Confirm(answer)
    return load("agent").Files(folder, confirm, say), confirm


def test_the_folder_is_listed_read_and_searched(folder: Path) -> None:
    tools, _ = files(folder)
    assert tools.list_files() == ["more/trip.md", "picture.png"]
    assert tools.list_files("more") == ["more/trip.md"]
    assert tools.read_file("more/trip.md", 2) == "The train leaves at nine."
    assert tools.find_text("ROME") == ["more/trip.md:1: We go to Rome."]


@pytest.mark.parametrize("path", ["../outside.txt", "link.txt", "more/../../outside.txt", "ABS"])
def test_nothing_outside_of_the_folder_is_read_or_written(folder: Path, path: str) -> None:
    tools, confirm = files(folder)
    outside = folder.parent / "outside.txt"
    path = str(outside) if path == "ABS" else path
    for use in (tools.read_file, tools.list_files, lambda one: tools.write_file(one, "mine")):
        with pytest.raises(ValueError, match="is outside of the folder"):
            use(path)
    assert outside.read_text() == "not yours" and not confirm.shown


def test_a_file_changes_only_after_the_user_said_yes(folder: Path) -> None:
    trip = folder / "more" / "trip.md"
    tools, confirm = files(folder, answer=False)
    with pytest.raises(ValueError, match="the user said no"):
        tools.write_file("more/trip.md", "We stay.")
    assert trip.read_text().startswith("We go") and "-We go to Rome.\n" in confirm.shown[0]
    tools, confirm = files(folder)
    assert tools.write_file("more/trip.md", "We stay.") == "wrote more/trip.md"
    assert tools.write_file("new/list.md", "milk") == "wrote new/list.md"
    assert trip.read_text() == "We stay." and (folder / "new" / "list.md").read_text() == "milk"
    assert "+milk" in confirm.shown[1]


def test_what_is_not_text_is_an_error_for_the_model(folder: Path) -> None:
    tools, _ = files(folder)
    with pytest.raises(ValueError, match=r"picture\.png: is not text"):
        tools.read_file("picture.png")
    with pytest.raises(ValueError, match="is not a folder"):
        tools.list_files("picture.png")
    with pytest.raises(ValueError, match="more: is not a file"):
        tools.write_file("more", "x")
    with pytest.raises(ValueError, match="is empty"):
        tools.find_text("")
    (folder / "long.txt").write_text("x" * (2 << 20))
    with pytest.raises(ValueError, match="has more than 1048576 bytes"):
        tools.read_file("long.txt")
    (folder / "long.txt").write_text("line\n" * 250)
    assert tools.read_file("long.txt").endswith("line\n... 50 more lines")
    assert len(tools.find_text("line")) == 201


def test_calls_are_shown_run_and_answered(folder: Path) -> None:
    calls: list[Any] = [
        FakeAnswer(tool_calls=[("find_text", {"text": "train"})]),
        FakeAnswer(tool_calls=[("read_file", {"path": "../outside.txt"})]),
        "It leaves at nine.",
        "You are welcome.",
    ]
    said: list[str] = []
    with FakeLLM(calls) as llm:
        agent = load("agent").Agent(llm, files(folder, say=said.append)[0], said.append)
        assert agent.ask("When does the train leave?") == "It leaves at nine."
        results = [one["content"] for one in llm.requests[2].prompt if one["role"] == "tool"]
        assert "more/trip.md:2: The train leaves at nine." in results[0]
        assert results[1].endswith("is outside of the folder")
        assert agent.ask("Thanks") == "You are welcome."
        assert [one["role"] for one in llm.requests[3].prompt].count("user") == 2
    assert said[0] == "  find_text 'train'" and said[2] == "It leaves at nine."


def test_calls_without_results_are_not_kept(folder: Path) -> None:
    call = FakeAnswer(tool_calls=[("list_files", {})])
    with FakeLLM([*[call] * 10, "Three files."]) as llm:
        agent = load("agent").Agent(llm, files(folder)[0], print)
        assert agent.ask("List.") == "(too many calls; ask again)"
        assert agent.ask("List again.") == "Three files."
        asked = llm.requests[-1].prompt
    assert [one["role"] for one in asked] == ["system", "user"] and "again" in asked[1]["content"]


def test_links_to_themselves_and_pipes_are_left_out(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")  # reading one waits for a writer
    tools, _ = files(folder)
    assert tools.list_files() == ["more/trip.md", "picture.png"]
    assert tools.find_text("rome") == ["more/trip.md:1: We go to Rome."]
    for use in (tools.read_file, lambda path: tools.write_file(path, "x")):
        with pytest.raises(ValueError, match="pipe: is not a file"):
            use("pipe")


def test_text_that_cannot_be_written_leaves_the_file_as_it_is(folder: Path) -> None:
    tools, confirm = files(folder)
    with pytest.raises(UnicodeEncodeError):
        tools.write_file("more/trip.md", "half of a pair: \ud83d")
    assert (folder / "more" / "trip.md").read_text().startswith("We go") and not confirm.shown


@pytest.mark.slow
def test_a_real_model_that_must_call_a_tool_gets_its_result(folder: Path, smollm2: Path) -> None:
    said: list[str] = []
    with LLM(smollm2, max_model_len=2048) as llm:
        tools, _ = files(folder, answer=False, say=said.append)
        agent = load("agent").Agent(llm, tools, said.append, 40)
        agent.ask("List the files.", tool_choice="list_files")
    assert said[0].startswith("  list_files ") and said[-1]


def test_the_command_answers_and_names_what_is_wrong(
    folder: Path,
    smollm2: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = load("agent")
    agent.main([str(folder), "Say hello.", "--model", str(smollm2)])
    assert capsys.readouterr().out.strip()
    with pytest.raises(SystemExit, match=r"agent: .*nowhere"):
        agent.main([str(folder / "nowhere"), "Hi"])
    with pytest.raises(SystemExit, match=r"agent: no\.gguf"):
        agent.main([str(folder), "Hi", "--model", "no.gguf"])
    with pytest.raises(SystemExit, match=r"agent: .*trip\.md: is not a folder"):
        agent.main([str(folder / "more" / "trip.md"), "Hi"])
    with pytest.raises(SystemExit, match="agent: question: is empty"):
        agent.main([str(folder), "", "--model", str(smollm2)])
    for typed, yes in (
        (" Y \n", True),
        ("\n", False),
        ("", False),
    ):  # the last: the input has ended
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        assert agent.asked("a change") == yes


def test_a_conversation_goes_on_after_an_error_and_after_ctrl_c(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = load("agent")
    typed = iter(["", "word " * 5000, "interrupted", "Hello?"])

    def type_in(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    class Interrupted(agent.Agent):  # type: ignore[misc]  # of a module that is loaded by its path
        def ask(self, question: str, tool_choice: str = "auto") -> str:
            if question == "interrupted":
                raise KeyboardInterrupt
            return str(super().ask(question, tool_choice))

    monkeypatch.setattr("builtins.input", type_in)
    with FakeLLM("Yes.", max_model_len=4096) as llm:
        agent.converse(Interrupted(llm, files(folder)[0], print))
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == "[question: is empty]" and lines[1].startswith("[messages: the last turn")
    assert lines[3:5] == ["[stopped; Ctrl-D ends]", "Yes."]


def test_ctrl_c_ends_a_single_question_with_its_exit_code(
    folder: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = load("agent")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(agent.Agent, "ask", interrupted)
    with pytest.raises(SystemExit) as ended:
        agent.main([str(folder), "Hi", "--model", str(smollm2)])
    assert ended.value.code == 130


def test_a_part_of_a_listing_is_marked(folder: Path) -> None:
    for number in range(201):
        (folder / f"{number:03}.txt").touch()
    listed = files(folder)[0].list_files()
    assert len(listed) == 201 and listed[-1] == "..."
    assert os.fspath(folder) not in listed[0]
