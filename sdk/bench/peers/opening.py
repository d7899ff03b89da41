"""What a worker opens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Opening:
    """``requests``: the most at once; ``context``: tokens of each; ``kv``: the type of keys and
    values, or ``"auto"``. Only our own engine has the rest, ``ranks`` of tensor parallelism,
    ``stages`` of a pipeline and ``replicas``, which divide ``threads``.
    """

    engine: str
    model: str
    threads: int
    requests: int
    context: int
    kv: str = "auto"
    prefix_cache: bool = False
    ranks: int = 1
    stages: int = 1
    replicas: int = 1
    #: Whether texts are embedded, not continued.
    embeds: bool = False


def without_type(engine: str) -> str:
    """An engine's name without the type that it computes in: ``vllm`` of ``vllm-bf16``."""
    return engine.removesuffix("-bf16").removesuffix("-f32")
