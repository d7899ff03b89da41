"""Rows of a step besides those that it samples from: how many a rank has memory for."""

from __future__ import annotations

#: At most this much for logits other than those that a step samples from.
SCORED_BYTES = 8 * 2**20
_SCORED_ROWS = 128
_WAITING_ROWS = 64


def scored_rows(vocab_size: int) -> int:
    """Rows of logits in addition to those that a step samples from: of scored prompts or
    benchmarks, or copies for logits processors."""
    return min(_SCORED_ROWS, max(SCORED_BYTES // (4 * vocab_size), 1))


def waiting_rows(requests: int) -> int:
    """Rows of hidden states that may wait for a head that drafts, in addition to those of a step:
    this many are run at the cost of one step."""
    return max(_WAITING_ROWS, 2 * requests)
