"""The ``embedlm`` command, and ``python -m embedlm``: the same."""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> int:
    """The command of ``sys.argv``: its exit code.

    :raises SystemExit: embedlm cannot be imported; one line says why, and the exit code is 1.
    """
    try:
        command = import_module(__package__).import_ours("sdk.cli").main
    except ImportError as error:
        sys.exit(f"embedlm: {error}")
    code: int = command()
    return code


if __name__ == "__main__":
    sys.exit(main())
