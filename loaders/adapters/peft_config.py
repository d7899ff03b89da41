"""``adapter_config.json`` of a PEFT folder: the arithmetic it asks for, or why it cannot run.

Every option of LoRA that would change what an adapter computes is either followed or rejected by
its name. So is any option that this release does not know, unless it is off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from sdk.loaders.adapters.adapter_file import MAX_RANK
from sdk.loaders.adapters.patterns import Matcher, compile_pattern, find, is_simple
from sdk.loaders.json_file import read_json
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.safe_repr import safe_repr

MAX_CONFIG = 8 << 20
#: Keys of a pattern, and those of them that are not plain names: bounds of the time to match them.
_MAX_PATTERNS, _MAX_DIFFICULT = 1 << 14, 64
T = TypeVar("T")
#: Options that change nothing in a trained adapter, or nothing that its tensors do not say.
_NEUTRAL = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "parent_library",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "unsloth_fixed",
    ]
)
_READ = frozenset(
    [
        "alpha_pattern",
        "bias",
        "init_lora_weights",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "use_rslora",
    ]
)
#: Ways to initialize an adapter that leave the weights of its model as they are.
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
_MERGE = "merge it into its model (peft: merge_and_unload, save_pretrained) and open the result"
_REASONS = {
    "use_dora": "DoRA scales each row by the norm of the sum of both matrices; " + _MERGE,
    "modules_to_save": "it replaces whole matrices of the model; " + _MERGE,
    "trainable_token_indices": "it replaces rows of the embedding; " + _MERGE,
    "lora_bias": "biases in the factors B; " + _MERGE,
    "layer_replication": "it repeats layers of the model; " + _MERGE,
    "target_parameters": "it updates parameters that are not linear layers; " + _MERGE,
    "alora_invocation_tokens": "an activated LoRA (aLoRA) applies only after certain tokens",
    "megatron_config": "it belongs to a model of Megatron",
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The options of an adapter that its tensors do not say.

    ``bias``: which biases the file holds.
    """

    source: str
    rank: int
    alpha: float
    rslora: bool
    bias: Literal["none", "all", "lora_only"]
    ranks: Sequence[tuple[Matcher, int]]
    alphas: Sequence[tuple[Matcher, float]]

    def scale(self, module: str, rank: int) -> float:
        """The factor of ``B A`` of a module, by its path in the model.

        :raises CheckpointError: the config says another rank than that of the tensors.
        """
        expected = find(self.ranks, module, self.rank)
        if rank != expected:
            raise CheckpointError(
                f"{self.source}: {module} has rank {expected} by r and rank_pattern, its tensors "
                f"have rank {rank}"
            )
        alpha = find(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def read_peft_config(path: Path) -> PeftConfig:
    """Read and check an ``adapter_config.json``.

    :raises CheckpointError: it is damaged, or a value has a wrong type.
    :raises UnsupportedError: names the option that is not supported, and what to do.
    """
    raw = read_json(path, MAX_CONFIG)
    source = str(path)
    _check_supported(raw, source)
    rslora = raw.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise _wrong(source, "use_rslora", rslora, "true or false")
    bias = raw.get("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        raise _wrong(source, "bias", bias, "none, all or lora_only")
    rank = _rank(source, "r", raw.get("r"))
    alpha = _alpha(source, "lora_alpha", raw.get("lora_alpha", rank))
    ranks = _patterns(source, "rank_pattern", raw.get("rank_pattern"), _rank)
    alphas = _patterns(source, "alpha_pattern", raw.get("alpha_pattern"), _alpha)
    return PeftConfig(source, rank, alpha, rslora, bias, ranks, alphas)


def _check_supported(raw: Mapping[str, Any], source: str) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"{source}: expected peft_type 'LORA', found {safe_repr(kind)}: no other kind of "
            "adapter is supported"
        )
    init = raw.get("init_lora_weights", True)
    if not any(init is plain or init == plain for plain in _PLAIN_INITS):
        raise UnsupportedError(
            f"{source}: init_lora_weights={safe_repr(init)}: this adapter belongs to weights that "
            "were changed when it was initialized, not to those of its model. Convert it to a "
            "plain LoRA (peft: save_pretrained(..., path_initial_model_for_weight_conversion=...))"
        )
    for name, value in raw.items():
        if name in _READ or name in _NEUTRAL or value in (None, False, 0, "", [], {}):
            continue
        why = _REASONS.get(name, f"this release does not know this option; {_MERGE}")
        raise UnsupportedError(f"{source}: {name[:80]}={safe_repr(value)} is not supported: {why}")


def _wrong(source: str, name: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{source}: {name}: expected {expected}, found {safe_repr(value)}")


def _rank(source: str, name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise _wrong(source, name, value, f"an integer from 1 to {MAX_RANK}")
    return int(value)


def _alpha(source: str, name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _wrong(source, name, value, "a number")
    return float(value)


def _patterns(
    source: str, name: str, value: Any, read: Callable[[str, str, Any], T]
) -> list[tuple[Matcher, T]]:
    if value is None:
        return []
    if not isinstance(value, dict) or len(value) > _MAX_PATTERNS:
        raise _wrong(source, name, value, f"a dict of at most {_MAX_PATTERNS} modules")
    difficult = [key for key in value if not is_simple(key)]
    if len(difficult) > _MAX_DIFFICULT:
        raise UnsupportedError(
            f"{source}: {name} has {len(difficult)} regular expressions, at most {_MAX_DIFFICULT} "
            "are supported; write the names of modules instead"
        )
    return [
        (compile_pattern(key, f"{source}: {name}"), read(source, f"{name}[{key[:80]!r}]", one))
        for key, one in value.items()
    ]
