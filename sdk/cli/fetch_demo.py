"""Put the demo model into the cache.

Prints the path of every model; progress goes to stderr, and only to a terminal.
"""

from __future__ import annotations

import argparse
import sys

from sdk.api.load_progress import is_terminal
from sdk.demo import GEMMA3, MINILM, SMOLLM2, fetch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gemma",
        action="store_true",
        help="also fetch Gemma-3-270M Q4_K_M (253 MB), which the tests use (Gemma license)",
    )
    parser.add_argument(
        "--minilm",
        action="store_true",
        help="also fetch all-MiniLM-L6-v2 (83 MB), an embedding model, which the retrieval guide "
        "and the tests use (Apache-2.0)",
    )


def run(args: argparse.Namespace) -> int:
    on_progress = None
    if is_terminal(sys.stderr):

        def on_progress(text: str) -> None:
            print(text, file=sys.stderr)

    for model in (SMOLLM2, *[GEMMA3] * args.gemma, *[MINILM] * args.minilm):
        print(fetch(model, on_progress=on_progress))
    return 0
