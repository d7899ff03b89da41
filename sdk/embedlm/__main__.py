"""The ``embedlm`` command, and ``python -m embedlm``: the same."""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> int:
    """The command of ``sys.argv``: its exit code, 2 with one line where embedlm cannot run."""
    try:
        command = import_module(__package__).import_ours("sdk.cli").main
    except ImportError as error:
        print(f"embedlm: {error}", file=sys.stderr)
        return 2
    code: int = command()
    return code


if __name__ == "__main__":
    sys.exit(main())
