"""The ``embedlm`` command: one module per sub-command, each with ``add_arguments`` and ``run``.

Those that take models also have ``model_arguments``: models are looked for before anything else.
Only this subpackage prints. Answers and tables go to stdout, everything else to stderr. Exit codes:
0 success, 1 something is missing (``doctor``), 2 a user error, reported in one line, 130
interrupted. A sub-command is imported when it is named (all of them for ``--help``: 0.1 s), and
imports torch only when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from sdk import __version__
from sdk.api.errors import SdkError
from sdk.kernels.packages import missing
from sdk.kernels.system import SYSTEM

#: Command -> its module. A command may have two words. Those of the parts around the library are
#: beside what they start.
COMMANDS = {
    "run": "sdk.cli.run",
    "inspect": "sdk.cli.inspect_file",
    "plan": "sdk.cli.plan",
    "quantize": "sdk.cli.quantize",
    "eval": "sdk.cli.evaluate",
    "doctor": "sdk.cli.doctor",
    "serve": "sdk.serving.serve_command",
    "worker": "sdk.cluster.worker_command",
    "bench": "sdk.bench",
    "bench serve": "sdk.bench.serve",
    "tune": "sdk.bench.tune",
    "keys": "sdk.serving.keys_command",
    "simulate": "sdk.bench.simulate",
    "tune serve": "sdk.bench.tune_serve",
    "fetch-demo": "sdk.cli.fetch_demo",
    "cache": "sdk.cli.cache",
}


#: Commands of Ollama, vLLM, llama.cpp and transformers, and what to use here.
_OTHER_COMMANDS = {
    "chat": "use embedlm run MODEL",
    "complete": "use embedlm run MODEL --raw --prompt TEXT",
    "generate": "use embedlm run MODEL --raw --prompt TEXT",
    "prompt": "use embedlm run MODEL TEXT",
    "pull": "models are fetched when they are first used: embedlm run ORG/NAME",
    "download": "models are fetched when they are first used: embedlm run ORG/NAME",
    "list": "models are files, where you put them; those of the hub: hf cache ls",
    "ls": "models are files, where you put them; those of the hub: hf cache ls",
    "show": "use embedlm inspect FILE",
    "info": "use embedlm inspect FILE, or embedlm doctor for the installation",
    "env": "use embedlm doctor",
    "collect-env": "use embedlm doctor",
    "start": "use embedlm serve MODEL",
    "server": "use embedlm serve MODEL",
    "api": "use embedlm serve MODEL",
    "convert": "use embedlm quantize MODEL OUT",
    "perplexity": "use embedlm eval MODEL",
    "test": "use embedlm doctor",
    "help": "use embedlm --help",
    "version": "use embedlm --version",
}


#: Options that name a second model.
_MODEL_OPTIONS = ("reference", "gguf")


def build_parser(named: str = "") -> argparse.ArgumentParser:
    """The parser of the sub-command ``named``; of all commands if there is no such command."""
    parser = argparse.ArgumentParser(
        prog="embedlm", description="Run quantized language models inside your own process."
    )
    parser.add_argument("--version", action="version", version=f"embedlm {__version__}")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the traceback of an error"
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for name in (named,) if named in COMMANDS else COMMANDS:
        module = import_module(COMMANDS[name])
        summary = (module.__doc__ or "").splitlines()[0]
        sub = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, model_arguments=getattr(module, "model_arguments", None))
    return parser


class _CommandParser(argparse.ArgumentParser):
    """Options may stand between positional arguments: ``run MODEL --max-tokens 9 "hi"``.

    Without this an optional positional argument counts as left out at the first option.
    """

    _mixing = False

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        # parse_known_intermixed_args calls this, for options and then for the rest. It refuses
        # parsers with sub-commands (keys), whose own parsers are of this class too.
        if self._mixing or self._subparsers is not None:
            return super().parse_known_args(*args, **kwargs)
        self._mixing = True
        try:
            return self.parse_known_intermixed_args(*args, **kwargs)
        finally:
            self._mixing = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    SYSTEM.use_utf8(sys.stdout, sys.stderr)
    argv = _joined(sys.argv[1:] if argv is None else argv)
    argv, named = _with_command(argv)
    if named and named not in COMMANDS:
        print(f"embedlm: {_unknown_command(named)}", file=sys.stderr)
        return 2
    args = build_parser(named).parse_args(argv)
    try:
        with _closed_streams_replaced(), _warnings_shown():
            _look_for_models(args)
            code: int = args.run(args)
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has closed it (`embedlm inspect f | head`): not an error, and the
        # interpreter must not try to flush stdout again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (SdkError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("sdk"):
            raise  # a module of ours is missing: a bug, which needs its traceback
        if isinstance(error, ModuleNotFoundError) and not isinstance(error, SdkError):
            error = missing(error, f"the command {args.command} needs")
        if args.verbose:
            traceback.print_exc()
        if sys.stderr is not None:  # print would use stdout instead of None
            print(f"embedlm: {error}", file=sys.stderr)
        return 2


def _look_for_models(args: argparse.Namespace) -> None:
    """:raises SdkError: a model on the command line is missing, damaged or cannot be read."""
    if args.model_arguments is None:
        return
    models = args.model_arguments(args)
    if models:
        from sdk.loaders.open import check_there

        for model in models:
            try:
                check_there(model)
            except SdkError as error:
                option = next((o for o in _MODEL_OPTIONS if getattr(args, o, None) == model), None)
                if option is None:
                    raise
                raise type(error)(f"--{option}: expected a model; {error}") from error


def _with_command(argv: list[str]) -> tuple[list[str], str]:
    """Join the two words of a command such as ``bench serve``; also returns the command, "" if none
    is named."""
    for place, word in enumerate(argv):
        if not word.startswith("-"):
            two = " ".join(argv[place : place + 2])
            if two in COMMANDS:
                return [*argv[:place], two, *argv[place + 2 :]], two
            return argv, word
    return argv, ""


def _unknown_command(name: str) -> str:
    """What other programs call a command, or what was meant."""
    text = f"no such command: {name!r}"
    if (hint := _OTHER_COMMANDS.get(name)) is not None:
        return f"{text}; {hint}"
    if name.endswith(".gguf") or Path(name).exists():
        return f"{text}; to chat with a model: embedlm run {name}"
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    known = ", ".join(COMMANDS)
    return f"{text}; did you mean {near[0]!r}?" if near else f"{text}; expected one of {known}"


def _joined(argv: Sequence[str]) -> list[str]:
    """Turn ``--memory -1GiB`` into ``--memory=-1GiB``: argparse takes a word that begins with a
    dash for an option, so the value's own check would never run."""
    joined: list[str] = []
    for word in argv:
        if option := re.match(r"--[a-z]+(_[a-z]+)+(?==|$)", word):  # vLLM takes both spellings
            word = option[0].replace("_", "-") + word[option.end() :]
        if re.match(r"-\.?\d", word) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


@contextlib.contextmanager
def _closed_streams_replaced() -> Iterator[None]:
    """Inside, text written to a closed stream (``2>&-``) is dropped."""
    with contextlib.ExitStack() as undo:
        if sys.stdout is None:
            undo.enter_context(contextlib.redirect_stdout(_nowhere(undo)))
        if sys.stderr is None:
            undo.enter_context(contextlib.redirect_stderr(_nowhere(undo)))
        yield


def _nowhere(undo: contextlib.ExitStack) -> TextIO:
    return undo.enter_context(open(os.devnull, "w"))


@contextlib.contextmanager
def _warnings_shown() -> Iterator[None]:
    """Inside, the library's warnings go to stderr, one line each."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("embedlm: %(message)s"))
    logger = logging.getLogger("sdk")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
