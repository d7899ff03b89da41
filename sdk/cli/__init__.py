"""The ``embedlm`` command: one module per sub-command, each with ``add_arguments`` and ``run``.

The only place of the package that prints. Answers and tables go to stdout, everything else to
stderr. Exit codes: 0 fine, 1 something is missing (``doctor``), 2 a user error, told in one line,
130 interrupted. The sub-commands import torch only when they run, so ``--help`` is immediate.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from sdk import __version__
from sdk.cli import bench, doctor, evaluate, fetch_demo, inspect_file, plan, quantize, run
from sdk.errors import SdkError

COMMANDS = {
    "run": run,
    "inspect": inspect_file,
    "plan": plan,
    "quantize": quantize,
    "eval": evaluate,
    "doctor": doctor,
    "bench": bench,
    "fetch-demo": fetch_demo,
}


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="embedlm", description="Run quantized language models inside your own process."
    )
    parser.add_argument("--version", action="version", version=f"embedlm {__version__}")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show the traceback of an error"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        sub = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output left (`embedlm inspect f | head`): not an error, and the
        # interpreter must not try to flush stdout again on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (SdkError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("sdk"):
            raise  # ours is missing: a bug, and a bug needs its traceback
        if args.verbose:
            traceback.print_exc()
        print(f"embedlm: {error}", file=sys.stderr)
        return 2
