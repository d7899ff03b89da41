"""The matrix products of a model, and the kernels that would run them, from the headers of its
files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Any

from sdk.api.config import EngineConfig
from sdk.kernels.backend import Backend, Problem
from sdk.kernels.lazy_torch import torch
from sdk.kernels.registry import choose, open_backends
from sdk.kernels.scratch import Matrix, Products
from sdk.kernels.weights.layouts import BLOCK_TYPES
from sdk.memory.plan import KernelShare
from sdk.memory.resolve import compute_of, device_of
from sdk.memory.weights import held_bytes, numerics_of
from sdk.models.configs.config import ModelConfig
from sdk.models.source import ACCURATE
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.online import is_embedding_or_head, stays_float
from sdk.quant.spec import QuantSpec

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


_INTEGERS = re.compile(r"(?:gptq-|awq-)?w(\d)(?:a\d+)?(g\d+)?s?")
#: Queries, keys and values, in GGUF files and in folders: models bind them as accurate layers.
_QKV = re.compile(r"\battn_(q|k|v|qkv)\b|\b(q|k|v|qkv)_proj\b")


def kernel_shares(config: EngineConfig, checkpoint: Checkpoint) -> Iterator[KernelShare]:
    """The matrices by format. Not every header says that a file asks for quantized activations: the
    engine may choose ``linear_as_file`` instead of the kernel given here."""
    sizes_of: dict[tuple[str, int], list[int]] = {}
    device = device_of(config)
    for entry in checkpoint.entries():
        if len(entry.shape) > 1:
            accurate = (
                is_embedding_or_head(entry.name)
                or stays_float(entry.name)
                or _QKV.search(entry.name)
            )
            bits = ACCURATE if accurate else 8
            held = held_bytes(entry, device)
            sizes_of.setdefault((numerics_of(entry), bits), []).append(held)
    backends, _ = open_backends(device, 1)
    try:
        for (numerics, bits), sizes in sizes_of.items():
            kernel = _kernel(config, backends, numerics, bits)
            yield KernelShare(numerics, kernel, len(sizes), sum(sizes))
    finally:
        for backend in backends:
            backend.close()


def _kernel(config: EngineConfig, backends: list[Backend], numerics: str, bits: int) -> str:
    """The kernel of a matrix whose rows are multiples of the group size."""
    fields: dict[str, Any] = {"layout": "dense", "format": FLOAT_NAMES.get(numerics, "float32")}
    integers = _INTEGERS.fullmatch(numerics)
    if numerics in BLOCK_TYPES:
        fields = {"layout": "blocks", "format": numerics}
    elif numerics.startswith(("fp8", "f8", "mxfp8")):
        fields = {"layout": "float8", "format": "float8_e4m3fn"}
    elif integers is not None:
        group = int((integers[2] or "g0")[1:])
        fields = {"layout": "affine", "bits": int(integers[1]), "group": group}
    elif numerics not in FLOAT_NAMES:
        spec = QuantSpec.parse(numerics)
        fields = {"layout": "affine", "format": "table", "bits": spec.bits, "group": spec.group}
    fields |= {"compute": compute_of(config), "activation_bits": bits}
    problem = Problem("linear", **fields)
    return choose(backends, problem).name
