"""A command-line agent that reads and writes the files of one folder.

python docs/examples/agent.py FOLDER [--model model.gguf] ["What is in notes.md?"]

The model sees four tools. Paths that lead out of the folder are refused, also through links. Before
a file is written, the change is shown, and it happens only after a "y".
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from sdk import LLM, RequestError, SamplingParams, SdkError, demo_model

SYSTEM = (
    "You help with the files of one folder. Look with the tools before you answer: list_files, "
    "read_file, find_text. Change files only when you are asked to, with write_file."
)
Say = Callable[[str], None]
#: What a model reads of one file or one search; larger files are not read.
MOST_LINES, MOST_BYTES = 200, 1 << 20


class Files:
    """Tools: the model reads their names, types and docstrings, and what they raise."""

    def __init__(self, folder: Path, confirm: Callable[[str], bool], say: Say = print) -> None:
        self._root = folder.resolve(strict=True)
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder}: is not a folder")
        self._confirm, self._say = confirm, say

    def tools(self) -> list[Callable[..., Any]]:
        return [self.list_files, self.read_file, self.find_text, self.write_file]

    def list_files(self, folder: Annotated[str, "A folder; '.' is the whole."] = ".") -> list[str]:
        """List the files of a folder and of the folders in it."""
        self._say(f"  list_files {folder!r}")
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
        self._say(f"  read_file {path!r}")
        lines = self._text(self._inside(path)).splitlines()
        start = max(first_line, 1) - 1
        shown = lines[start : start + MOST_LINES]
        left = len(lines) - start - len(shown)
        return "\n".join([*shown, *([f"... {left} more lines"] if left > 0 else [])])

    def find_text(
        self, text: Annotated[str, "What to look for; upper and lower case are the same."]
    ) -> list[str]:
        """Find the lines of all files that have a text."""
        self._say(f"  find_text {text!r}")
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
        content = text.encode()  # before the file is opened: half a surrogate pair has no bytes
        before = self._text(file) if file.exists() else ""
        lines = before.splitlines(), text.splitlines()
        change = difflib.unified_diff(*lines, f"{path} before", f"{path} after", lineterm="")
        if not self._confirm("\n".join(change) or f"{path}: stays as it is"):
            raise ValueError("the user said no; do not try it again")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
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
            hidden = any(one.startswith(".") for one in path.relative_to(self._root).parts)
            # is_file first: it is false for a link to itself, which cannot be resolved
            if not hidden and path.is_file() and path.resolve().is_relative_to(self._root):
                found.append(path)
        return found

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def _text(self, file: Path) -> str:
        """:raises ValueError: it is missing, too large, or not text."""
        if not file.is_file():  # reading a pipe would wait for ever
            raise ValueError(f"{file.name}: is not a file")
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"{file.name}: has more than {MOST_BYTES} bytes")
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{file.name}: is not text") from None


class Agent:
    """A conversation; ``say`` shows what the model asks for and answers."""

    def __init__(self, llm: LLM, files: Files, say: Say, max_tokens: int = 512) -> None:
        self._llm, self._files, self._say = llm, files, say
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        # -1: if the conversation is too long, its oldest turns are left out
        self._params = SamplingParams(
            temperature=0, max_tokens=max_tokens, truncate_prompt_tokens=-1
        )

    def ask(self, question: str, tool_choice: str = "auto") -> str:
        """The answer; tools run before it, at most ten rounds of them."""
        if not question.strip():
            raise RequestError("question: is empty")
        asked = [*self._messages, {"role": "user", "content": question}]
        tools = self._files.tools()
        run = self._llm.run_tools(asked, tools, self._params, tool_choice=tool_choice, max_turns=10)
        answer = "(too many calls; ask again)"  # and calls without results are not kept
        if run.stopped == "answered":
            self._messages, answer = run.messages, run.output.content
        self._say(answer)
        return answer


def asked(change: str) -> bool:
    """Show a change, and ask on the terminal. Only a "y" is a yes."""
    print(f"{change}\nWrite this? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def converse(agent: Agent) -> None:
    """Answer questions from the terminal until it ends (Ctrl-D). Ctrl-C ends one answer."""
    while True:
        try:
            agent.ask(input("> "))
        except RequestError as error:  # too long, for example: the conversation goes on without it
            print(f"[{error}]")
        except KeyboardInterrupt:
            print("\n[stopped; Ctrl-D ends]")
        except EOFError:
            return print()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="An agent for the files of one folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("question", nargs="?", help="default: read questions from the terminal")
    parser.add_argument("--model", help="one that calls tools; the demo model hardly does")
    args = parser.parse_args(arguments)
    try:
        files = Files(args.folder, asked)
        with LLM(args.model or demo_model(), memory="4GiB", max_model_len=8192) as llm:
            agent = Agent(llm, files, print)
            if args.question is not None:
                agent.ask(args.question)
            else:
                converse(agent)
    except (SdkError, OSError) as error:
        raise SystemExit(f"agent: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
