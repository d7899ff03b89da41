"""The options of an ``LLM`` that vLLM keeps in objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

from sdk.api.errors import RequestError
from sdk.compat.vllm.pooling_params import PoolingParams
from sdk.engine.plan import PoolingMode
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


class _Fields:
    """Keywords as attributes. What becomes of the option that takes the object:
    docs/compat/compat.md."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={safe_repr(value)}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


class AttentionConfig(_Fields):
    """``attention_config``: which kernel of vLLM's. It has no effect."""


class CompilationConfig(_Fields):
    """``compilation_config``: how vLLM compiles a model. It has no effect."""


class CompilationMode(IntEnum):
    """``mode`` of a :class:`CompilationConfig`."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(Enum):
    """``cudagraph_mode`` of a :class:`CompilationConfig`."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)


class KVTransferConfig(_Fields):
    """``kv_transfer_config``: an LLM rejects it, and its message says what there is instead."""


class StructuredOutputsConfig(_Fields):
    """``structured_outputs_config``: ``disable_any_whitespace`` and so on."""


class VllmConfig(_Fields):
    """What a processor of logits is told about its engine: ``model_config``."""


class ProfilerConfig(_Fields):
    """``profiler_config``: where ``LLM.start_profile`` writes. Other fields have no effect."""

    profiler: str | None = None
    torch_profiler_dir: str = ""
    delay_iterations: int = 0
    max_iterations: int = 0


def profiler_of(given: Any) -> ProfilerConfig:
    """:raises RequestError: ``given`` is no ``ProfilerConfig``, or has no folder."""
    config = ProfilerConfig(**(given or {})) if isinstance(given or {}, Mapping) else given
    if not isinstance(config, ProfilerConfig):
        raise RequestError(f"profiler_config: expected a ProfilerConfig, found {safe_repr(given)}")
    if config.profiler and not config.torch_profiler_dir:
        raise RequestError("profiler_config: torch_profiler_dir is missing: traces go into it")
    return config
