"""Attention, rope, row-wise and sampling kernels compiled for cards that are not here.

    echo '[["sm_90", "attention int8 .*"], ["gfx942", "rope .*"]]' | python compile_attention.py

Run as a program, because Triton must not interpret here; one JSON line per kernel. The launchers
run on tensors of the CPU with a driver that only knows a target, so what is compiled are the
variants a card would be given.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[3]))

from sdk.kernels.batch import AttentionBatch
from sdk.kernels.experts import Routes
from sdk.kernels.gpu import attention, elementwise, experts, launch, norm, rope, sampling
from sdk.kernels.kv_pages import KVPages
from sdk.kernels.sampling import Penalties

TARGETS = {
    **{f"sm_{cc}": GPUTarget("cuda", cc, 32) for cc in (75, 80, 89, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942")},
}
DTYPES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "int4")


class Compiled:
    """One kernel of one target."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self.asm, self.shared = name, kernel.asm, kernel.metadata.shared

    def _tool(self, tool: str, *options: str) -> str:
        folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        path = Path(triton.knobs.cache.dir) / f"{self.name}.cubin"
        path.write_bytes(self.asm["cubin"])
        command = [str(folder / tool), *options, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def usage(self) -> dict[str, int]:
        """Registers (REG), bytes on the stack (STACK; what was spilled lies there)."""
        found = re.findall(r"(REG|STACK):(\d+)", self._tool("cuobjdump", "--dump-resource-usage"))
        return {key: int(value) for key, value in found}

    def sass(self) -> str:
        """The machine's instructions."""
        return self._tool("nvdisasm", "-c")


class _OnlyATarget:
    """What a launch asks a driver for before it compiles."""

    def __init__(self, number: int, target: GPUTarget) -> None:
        self._number, self._target = number, target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def compiling(name: str) -> Iterator[list[Compiled]]:
    """Launches compile for a target, and are listed instead of run."""
    found: list[Compiled] = []
    whole = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = whole(self, *args, grid=grid, warmup=True, **options)
        found.append(Compiled(self.__name__, kernel))
        return kernel

    target = TARGETS[name]
    patch = pytest.MonkeyPatch()
    patch.setattr(JITFunction, "run", run)
    patch.setattr(driver, "_active", _OnlyATarget(list(TARGETS).index(name), target))
    patch.setattr(launch, "INTERPRETED", True)  # lets tensors of the CPU pass
    capability = (target.arch // 10, target.arch % 10) if target.backend == "cuda" else (9, 4)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    try:
        yield found
    finally:
        patch.undo()


def batch_of(counts: Sequence[int], context: int, shared: bool = False) -> AttentionBatch:
    tokens, requests = sum(counts), len(counts)
    return AttentionBatch(
        positions=torch.zeros(tokens, dtype=torch.int64),
        query_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        context_len=torch.full((requests,), context, dtype=torch.int32),
        page_table=torch.zeros(requests, 64, dtype=torch.int32),
        slots=torch.zeros(tokens, dtype=torch.int64),
        page_size=16,
        max_query_len=max(counts),
        max_context_len=context,
        shared_len=torch.zeros(1, dtype=torch.int32) if shared else None,
    )


def pages_of(dtype: str, head_dim: int) -> KVPages:
    """Pages of two heads, integers with a scale for every 64 dimensions or less (int4: 32)."""
    if (dtype.startswith("float") and "8" not in dtype) or dtype == "bfloat16":
        x = torch.zeros(4, 2, 16, head_dim, dtype=getattr(torch, dtype))
        return KVPages(x, x.clone())
    kind = torch.uint8 if dtype == "int4" else getattr(torch, dtype)
    codes = torch.zeros(4, 2, 16, head_dim // 2 if dtype == "int4" else head_dim).to(kind)
    groups = {"int4": -(-head_dim // 32), "int8": -(-head_dim // 64)}.get(dtype, 1)
    scale_kind = torch.int16 if dtype == "int4" else torch.float16
    scale = torch.zeros(4, 2 * groups, 16, dtype=scale_kind)
    return KVPages(codes, codes.clone(), scale, scale.clone())


def run_attention(
    dtype: str, head_dim: int = 128, group: int = 4, *, rich: bool = False, exact: bool = False
) -> None:
    """Prompts, decoding in one split and in several. ``rich``: window, cap, sinks, cascade."""
    pages = pages_of(dtype, head_dim)
    options = (128, 30.0, torch.zeros(2 * group)) if rich else (None, None, None)
    for counts, context in (([5, 1], 200), ([1, 1], 1000)):
        q = torch.zeros(sum(counts), 2 * group, head_dim)
        out = torch.zeros(sum(counts), 2 * group * head_dim)
        batch = batch_of(counts, context, shared=rich)
        attention.Attention(exact).run(q, pages, batch, 0.1, *options, out)


def run_rope(dtype: str, head_dim: int = 128) -> None:
    pages = pages_of(dtype, head_dim)
    heads = torch.zeros(3, 12, head_dim)
    q, k, v = heads.split([8, 2, 2], dim=1)
    angles = torch.zeros(3, head_dim // 2)
    rope.RopeAndCache().run(q, k, v, angles, angles.clone(), batch_of([3], 3), pages)


def run_rows() -> None:
    x, y = torch.zeros(4, 576), torch.zeros(4, 576)
    norm.RmsNorm().run(x, x[0], 1e-5, y)
    norm.AddRmsNorm().run(x, y, x[0], 1e-5, torch.zeros(4, 576))
    norm.RmsNorm().run(
        torch.zeros(4, 9, 128)[:, :3], torch.zeros(128), 1e-5, torch.zeros(4, 3, 128)
    )
    for kind in elementwise.ACTIVATIONS:
        elementwise.GatedActivation().run(torch.zeros(4, 1152), kind, y)
    for kind in elementwise.MAPS:
        elementwise.Map(kind).run(x, y if kind == "add" else y[0], 2.0)
    elementwise.SelectRows().run(x, torch.zeros(4, dtype=torch.int64), y)
    for back in (False, True):
        elementwise.TakeColumns().run(x, torch.zeros(576, dtype=torch.int32), back, y)
    elementwise.Places().run(batch_of([3, 1], 9))
    angles = torch.zeros(4, 64), torch.zeros(4, 64)
    rope.RopeAngles().run(torch.zeros(4, dtype=torch.int64), torch.zeros(64), 1.0, *angles)


def run_experts() -> None:
    order = [torch.zeros(size, dtype=torch.int32) for size in (8, 8, 8, 61, 61)]
    routes = Routes(torch.zeros(1, 8), order[0].view(1, 8), *order[1:])
    for normalized in (False, True):
        experts.Route().run(torch.zeros(1, 60), normalized, routes.places, routes.weights)
    experts.Group().run(routes.places, routes)
    experts.AddOwnersBias().run(torch.zeros(8, 576), torch.zeros(60, 576), routes)
    experts.Combine().run(torch.zeros(8, 576), routes, torch.zeros(1, 576))


def run_sampling() -> None:
    logits = torch.zeros(2, 32000)
    entries = torch.zeros(9, dtype=torch.int64)
    penalties = Penalties(entries, entries, torch.zeros(9), torch.zeros(2, 3))
    sampling.Penalize().run(logits, penalties)
    sampling.Sample().rows(logits, None)
    sampling.Sample().rows(logits, torch.zeros(2, 8, dtype=torch.float64))


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every variant, by name."""
    yield "rows", run_rows
    yield "sampling", run_sampling
    yield "experts", run_experts
    for dtype in DTYPES:
        yield f"rope {dtype}", partial(run_rope, dtype)
        for head_dim, rich in itertools.product((64, 80, 96, 128, 256), (False, True)):
            label = f"attention {dtype} {head_dim}{' window cap sinks cascade' if rich else ''}"
            yield label, partial(run_attention, dtype, head_dim, rich=rich)
    yield "attention exact", partial(run_attention, "float16", exact=True)


def line(target: str, label: str, kernel: Compiled) -> dict[str, Any]:
    """What a test or a log wants to know of a kernel."""
    found: dict[str, Any] = {"target": target, "case": label, "kernel": kernel.name}
    found["shared"] = kernel.shared
    if target.startswith("sm_"):
        sass = kernel.sass()
        # Plain loads or asynchronous copies to shared memory, of 128 bits.
        wide = re.findall(r"LDGSTS\S*\.128|LDG\.E\S*\.128", sass)
        matrix = set(re.findall(r"\bHG?MMA\b", sass))
        usage = kernel.usage()
        found |= {"registers": usage["REG"], "stack": usage["STACK"]}
        found |= {"wide": len(wide), "matrix": sorted(matrix)}
    return found


def main(jobs: Sequence[Sequence[str]]) -> None:
    """``jobs``: (target, a pattern of the names of cases)."""
    for target, wanted in jobs:
        for label, launches in cases():
            if not re.fullmatch(wanted, label):
                continue
            with compiling(target) as found:
                launches()
            for kernel in found:
                print(json.dumps(line(target, label, kernel)), flush=True)


if __name__ == "__main__":
    main(json.load(sys.stdin))
