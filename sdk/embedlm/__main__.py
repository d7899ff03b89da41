"""``python -m embedlm`` is the ``embedlm`` command."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    try:
        main = import_module(__package__).import_ours("sdk.cli").main
    except ImportError as error:
        sys.exit(f"embedlm: {error}")
    sys.exit(main())
