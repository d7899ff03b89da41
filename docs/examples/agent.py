"""A command-line agent that reads and writes the files of one folder.

python docs/examples/agent.py FOLDER [--model model.gguf] ["What is in notes.md?"]

The model sees four tools. Paths that lead out of the folder are refused, also through links. Before
a file is written, the change is shown, and it happens only after a "y".
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from sdk import LLM, SamplingParams, SdkError, demo_model

SYSTEM = (
    "You help with the files of one folder. Look with the tools before you answer: list_files, "
    "read_file, find_text. Change files only when you are asked to, with write_file."
)
#: What a model reads of one file or one search.
MOST_LINES = 200
#: Larger files are not read.
MOST_BYTES = 1 << 20


class Files:
    """The tools: methods whose names, types and docstrings the model reads.

    What they raise goes back to the model as a message, so that it can try something else.
    """

    def __init__(self, folder: Path, confirm: Callable[[str], bool]) -> None:
        self._root = folder.resolve(strict=True)
        self._confirm = confirm

    def tools(self) -> list[Callable[..., Any]]:
        return [self.list_files, self.read_file, self.find_text, self.write_file]

    def list_files(self, folder: Annotated[str, "A folder; '.' is the whole."] = ".") -> list[str]:
        """List the files of a folder and of the folders in it."""
        start = self._inside(folder)
        if not start.is_dir():
            raise ValueError(f"{folder}: is not a folder")
        names = [self._name(path) for path in self._files(start)]
        return [*names[:MOST_LINES], *(["..."] if len(names) > MOST_LINES else [])]

    def read_file(
        self,
        path: Annotated[str, "The file, as list_files names it."],
        first_line: Annotated[int, "Where to begin; 1 is the first line."] = 1,
    ) -> str:
        """Read a text file."""
        lines = self._text(self._inside(path)).splitlines()
        start = max(first_line, 1) - 1
        shown = lines[start : start + MOST_LINES]
        left = len(lines) - start - len(shown)
        return "\n".join([*shown, *([f"... {left} more lines"] if left > 0 else [])])

    def find_text(
        self, text: Annotated[str, "What to look for; upper and lower case are the same."]
    ) -> list[str]:
        """Find the lines of all files that have a text."""
        if not text:
            raise ValueError("text: is empty")
        found: list[str] = []
        for path in self._files(self._root):
            try:
                lines = self._text(path).splitlines()
            except (ValueError, OSError):
                continue  # no text, too large, or gone meanwhile
            for number, line in enumerate(lines, 1):
                if text.casefold() in line.casefold():
                    found.append(f"{self._name(path)}:{number}: {line.strip()[:200]}")
                    if len(found) == MOST_LINES:
                        return [*found, "..."]
        return found

    def write_file(
        self,
        path: Annotated[str, "The file; it is made if there is none."],
        text: Annotated[str, "All of its new content."],
    ) -> str:
        """Write a text file. The user is asked first."""
        file = self._inside(path)
        if file.is_dir():
            raise ValueError(f"{path}: is a folder")
        before = self._text(file) if file.exists() else ""
        lines = before.splitlines(), text.splitlines()
        change = difflib.unified_diff(*lines, f"{path} before", f"{path} after", lineterm="")
        if not self._confirm("\n".join(change) or f"{path}: stays as it is"):
            raise ValueError("the user said no; do not try it again")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
        return f"wrote {self._name(file)}"

    def _inside(self, path: str) -> Path:
        """:raises ValueError: it leads out of the folder."""
        found = (self._root / path).resolve()  # follows links
        if not found.is_relative_to(self._root):
            raise ValueError(f"{path}: is outside of the folder")
        return found

    def _files(self, folder: Path) -> list[Path]:
        """Its files, without hidden ones and without links that lead out of the folder."""
        found = []
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(self._root).parts
            inside = path.resolve().is_relative_to(self._root)
            if inside and path.is_file() and not any(one.startswith(".") for one in parts):
                found.append(path)
        return found

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _text(self, file: Path) -> str:
        """:raises ValueError: it is too large, or not text."""
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"{file.name}: has more than {MOST_BYTES} bytes")
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file.name}: is not text") from error


class Agent:
    """A conversation; ``say`` shows what the model asks for and answers."""

    def __init__(
        self, llm: LLM, files: Files, say: Callable[[str], None], max_tokens: int = 512
    ) -> None:
        self._llm, self._files, self._say = llm, files, say
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        # -1: if the conversation is too long, its oldest turns are left out
        self._params = SamplingParams(
            temperature=0, max_tokens=max_tokens, truncate_prompt_tokens=-1
        )

    def ask(self, question: str, tool_choice: str = "auto") -> str:
        """The answer; calls of tools before it are shown and run, at most ten rounds of them."""
        asked = [*self._messages, {"role": "user", "content": question}]
        run = self._llm.run_tools(
            asked, self._files.tools(), self._params, tool_choice=tool_choice, max_turns=10
        )
        self._messages = run.messages
        for message in run.messages[len(asked) :]:
            for call in message.get("tool_calls", ()):
                self._say(f"  {call['function']['name']} {call['function']['arguments']}")
        answer = run.output.content if run.stopped == "answered" else "(too many calls; ask again)"
        self._say(answer)
        return answer


def asked(change: str) -> bool:
    """Show a change, and ask on the terminal. Only a "y" is a yes."""
    print(change)
    try:
        return input("Write this? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="An agent for the files of one folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "question", nargs="?", help="without one, questions are read from the terminal"
    )
    parser.add_argument(
        "--model", help="a model that calls tools; default: the demo model, which hardly does"
    )
    args = parser.parse_args(arguments)
    try:
        files = Files(args.folder, asked)
        with LLM(args.model or demo_model(), memory="4GiB", max_model_len=8192) as llm:
            agent = Agent(llm, files, print)
            if args.question:
                agent.ask(args.question)
                return
            while question := input("> ").strip():
                agent.ask(question)
    except (SdkError, OSError) as error:
        raise SystemExit(f"agent: {error}") from error
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
