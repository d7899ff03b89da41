"""How hidden states are pooled, for one request."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.params import RequestOutputKind
from sdk.quant.safe_repr import safe_repr


@dataclass
class PoolingParams:
    """How hidden states are pooled. ``use_activation``: see ``LLM.embed`` and ``LLM.classify``."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        for name in ("dimensions", "step_tag_id", "returned_token_ids", "late_interaction_params"):
            if (value := getattr(self, name)) is not None:
                raise RequestError(f"{name}={safe_repr(value)} is not supported: leave it out")

    def clone(self) -> PoolingParams:
        """A copy."""
        return copy.deepcopy(self)
