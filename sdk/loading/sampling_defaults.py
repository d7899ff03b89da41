"""The sampling parameters of a request without any: those of the model's files, or our own.

If the files have none, vLLM's default (temperature 1.0 without truncation) makes small models
ramble: ``docs/log.md`` has the measurement behind ``OWN``. ``generation_config="vllm"`` selects
vLLM's default anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.api.config import EngineConfig
from sdk.api.errors import CheckpointError, RequestError
from sdk.api.params import SamplingParams
from sdk.kernels.dataclass import dataclass
from sdk.loaders.json_file import read_json
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.safe_repr import safe_repr

#: Used if the model's files name none. Measured on SmolLM2-135M: see docs/log.md.
OWN: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05}
OWN_SOURCE = "this library's defaults (the model's files have none)"
#: Name in transformers' generation_config.json -> name in ``SamplingParams``.
_NAMES = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p")},
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram_size",
    "max_new_tokens": "max_tokens",
}
_FILE, _MAX_BYTES = "generation_config.json", 1 << 20


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling parameters of a request that gives none. ``source``: where they come from."""

    params: SamplingParams
    source: str

    def __str__(self) -> str:
        neutral = SamplingParams()
        said = [
            f"{name} {getattr(self.params, name):g}"
            for name in _NAMES.values()
            if getattr(self.params, name) != getattr(neutral, name)
        ]
        return f"{', '.join(said) or 'temperature 1, nothing truncated'}: {self.source}"


def sampling_defaults(config: EngineConfig, checkpoint: Checkpoint) -> SamplingDefaults:
    """The defaults that ``generation_config`` and ``override_generation_config`` select.

    :raises CheckpointError: a file has a value out of range, or the folder has no such file.
    :raises RequestError: ``override_generation_config`` has an unknown name or a bad value.
    """
    given, source = _chosen(config, checkpoint)
    override = config.override_generation_config
    if override is not None:
        given, source = given | _checked(override), f"override_generation_config over {source}"
    try:
        return SamplingDefaults(SamplingParams.from_optional(**given), source)
    except RequestError as error:
        if override is not None:
            raise RequestError(f"override_generation_config: {error}") from error
        raise CheckpointError(f"generation_config: {error}") from error


def _chosen(config: EngineConfig, checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    choice = config.generation_config
    if choice == "vllm":
        return {}, "vLLM's (generation_config='vllm')"
    if choice == "auto":
        named = _named(checkpoint.generation_config)
        kind = _FILE if checkpoint.format == "safetensors" else "general.sampling of the file"
        if any(name != "max_tokens" for name in named):
            return named, kind
        return {**OWN, **named}, OWN_SOURCE
    path = Path(choice).expanduser() / _FILE
    if not path.is_file():
        raise CheckpointError(
            f"generation_config: expected 'auto', 'vllm' or a folder with {_FILE}, "
            f"found {safe_repr(choice)}"
        )
    return _named(read_json(path, _MAX_BYTES)), str(path)


def _named(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in a generation config; ``do_sample: false`` means greedy."""
    given = {
        ours: generation[theirs]
        for theirs, ours in _NAMES.items()
        if generation.get(theirs) is not None
    }
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    return given


def _checked(override: object) -> dict[str, Any]:
    known = {*_NAMES, "max_tokens", "do_sample"}
    if not isinstance(override, Mapping) or not known.issuperset(override):
        raise RequestError(
            f"override_generation_config: expected a dict of {', '.join(sorted(known))}, "
            f"found {safe_repr(override)}"
        )
    extra = {"max_tokens": override["max_tokens"]} if "max_tokens" in override else {}
    return _named(override) | extra
