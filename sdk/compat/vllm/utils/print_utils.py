"""Output of programs that ask for it."""

import sys
from collections.abc import Sequence


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Write the first numbers of a vector and its length to stdout."""
    first = ", ".join(map(str, embeds[:4])) + (", ..." if len(embeds) > 4 else "")
    sys.stdout.write(f"{prefix}: [{first}] (size={len(embeds)})\n")
