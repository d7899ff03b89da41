"""The order of the rows of joined projections.

The library's order for gate and up is all rows of gate, then all of up. Some models store up first
(``TensorRules.up_before_gate``). Its order for queries, keys and values is all queries, all keys,
all values. Some models store one key/value head after the other (``TensorRules.qkv_by_group``):
its query heads, its key, its value. With one key/value head both orders are the same. With as many
key/value heads as query heads, a query, a key and a value take turns. Rows of a packed weight are
moved as they are.

CodeGen's files have the rows of four ranks (``TensorRules.qkv_by_rank``).

The joined projections of delta nets are stored by head of keys in some folders
(``TensorRules.deltas_by_key_head``): queries, keys, values and gates of one, or strengths and
decays of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.loaders.model_shapes import head_dim
from sdk.models.architecture import architecture
from sdk.quant.errors import UnsupportedError


def stored_rows(config: Mapping[str, Any], name: str) -> Tensor | None:
    """For each row of ours the row of the file, int64; ``None``: they are the same.

    ``name``: of the matrix or of its bias.

    :raises UnsupportedError: their order is not known.
    """
    own = architecture(config.get("model_type"))
    stem = name.removesuffix(".bias")
    ranks = None if own is None else own.tensors.qkv_by_rank
    if own is not None and ranks == 0 and stem.endswith(".qkv_proj"):
        raise UnsupportedError(
            f"{name}: expected q_proj, k_proj and v_proj, found them joined: files of "
            f"{own.model_type} have the rows of several ranks one after the other and do not say "
            "of how many; its GGUF files have them in order"
        )
    if own is not None and own.tensors.up_before_gate and stem.endswith(".gate_up_proj"):
        width = int(config["intermediate_size"])
        return torch.cat([torch.arange(width, 2 * width), torch.arange(width)])
    if (found := delta_rows(config, stem)) is not None:
        return found
    if ranks and stem.endswith(".qkv_proj"):
        hidden = int(config["hidden_size"])
        q, v, k = torch.arange(3 * hidden).view(ranks, 3, -1).unbind(1)
        return torch.cat([part.reshape(-1) for part in (q, k, v)])
    if own is None or not own.tensors.qkv_by_group or not stem.endswith(".qkv_proj"):
        return None
    heads, width = int(config["num_attention_heads"]), head_dim(config)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    rows = torch.arange((heads + 2 * kv_heads) * width).view(kv_heads, -1, width)
    q, k, v = rows[:, :-2], rows[:, -2], rows[:, -1]
    return torch.cat([part.reshape(-1) for part in (q, k, v)])


def delta_rows(config: Mapping[str, Any], stem: str) -> Tensor | None:
    """The rows of a delta net's ``in_proj_qkvz`` or ``in_proj_ba``, which llama.cpp's converter
    leaves as they are; ``None`` for others."""
    own = architecture(config.get("model_type"))
    if own is None or not own.tensors.deltas_by_key_head or ".linear_attn." not in stem:
        return None
    heads, values = (int(config[f"linear_num_{side}_heads"]) for side in ("key", "value"))
    wide_k, wide_v = (int(config[f"linear_{side}_head_dim"]) for side in ("key", "value"))
    each = values // heads
    sizes = {
        "in_proj_qkvz": (wide_k, wide_k, each * wide_v, each * wide_v),
        "in_proj_ba": (each, each),
    }.get(stem.rpartition(".")[2])
    if sizes is None:
        return None
    rows = torch.arange(heads * sum(sizes)).view(heads, sum(sizes))
    return torch.cat([part.reshape(-1) for part in rows.split_with_sizes([*sizes], dim=1)])


def our_rows(config: Mapping[str, Any], name: str) -> Tensor | None:
    """The inverse of :func:`stored_rows`: for each row of the file the row of ours."""
    return _inverse(stored_rows(config, name))


def our_delta_rows(config: Mapping[str, Any], stem: str) -> Tensor | None:
    """The inverse of :func:`delta_rows`."""
    return _inverse(delta_rows(config, stem))


def _inverse(rows: Tensor | None) -> Tensor | None:
    if rows is None:
        return None
    inverse = torch.zeros_like(rows)
    inverse[rows] = torch.arange(len(rows))
    return inverse
