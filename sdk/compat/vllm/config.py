"""The options of an ``LLM`` that vLLM keeps in objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdk.compat.vllm.pooling_params import PoolingParams
from sdk.engine.plan import PoolingMode
from sdk.errors import RequestError
from sdk.quant.safe_repr import safe_repr

_POOLING_TYPES = {
    "pooling_type": ("LAST", "CLS", "MEAN", "ALL"),
    "seq_pooling_type": ("LAST", "CLS", "MEAN"),
    "tok_pooling_type": ("ALL",),
}
_MODES: Mapping[str, PoolingMode] = {"CLS": "cls", "MEAN": "mean"}


@dataclass
class PoolerConfig:
    """How an ``LLM`` pools: the states of the last token, the first one or the mean of all.

    ``use_activation``: the default of requests. Vectors are scaled to length 1, and logits become
    probabilities.
    """

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    enable_flash_late_interaction: bool = True
    dimensions: int | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        for name in ("dimensions", "enable_chunked_processing", "logit_mean", "logit_sigma"):
            if (value := getattr(self, name)) not in (None, False):
                raise RequestError(f"{name}={safe_repr(value)} is not supported: leave it out")
        for name, known in _POOLING_TYPES.items():
            if (value := getattr(self, name)) is not None and value not in known:
                raise RequestError(
                    f"{name}: expected one of {', '.join(known)}, found {safe_repr(value)}"
                )

    @property
    def mode(self) -> PoolingMode | None:
        """``pooling=`` of ``sdk.LLM.encode``; None: what the model's files say."""
        given = self.seq_pooling_type or self.pooling_type
        return None if given is None else _MODES.get(given, "last")

    def activates(self, params: PoolingParams) -> bool:
        """Whether a request with ``params`` has an activation."""
        given = (params.use_activation, self.use_activation)
        return next((one for one in given if one is not None), True)


def pooler_of(given: Any) -> PoolerConfig:
    """:raises RequestError: ``given`` is no ``PoolerConfig``."""
    if given is None:
        return PoolerConfig()
    if isinstance(given, Mapping):
        return PoolerConfig(**given)
    if not isinstance(given, PoolerConfig):
        raise RequestError(f"pooler_config: expected a PoolerConfig, found {safe_repr(given)}")
    return given
