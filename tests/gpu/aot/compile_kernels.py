"""Products compiled for cards that are not here: a program, see ``machine_code.py``.

    echo '{"jobs": [["int4-g128-zeros", "product", 16, "float16", "cuda", 90]], "wanted": null}' |
        python compile_kernels.py

A job is the layout (a name of ``WEIGHTS``), the kernel, tokens, type of the operands, and the
target. What is compiled is exactly what ``kernels/gpu/linear.py`` would launch.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from machine_code import Source, answer, launches  # noqa: E402

from sdk.kernels.gpu.dense import DenseLinear, product_dense  # noqa: E402
from sdk.kernels.gpu.expert_tiles import Routed  # noqa: E402
from sdk.kernels.gpu.launch import Launch  # noqa: E402
from sdk.kernels.gpu.linear import (  # noqa: E402
    TritonLinear,
    add_chunks,
    decode_experts,
    decode_rows,
    product,
    product_one,
)
from sdk.kernels.gpu.linear_as_file import (  # noqa: E402
    TritonLinearAsFile,
    product_bytes,
    round_rows,
)
from sdk.kernels.gpu.packing import Packed, pack  # noqa: E402
from sdk.kernels.gpu.shares import Sharing  # noqa: E402
from sdk.kernels.gpu.tuning import AMD_STAGES, DOUBLED, Tuning  # noqa: E402
from sdk.kernels.operators.routes import TILE_ROWS, Routes, tiles_at  # noqa: E402
from sdk.kernels.weights.layouts import BLOCK_TYPES, E2M1, ActivationScheme, Layout  # noqa: E402

#: Programs of a large card: a rule for tiles that shares columns.
_PROGRAMS = 528


@cache
def weight(name: str) -> Layout:
    """512 rows of a name such as ``int4-g128-zeros``, ``nf4-g64``, ``fp8-blocks`` or ``q4_k``."""
    spec = importlib.util.spec_from_file_location(
        "kernel_cases", ROOT / "tests" / "kernels" / "conftest.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_cases"] = module
    spec.loader.exec_module(module)
    cases = module.Cases
    n, k = 512, 1024
    if name in BLOCK_TYPES:
        return cases.blocks(n, k, name)
    made = {
        "float32": lambda: cases.dense(n, k, torch.float32),
        "float16": lambda: cases.dense(n, k, torch.float16),
        "bfloat16": lambda: cases.dense(n, k, torch.bfloat16),
        "nf4-g64": lambda: cases.table(n, k, 4, 64),
        "mxfp4": lambda: cases.table(n, k, 4, 32, torch.float8_e8m0fnu, values=E2M1),
        "nvfp4": lambda: cases.table(n, k, 4, 16, torch.float8_e4m3fn, k, values=E2M1),
        "fp8-channel": lambda: cases.float8(n, k, (1, k)),
        "fp8-blocks": lambda: cases.float8(n, k, (128, 128)),
        "fp8-e5m2": lambda: cases.float8(n, k, (1, k), torch.float8_e5m2),
    }
    if name in made:
        return made[name]()
    bits, group, kind = re.fullmatch(r"int(\d)-g(\d+)-(\w+)", name).groups()  # type: ignore[union-attr]
    return cases.affine(n, k, int(bits), int(group), kind)


@cache
def packed_weight(name: str) -> Packed:
    return pack(weight(name))


def routes_of(tokens: int, experts: int = 8, k: int = 2) -> Routes:
    def made(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    rows = tokens * k
    order = made(tokens, k), made(rows), made(rows), made(experts + 1), made(experts + 1)
    tiles = made(tiles_at(rows, experts, TILE_ROWS[-1] + 1), 2)
    return Routes(torch.zeros(tokens, k), *order, tiles=tiles)


def launch_of(name: str, kernel: str, tokens: int, dtype: torch.dtype) -> Launch:
    """Behind a product's name may stand ``experts``, of the rows routed to eight experts, ``silu``,
    of gate and up, and ``offloaded``, with weights that every step copies from the host.

    Few tokens share K, 64 do not. Both write the type of the activations.
    """
    kernel, *more = kernel.split()
    experts, activation = "experts" in more, "silu" if "silu" in more else ""
    layout, tuning = weight(name), Tuning(_PROGRAMS)
    if torch.version.hip is not None:
        tuning = replace(tuning, stages=AMD_STAGES)
    x = torch.empty(tokens, layout.shape[1], dtype=dtype)
    routes = routes_of(tokens)
    if kernel == "product_dense" and not experts:
        w = weight(name).values
        exact = x.dtype != w.dtype
        return product_dense(w, x, torch.empty(tokens, w.shape[0]), exact=exact)
    if kernel == "product_dense":
        dense = DenseLinear().group([layout] * 8)
        out = torch.empty(2 * tokens, layout.shape[0], dtype=dtype)
        routed = Routed(dense.offsets, routes, routes.tokens)
        return product_dense(dense.first.values, x, out, routed, range(8))
    if kernel in ("round_rows", "product_bytes"):
        return launch_of_bytes(name, kernel, x, routes if experts else None)
    packed = packed_weight(name)
    if "offloaded" in more:
        packed = replace(packed, rewritten=True)
    n, k = packed.shape
    tiles = tuning.tiles(packed, tokens)._replace(split=1 if tokens == 64 else 2)
    rows, routed = 2 * tokens if experts else tokens, None
    out = torch.empty(rows, n // 2 if activation else n, dtype=dtype)
    sharing = Sharing()
    if experts:
        group = TritonLinear(torch.float16, tuning).group([packed] * 8)
        routed = Routed(group.offsets, routes, routes.tokens)
    if kernel == "product":
        sums = torch.empty(64, tokens) if packed.has_minus or packed.zeros_bits == 32 else None
        return product(packed, x, sums, out, sharing, tiles, dtype, activation, routed)
    if kernel == "add_chunks":
        return add_chunks(x, torch.empty(k // 32, tokens), 32, dtype)
    if kernel == "product_one":
        return product_one(packed, x, out, sharing, tiles, activation, routed)
    if kernel == "decode_rows" and experts:
        return decode_experts(group, range(8), routes.starts, torch.empty(8, n * k, dtype=dtype))
    assert kernel == "decode_rows"
    return decode_rows(packed, torch.empty(tokens, k, dtype=dtype), 0)


def launch_of_bytes(name: str, kernel: str, x: Tensor, routes: Routes | None) -> Launch:
    """With the rule's tiles, narrow ones that share K or wide ones."""
    codes = "e4m3" if name.startswith("fp8") else "int"
    scheme = ActivationScheme(codes, group=128 if name == "fp8-blocks" else 0)
    layout = replace(weight(name), inputs=scheme)
    tuning = Tuning(_PROGRAMS)
    if torch.version.hip is not None:
        tuning = replace(tuning, stages=AMD_STAGES)
    else:
        major, _ = torch.cuda.get_device_capability(x.device)
        tuning = replace(tuning, doubled=DOUBLED.get(major, ()))
    linear = TritonLinearAsFile(tuning, ("int", "e4m3"))
    packed = linear.pack(layout)
    tokens, n = x.shape[0], packed.shape[0]
    codes = torch.empty(tokens, packed.values.shape[1], dtype=packed.values.dtype)
    scales = torch.empty(packed.scale.shape[0], tokens)
    if kernel == "round_rows":
        return round_rows(x, codes, scales, packed.inputs)
    busy, routed, rows = 1 if routes is None else 8, None, tokens
    tiles = tuning.tiles(packed, tokens, "linear_bytes", busy)
    if routes is not None:
        group = linear.group([packed] * 8)
        routed, rows = Routed(group.offsets, routes, routes.tokens), 2 * tokens
    out = torch.empty(rows, n, dtype=x.dtype)
    return product_bytes(packed, codes, scales, out, Sharing(), tiles, routed)


def sources(job: list[Any]) -> list[Source]:
    name, kernel, tokens, dtype, backend, arch = job
    with launches(GPUTarget(backend, arch, 32 if backend == "cuda" else 64)) as found:
        launch_of(name, kernel, tokens, getattr(torch, dtype)).run()
    return found


if __name__ == "__main__":
    answer(sources)
