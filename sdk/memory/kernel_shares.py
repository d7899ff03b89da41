"""The kernels that would run a model's matrices, from the headers of its files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sdk.api.config import EngineConfig
from sdk.kernels.backend import Backend, Problem
from sdk.kernels.layouts import BLOCK_TYPES
from sdk.kernels.registry import choose, open_backends
from sdk.memory.plan import KernelShare
from sdk.memory.products import FLOAT_NAMES
from sdk.memory.resolve import compute_of, device_of
from sdk.memory.weights import held_bytes, numerics_of
from sdk.models.layers import ACCURATE
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.online import is_embedding_or_head, is_router
from sdk.quant.spec import QuantSpec

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
                is_embedding_or_head(entry.name) or is_router(entry.name) or _QKV.search(entry.name)
            )
            bits = ACCURATE if accurate else 8
            held = held_bytes(entry, device)
            sizes_of.setdefault((numerics_of(config, entry), bits), []).append(held)
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
