"""vLLM's parameters of requests, which can be changed, and ours for them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sdk.api import params as ours
from sdk.api.beam_search import BeamSearchParams as OurBeamSearchParams
from sdk.api.errors import RequestError
from sdk.api.params import RequestOutputKind as RequestOutputKind
from sdk.api.structured_params import StructuredOutputsParams as StructuredOutputsParams
from sdk.quant.safe_repr import safe_repr

Structure = StructuredOutputsParams | Mapping[str, Any]
#: An older name.
GuidedDecodingParams = StructuredOutputsParams
#: Fields that vLLM has and this library does not: the values that mean "off".
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "watermarking": (None, False),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (None,),
}
#: Fields about how vLLM passes outputs on and what it caches: answers do not depend on them.
_WITHOUT_EFFECT = (
    *("flat_logprobs", "stream_interval", "skip_clone", "output_text_buffer_length"),
    "skip_reading_prefix_cache",
)


@dataclass
class SamplingParams:
    """How one request is sampled, with vLLM's fields and defaults: see :class:`sdk.SamplingParams`.

    ``max_tokens`` is 16 unless given. ``guided_decoding`` is an older name of
    ``structured_outputs``.

    :raises RequestError: a value is out of range or not supported.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    structured_outputs: Structure | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    guided_decoding: Structure | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = list(self.bad_words or [])
        self.ours()

    def ours(self) -> ours.SamplingParams:
        """These parameters as they are now, for ``sdk.LLM``."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        for name, off in _REFUSED.items():
            value = values.pop(name)
            if not any(value is one or value == one for one in off):
                raise RequestError(f"{name}={safe_repr(value)} is not supported: leave it out")
        for name in _WITHOUT_EFFECT:
            del values[name]
        if values["thinking_token_budget"] == -1:  # unlimited
            values["thinking_token_budget"] = None
        return ours.SamplingParams(**values)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Parameters from optional values: ``None`` means the default."""
        given = {name: value for name, value in values.items() if value is not None}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            given["logit_bias"] = {
                int(token): min(100.0, max(-100.0, add)) for token, add in bias.items()
            }
        return cls(**given)

    def clone(self) -> SamplingParams:
        """A deep copy."""
        return copy.deepcopy(self)


@dataclass
class BeamSearchParams:
    """How beams are searched: see :class:`sdk.BeamSearchParams`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Structure | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None

    def ours(self) -> OurBeamSearchParams:
        """:raises RequestError: a value is out of range or not supported."""
        if self.structured_outputs is not None or self.watermarking:
            name = "watermarking" if self.watermarking else "structured_outputs"
            raise RequestError(f"{name}: beam search does not support it; leave it out")
        return OurBeamSearchParams(
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
        )


def our_params(given: Any, structure: Mapping[str, Any]) -> ours.SamplingParams:
    """Parameters for ``sdk.LLM``. ``structure``: fields of every request's structure."""
    if not isinstance(given, SamplingParams | ours.SamplingParams):
        raise RequestError(f"sampling_params: expected SamplingParams, found {safe_repr(given)}")
    params = given if isinstance(given, ours.SamplingParams) else given.ours()
    if not structure or params.structure is None:
        return params
    changed = replace(params.structure, **structure)
    return params.clone(structured_outputs=changed, guided_decoding=None)
