"""Starts a worker: ``python .../bench/peers``."""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    # For this import alone: engines must not find our other modules by their short names.
    sys.path[0] = str(Path(__file__).parents[1])
    worker = import_module("peers.worker")
    del sys.path[0]
    worker.serve(worker.open_peer)
