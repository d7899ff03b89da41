"""The matrix products of a model, from its config and the formats of its matrices."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import replace

from sdk.kernels.layouts import BLOCK_TYPES
from sdk.kernels.lazy_torch import torch
from sdk.kernels.scratch import Matrix, Products
from sdk.models.config import ModelConfig

#: Formats that are plain floats.
FLOAT_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
#: Formats whose files may ask for quantized activations; their headers do not always say so.
_INPUTS = re.compile(r"w\d|fp8|f8|mxfp|nvfp")


def products_of(
    model: ModelConfig,
    formats: tuple[Set[str], Set[str]],
    activations: torch.dtype,
    *,
    exact: bool,
    fixed: bool,
) -> Products:
    """``formats``: of the matrices of the blocks, and of embedding and head. The matrices are
    joined as in the models: q, k and v into one, gate and up into one."""
    blocks, ends = formats
    hidden, width, experts = model.hidden_size, model.intermediate_size, model.experts
    inner = model.num_heads * model.head_dim
    shapes = [(inner + 2 * model.num_kv_heads * model.head_dim, hidden), (hidden, inner)]
    if experts is None or not all(experts.layers):
        shapes += [(2 * width, hidden), (hidden, width)]
    matrices = [_matrix(n, k, blocks) for n, k in shapes]
    if experts is not None:
        matrices.append(Matrix(experts.count, hidden, plain=True, packed=False))  # the router
        for n, k in ((2 * experts.width, hidden), (hidden, experts.width)):
            one = _matrix(n, k, blocks)
            matrices.append(replace(one, experts=experts.count, per_token=experts.per_token))
        if experts.shared_width:
            beside = (2 * experts.shared_width, hidden), (hidden, experts.shared_width)
            matrices += [_matrix(n, k, blocks) for n, k in beside]
    return Products(
        matrices=tuple(matrices),
        head=_matrix(model.vocab_size, hidden, ends or blocks),
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        copied=_copied(blocks | ends, activations),
        rounds=any(_INPUTS.search(name) for name in blocks | ends),
        exact=exact,
        fixed=fixed,
        layers=model.num_layers,
        blocks=(blocks | ends) - FLOAT_NAMES.keys() <= BLOCK_TYPES.keys(),
    )


def _matrix(n: int, k: int, formats: Set[str]) -> Matrix:
    plain = not formats.isdisjoint(FLOAT_NAMES)
    return Matrix(n, k, plain=plain, packed=not formats <= FLOAT_NAMES.keys())


def _copied(formats: Set[str], activations: torch.dtype) -> int:
    """Bytes per value of the copy of x that torch's product needs; 0 if it needs no copy."""
    types = [getattr(torch, name) for file, name in FLOAT_NAMES.items() if file in formats]
    if not formats <= FLOAT_NAMES.keys():  # dequantized to 16 bits
        types.append(torch.float16 if activations == torch.float32 else activations)
    return max((kind.itemsize for kind in types if kind != activations), default=0)
