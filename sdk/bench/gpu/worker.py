"""The process that measures rows on the GPU, one after another: JSON lines in, JSON lines out.

First comes ``{"measured": {...}, "rehearsing": bool}``, answered by ``{"device", "tiny"}``. Then
come row names, each answered by its findings, ``{"finding"}``, and an end, ``{"done": an error or
null, "lost": bool}``. A kernel with an invalid memory access makes the card unusable for the whole
process; then ``lost`` is true.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch

from sdk.bench.gpu.card import Card, no_card
from sdk.bench.gpu.rows import BY_NAME


def device_facts(card: Card) -> dict[str, Any]:
    """Facts about the device for a report."""
    import triton

    facts: dict[str, Any] = {"name": card.name, "torch": torch.__version__}
    if not card.tiny:
        found = torch.cuda.get_device_properties(card.device)
        facts["capability"] = f"{found.major}.{found.minor}"
        facts["processors"] = found.multi_processor_count
        facts["memory"] = found.total_memory
        facts["l2"] = found.L2_cache_size
        facts["cuda"] = torch.version.cuda
    return facts | {"triton": triton.__version__}


def measure(card: Card, name: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """Measure one row; tells its findings and how it ended."""
    row, why, lost = BY_NAME[name], None, False
    try:
        for finding in getattr(import_module(f"sdk.bench.gpu.{row.module}"), row.function)(card):
            card.measured.update(finding.numbers)
            tell({"finding": finding.to_json()})
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]
    gc.collect()
    try:
        card.synchronize()
        if not card.tiny:
            torch.cuda.empty_cache()
    except RuntimeError:
        lost = True
    tell({"done": why, "lost": lost})


def serve(lines: Iterable[str], tell: Callable[[dict[str, Any]], None]) -> None:
    """Answer questions until the input ends."""
    questions = iter(lines)
    first = json.loads(next(questions))
    why = no_card()
    if why is not None:
        tell({"no_card": why})
        return
    card = Card(first["measured"], rehearsing=first["rehearsing"])
    try:
        tell({"device": device_facts(card), "tiny": card.tiny})
        for line in questions:
            measure(card, line.strip(), tell)
    finally:
        card.close()


if __name__ == "__main__":
    # Compilers and libraries print to standard output: redirect it to standard error.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)

        def tell(answer: dict[str, Any]) -> None:
            print(json.dumps(answer), file=out, flush=True)

        serve(iter(sys.stdin.readline, ""), tell)
