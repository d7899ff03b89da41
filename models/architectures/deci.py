"""DeciLM and Llama-Nemotron (Super, Ultra, 51B): a Llama whose layers were searched for.

A layer has key/value heads and a width of its own; its attention or its MLP may be missing, and one
matrix may be in the place of attention. Bercovich et al., "Puzzle" (2024), arXiv 2411.19146; the
code beside these models' weights, which is not run, and llama.cpp's deci.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdk.models.architecture import (
    Architecture,
    Blocks,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerCaches,
)
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.quant.caches import AttentionCache
from sdk.quant.errors import CheckpointError, UnsupportedError

_KINDS = {
    "full_attention": Blocks(),
    "attention_alone": Blocks(mlp=False),
    "linear": Blocks(attention=False, linear=True),
    "linear_alone": Blocks(attention=False, linear=True, mlp=False),
    "mlp_alone": Blocks(attention=False),
    "nothing": Blocks(attention=False, mlp=False),
}
_KV_HEADS, _WIDTHS = "num_key_value_heads_per_layer", "intermediate_size_per_layer"
#: Widths of MLPs are multiples of this.
_MULTIPLE = 256


def _kind(attention: int, linear: bool, width: int) -> str:
    """The kind of a layer: ``attention`` key heads, or one matrix instead (``linear``), and an MLP
    of ``width``; 0 stands for none."""
    blocks = Blocks(attention > 0, mlp=width > 0, linear=linear and not attention)
    return next(name for name, own in _KINDS.items() if own == blocks)


def _derived(config: dict[str, Any]) -> None:
    """What ``block_configs`` say of each layer, or a file of DeciLM-7B's of key/value heads."""
    layers = config.get("block_configs")
    if layers is None or "layer_types" in config:
        return
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(layers, list) or not isinstance(heads, int) or not isinstance(hidden, int):
        raise CheckpointError(f"config: block_configs: expected a list, found {layers!r}")
    _set_layers(config, [_facts(i, one, heads, hidden) for i, one in enumerate(layers)])


def _set_layers(config: dict[str, Any], facts: Sequence[tuple[int, bool, int]]) -> None:
    """Heads of keys, whether a matrix is in their place, and the width of each layer."""
    config["layer_types"] = [_kind(*one) for one in facts]
    config[_KV_HEADS] = [kv for kv, _, _ in facts]
    config[_WIDTHS] = [width for _, _, width in facts]
    config["num_key_value_heads"] = max((1, *config[_KV_HEADS]))
    config["intermediate_size"] = max((1, *config[_WIDTHS]))


def _facts(layer: int, found: Any, heads: int, hidden: int) -> tuple[int, bool, int]:
    """Of one entry of ``block_configs``."""
    where = f"config: block_configs, layer {layer}"
    try:
        attention, mlp = dict(found["attention"]), dict(found["ffn"])
        group, factor = attention.pop("n_heads_in_group", None), mlp.pop("ffn_mult", None)
        linear = bool(attention.pop("replace_with_linear", False))
        lacks = bool(attention.pop("no_op", False)), bool(mlp.pop("no_op", False))
        kv = 0 if group is None or lacks[0] or linear else heads // int(group)
        width = 0 if factor is None or lacks[1] else int(2 * float(factor) * hidden / 3)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        expected = "attention with n_heads_in_group and ffn with ffn_mult"
        raise CheckpointError(f"{where}: expected {expected}, found {found!r}") from error
    _check_others(where, {**attention, **{f"ffn {key}": value for key, value in mlp.items()}})
    return kv, linear and not lacks[0], -(-width // _MULTIPLE) * _MULTIPLE


def _check_others(where: str, others: Mapping[str, Any]) -> None:
    """:raises UnsupportedError: a layer has a window, sinks, or a sparse or single matrix."""
    asked = next((key for key, value in others.items() if value), None)
    if asked is not None:
        raise UnsupportedError(
            f"{where}: {asked}: expected none, found {others[asked]!r}, which is not supported"
        )


def _caches(fields: Fields, windows: Sequence[int | None]) -> LayerCaches:
    """Of a layer without attention any."""
    heads, most = (fields.count(f"num_{own}_heads", 4096) for own in ("attention", "key_value"))
    whole = fields.count("hidden_size", MAX_WIDTH) // heads
    width = fields.count("head_dim", MAX_WIDTH, default=whole)
    each = fields.values.get(_KV_HEADS, [most] * len(windows))
    return [AttentionCache(kv or most, width, width) for kv in _numbers(fields, _KV_HEADS, each)]


def _widths(fields: Fields, layers: int) -> list[int]:
    most = fields.count("intermediate_size", MAX_WIDTH)
    each = _numbers(fields, _WIDTHS, fields.values.get(_WIDTHS, [most] * layers))
    return [one or most for one in each]


def _numbers(fields: Fields, key: str, found: Any) -> list[int]:
    """One for each layer, 0 where it has none."""
    layers = fields.values["num_hidden_layers"]
    known = isinstance(found, (list, tuple)) and len(found) == layers
    if not known or not all(type(one) is int and 0 <= one <= MAX_WIDTH for one in found):
        fields.fail(key, f"a list of {layers} numbers", found)
    return list(found)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """A layer with query heads and no others has a matrix in the place of attention."""
    heads = keys.present("attention.head_count", config["num_hidden_layers"])
    each = zip(heads, config[_KV_HEADS], config[_WIDTHS], strict=True)
    _set_layers(config, [(kv, any_head and not kv, width) for any_head, kv, width in each])


ARCHITECTURE = Architecture(
    "deci",
    aliases=("nemotron-nas",),
    config=ConfigRules(
        keys=(*("attention_bias", "mlp_bias", "block_configs", "layer_types", _KV_HEADS, _WIDTHS),),
        ignored=("skip_cache_conversion",),
        fixed={"hidden_act": "silu"},
        derived=_derived,
        kinds=_KINDS,
        caches=_caches,
        widths=_widths,
    ),
    more_gguf=(
        GgufRules(
            "deci",
            tensors={"self_attn.linear_attn": "attn_output"},
            read=_read_gguf,
            interleaved_qk=True,
        ),
    ),
)
