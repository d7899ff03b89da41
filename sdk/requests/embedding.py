"""Embeddings from an engine's outputs, and their cosines."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.engine.engine import Output
from sdk.errors import RequestError
from sdk.outputs import EmbeddingOutput, ScoringOutput


def embedding_of(output: Output) -> EmbeddingOutput:
    """The embedding. :raises RequestError: the request ended without one; says why."""
    if isinstance(output, EmbeddingOutput):
        return output
    reason = output.outputs[0]
    raise RequestError(
        f"embed: request {output.request_id} ended with {reason.finish_reason}: "
        f"{reason.stop_reason}"
    )


def check_pairs(first: int, second: int) -> None:
    """:raises RequestError: the numbers are different, and ``first`` is not 1."""
    if first not in (1, second):
        raise RequestError(f"score: expected one text or {second} in data_1, found {first}")


def cosines(
    first: Sequence[EmbeddingOutput], second: Sequence[EmbeddingOutput]
) -> list[ScoringOutput]:
    """Cosines of vectors of length 1, pair by pair; a single ``first`` is compared with all."""
    if len(first) == 1:
        first = list(first) * len(second)
    return [
        ScoringOutput(b.request_id, _dot(a.embedding, b.embedding))
        for a, b in zip(first, second, strict=True)
    ]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
