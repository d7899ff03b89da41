"""The matrices of the heads of latent attention, which files hold in three ways.

They are ``kv_b_proj``, whose rows are those of one head after the other, a key's then a value's;
the same as ``attn_kv_b`` in older GGUF files; and in newer ones ``attn_k_b``, which is transposed
for queries, and ``attn_v_b``, one matrix for each head. The first two are cut by head, which every
weight format can do, and the keys' part is transposed. Blocks and groups run along rows, so it
becomes 16-bit floats unless it is plain floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sdk.kernels.lazy_torch import torch
from sdk.kernels.weights.layouts import Dense
from sdk.models.head_projection import HeadProjection
from sdk.models.parts import Matrix
from sdk.quant.head_weights import HeadWeights
from sdk.quant.weight import DenseWeight, PackedWeight, Weight

if TYPE_CHECKING:
    from sdk.models.configs.latent_spec import LatentSpec
    from sdk.models.source import Source

#: Activation bits of the products, as those of queries, keys and values.
_ACCURATE = 16


def key_heads(source: Source, path: str, index: int, spec: LatentSpec) -> HeadProjection:
    """What makes a head's query, without what turns, one that latents are multiplied with."""

    def cut(whole: Weight, head: int) -> Weight:
        start = head * (spec.still + spec.value)
        return _floats(whole.narrow("out", start, spec.still), transposed=True)

    return _heads(source, path, index, "k_b_proj", (spec.rank, spec.still), spec, cut)


def value_heads(source: Source, path: str, index: int, spec: LatentSpec) -> HeadProjection:
    """What makes a head's value of a sum of latents."""

    def cut(whole: Weight, head: int) -> Weight:
        start = head * (spec.still + spec.value) + spec.still
        own = whole.narrow("out", start, spec.value)
        # What the file says of activations is meant for latents, not for sums of them.
        return own if isinstance(own, PackedWeight) and not own.inputs else _floats(own)

    return _heads(source, path, index, "v_b_proj", (spec.value, spec.rank), spec, cut)


def _heads(
    source: Source,
    path: str,
    index: int,
    name: str,
    shape: tuple[int, int],
    spec: LatentSpec,
    cut: Callable[[Weight, int], Weight],
) -> HeadProjection:
    shard = source.heads_of(index)
    heads = range(shard.start, shard.start + shard.count)

    def pull() -> Matrix:
        if source.has(f"{path}.{heads[0]}.{name}"):
            each = [source.pull(f"{path}.{head}.{name}", shape) for head in heads]
            return Matrix(HeadWeights(each), None)
        rows = source.config.heads_of(index) * (spec.still + spec.value)
        whole = source.pull(f"{path}.kv_b_proj", (rows, spec.rank))
        return Matrix(HeadWeights([cut(whole, head) for head in heads]), None)

    weight = source.matrix_of(f"{path}.{name}", pull, _ACCURATE).weight
    assert isinstance(weight, HeadWeights)
    found = HeadProjection(weight, source.ops)
    source.linears.append((f"{path}.{name}", found))
    return found


def _floats(weight: Weight, *, transposed: bool = False) -> Weight:
    """A weight as floats: in the type of its file, or float16 where it has other codes."""
    values = weight.dequantize()
    if transposed:
        values = values.transpose(0, 1).contiguous()
    floats = {"f32": torch.float32, "bf16": torch.bfloat16}
    return DenseWeight(Dense(values.to(floats.get(str(weight.spec), torch.float16))))
