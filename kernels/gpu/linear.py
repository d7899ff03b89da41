"""Matrix products on packed weights with Triton: selects kernel and tiles by number of tokens.

One token: ``product_one``, in float32 arithmetic (``ONE_BY_ONE``: also a few). Below ``dense_from``
tokens: ``product``, on the matrix units. From there on, dequantizing a weight once into scratch and
a library product cost less than dequantizing it in every tile of tokens. For experts with
``experts_dense_from`` rows or more each, ``product_dense`` replaces the library. All must match
``kernels/reference/linear.py``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu import product as kernels, product_one as one_token
from sdk.kernels.gpu.dense import multiply, product_dense
from sdk.kernels.gpu.elementwise import Activate
from sdk.kernels.gpu.expert_tiles import (
    MOST_ROWS,
    PARTS,
    Experts,
    Routed,
    offsets_of,
    tile_arguments,
)
from sdk.kernels.gpu.launch import INTERPRETED, TYPES, Launch, expect_on_device, old_card
from sdk.kernels.gpu.packing import PLANES, Packed, pack, unpack
from sdk.kernels.gpu.scratch import (
    decoded_experts,
    decoded_rows,
    most_shares,
    padded,
    rows_of_parts,
    runs,
)
from sdk.kernels.gpu.shares import Sharing
from sdk.kernels.gpu.tuning import Tiles, Tuning
from sdk.kernels.operators.rounding import Rounding, Rows
from sdk.kernels.operators.routes import Routes
from sdk.kernels.weights.layouts import BLOCK_TYPES, TABLE_BITS, Dense, Layout, check_layout

#: What ``decode_values`` leaves to the scale: the difference of the exponents' biases.
FACTORS = {"e2m1": 2.0**14, "e4m3": 2.0**8}
#: The same of ``small_values``, of which x takes ``RAISE``: neither it nor a product overflows.
TINY = {"int": 149, "e2m1": 126, "e4m3": 120, "e5m2": 112}
RAISE = 80
#: Without matrix instructions up to so many tokens are multiplied one by one: 3.6 instructions per
#: weight and token for Q4_0, 24 per weight for 16 tokens (counted in the code for sm_75).
ONE_BY_ONE = 8


class TritonLinear:
    """See :class:`sdk.kernels.backend.LinearKernel`.

    ``dtype``: the type to which x and dequantized weights are rounded for the matrix units; inputs
    in float16 or bfloat16 keep their type. float32 rounds nothing (``compute="exact"``). ``fixed``:
    one kernel and one order of additions for every number of tokens, so that a row's result does
    not depend on the others. ``sharing``: that of the engine's other kernels.
    """

    reads_parts = False
    packs_pieces = False
    gates = True

    def __init__(
        self,
        dtype: torch.dtype,
        tuning: Tuning,
        *,
        fixed: bool = False,
        sharing: Sharing | None = None,
    ) -> None:
        self.dtype = dtype
        self._tuning = tuning
        self._fixed = fixed
        self._sharing = sharing or Sharing()
        self.name = "gpu.linear_exact" if dtype == torch.float32 else "gpu.linear"

    def tuned(self, tuning: Tuning) -> TritonLinear:
        """A copy of this kernel with other tiles."""
        other = copy.copy(self)
        other._tuning = tuning
        return other

    def op_of(self, packed: Packed) -> str:
        """The operator name under which the tiles of a weight are tuned."""
        return "linear"

    def reject(self, problem: Problem) -> str | None:
        if problem.inputs:
            return f"the file asks for activations in {problem.inputs}"
        if problem.compute == "exact" and self.dtype != torch.float32:
            name = str(self.dtype).removeprefix("torch.")
            return f"rounds activations to {name}, but compute is exact"
        if problem.layout == "affine":
            if problem.format == "table" and problem.bits not in TABLE_BITS:
                return f"a table of {problem.bits} bits: expected one of {TABLE_BITS}"
            if problem.bits not in PLANES:
                return f"{problem.bits} bits: expected 1 to 8"
            if problem.group % 16 and problem.group < problem.in_features:
                return f"group {problem.group}: expected a multiple of 16 or the whole row"
        elif problem.layout == "float8":
            if problem.group % 16 and problem.group < problem.in_features:
                return f"blocks of {problem.group} columns: expected a multiple of 16"
        elif problem.layout == "blocks":
            if problem.format not in BLOCK_TYPES:
                return f"block type {problem.format}: expected {', '.join(BLOCK_TYPES)}"
        else:
            return f"layout {problem.layout!r}: expected affine, blocks or float8"
        return None

    def rounding(self, packed: Packed) -> Rounding | None:
        return None

    def pack(self, layout: Layout) -> Packed:
        check_layout(layout)
        assert not isinstance(layout, Dense)
        packed = pack(layout)
        self._sharing.prepare(packed.scale.device)
        return packed

    def unpack(self, packed: Packed) -> Layout:
        return unpack(packed)

    def nbytes(self, packed: Packed) -> int:
        return packed.nbytes

    def matmul(self, packed: Packed, x: Rows, out: Tensor, activation: str = "") -> None:
        assert isinstance(x, Tensor)
        expect_on_device("linear", x, out, packed.scale)
        tokens = x.shape[0]
        dtype = self._dot_type(x)
        if not self._fixed and tokens >= self._tuning.dense_from and dtype != torch.float32:
            wide = before_activation(out, activation)
            self._matmul_dense(packed, x.to(dtype), wide)
            activate_rows(wide, activation, out)
            return
        few = tokens == 1 or (tokens <= ONE_BY_ONE and old_card(x.device))
        one = few and not self._fixed
        tiles = self._tuning.tiles(packed, 2 if self._fixed else 1 if one else tokens)
        tiles = tiles._replace(split=min(tiles.split, packed.units))
        step = tokens if tiles.split == 1 else rows_of_parts(packed.shape[0], tiles.split)
        if tokens <= step:
            self._multiply(packed, x, out, tiles, activation, one=one)
            return
        for rows in runs(tokens, step):
            self._multiply(packed, x[rows], out[rows], tiles, activation, one=one)

    def _dot_type(self, x: Tensor) -> torch.dtype:
        return x.dtype if x.itemsize == 2 and self.dtype.itemsize == 2 else self.dtype

    def _multiply(
        self,
        w: Packed,
        x: Tensor,
        out: Tensor,
        tiles: Tiles,
        activation: str,
        *,
        one: bool,
        routed: Routed | None = None,
    ) -> None:
        """``one``: row by row, of experts each with its own weight."""
        if one:
            product_one(w, x, out, self._sharing, tiles, activation, routed).run()
        else:
            dtype, sums = self._dot_type(x), None
            if w.has_minus or w.zeros_bits == 32:
                chunk = chunk_of(w, tiles.split)
                count = max(-(-x.shape[1] // chunk), tiles.split)
                sums = torch.empty(count, x.shape[0], device=x.device)
                add_chunks(x, sums, chunk, dtype).run()
            product(w, x, sums, out, self._sharing, tiles, dtype, activation, routed).run()

    def _matmul_dense(self, packed: Packed, x: Tensor, out: Tensor) -> None:
        n, k = packed.shape
        rows_at_once = decoded_rows(n, k, x.itemsize, x.shape[0])
        scratch = torch.empty(rows_at_once, k, dtype=x.dtype, device=x.device)
        for rows in runs(n, len(scratch)):
            w = scratch[: rows.stop - rows.start]
            decode_rows(packed, w, rows.start).run()
            multiply(x, w, out[:, rows])

    def rows(self, packed: Packed, ids: Tensor, out: Tensor) -> None:
        expect_on_device("rows", ids, out, packed.scale)
        decode_rows(packed, out, ids).run()

    def group(self, packed: Sequence[Packed]) -> Experts[Packed] | None:
        if any(p.nans for p in packed):
            packed = [replace(p, nans=True) for p in packed]
        described = [_weight(p) for p in packed]
        tables = [p.tables[torch.float32] for p in packed if p.tables is not None]
        if any(constants != described[0][1] for _, constants in described[1:]):
            return None
        if any(not torch.equal(table, tables[0]) for table in tables[1:]):
            return None
        offsets = offsets_of([{name: given[name] for name in PARTS} for given, _ in described])
        return None if offsets is None else Experts(tuple(packed), offsets)

    def matmul_routed(
        self,
        group: Experts[Packed],
        x: Tensor,
        routes: Routes,
        by_token: bool,
        out: Tensor,
        activation: str = "",
    ) -> None:
        expect_on_device("linear of experts", x, out, group.offsets)
        routed = Routed(group.offsets, routes, routes.tokens if by_token else None)
        rows, dtype = out.shape[0] // group.count, self._dot_type(x)
        many = rows >= self._tuning.experts_dense_from and dtype != torch.float32
        if many and not self._fixed:
            wide = before_activation(out, activation)
            self._experts_dense(group, x.to(dtype), routed, wide)
            activate_rows(wide, activation, out)
            return
        one = routes.weights.shape[0] == 1 and not self._fixed
        tiles = self._tiles_of(group, routes, 1 if one else 2)
        self._multiply(group.first, x, out, tiles, activation, one=one, routed=routed)

    def _experts_dense(
        self, group: Experts[Packed], x: Tensor, routed: Routed, out: Tensor
    ) -> None:
        """Dequantize as many experts as fit in scratch, multiply their rows, and repeat.

        The numbers of rows per expert stay on the card, so that nothing waits for the host.
        """
        n, k = group.first.shape
        size, count = padded(n, k), decoded_experts(group.count, n, k, x.itemsize)
        scratch = torch.empty(count, size, dtype=x.dtype, device=x.device)
        places = torch.arange(group.count, device=x.device) % count * size
        decoded = replace(routed, offsets=places)
        for first in range(0, group.count, count):
            experts = range(first, min(first + count, group.count))
            decode_experts(group, experts, routed.routes.starts, scratch).run()
            weight = scratch[0, : n * k].view(n, k)
            product_dense(weight, x, out, decoded, experts).run()

    def _tiles_of(self, group: Experts[Packed], routes: Routes, least: int) -> Tiles:
        """Tiles by the average number of rows per expert, at least ``least``.

        All experts share the card, so tiles measured for one weight split K into too many shares.
        With a fixed order of additions K is not split: shares of many rows would need gigabytes.
        """
        rows, w = routes.tokens.shape[0], group.first
        op = self.op_of(w)
        average = 2 if self._fixed else max(least, -(-rows // group.count))
        tiles = self._tuning.measured(w, average, f"{op}_experts")
        busy = 1 if tiles is not None else min(rows, group.count)
        tiles = tiles or self._tuning.tiles(w, average, op, busy)
        room = 1 if self._fixed else most_shares(rows, w.shape[0])
        return tiles._replace(split=max(1, min(min(tiles.split, w.units) // busy, room)))


def product(
    packed: Packed,
    x: Tensor,
    sums: Tensor | None,
    out: Tensor,
    sharing: Sharing,
    tiles: Tiles,
    dtype: torch.dtype,
    activation: str = "",
    routed: Routed | None = None,
) -> Launch:
    """``product``: x ``[M, K]``, out ``[M, N]``, with an ``activation`` ``[M, N / 2]``.

    ``sums``: from :func:`add_chunks`, for a weight with minima. ``routed``: the experts' rows
    instead of M; the weight is then the first expert's.
    """
    tokens, n = x.shape[0], packed.shape[0]
    # 64 columns without matrix instructions leave too few registers: up to 480 bytes were spilled
    # on sm_90 (q3_k), 1.7 KiB on sm_75. Nor do 32 fit for codes of 2 bits with zero points or
    # minima (208 bytes on sm_90, 856 on sm_100).
    plain = dtype == torch.float32 or old_card(x.device)
    most = tiles.block_m if routed is None else min(tiles.block_m, MOST_ROWS)
    if plain:
        most = 16 if packed.bits == 2 and (packed.zeros_bits or packed.has_minus) else 32
    block_m = min(tiles.block_m, most, max(16, triton.next_power_of_2(tokens)))
    weights, constants = _weight(packed, dtype)
    count = -(-tokens // block_m) if routed is None else routed.tiles(block_m)
    grid = (count, -(-n // tiles.block_n), tiles.split)
    arguments = {
        **weights,
        "x": x,
        "sums": out if sums is None else sums,
        "out": out,
        "M": tokens,
        "share": -(-packed.units // tiles.split),
        "x_stride": x.stride(0),
        "out_stride": out.stride(0),
        **sharing.arguments(tiles.split, out.shape[0], n, grid[0] * grid[1], x.device),
        **tile_arguments(routed, block_m),
    }
    constants = {
        **constants,
        "DOT": TYPES[dtype],
        "BLOCK_N": tiles.block_n,
        "BLOCK_M": block_m,
        "WIDEN": dtype == torch.bfloat16 and INTERPRETED,
        "ROUTED": routed is not None,
        "SHARED": tiles.split > 1,
        "ACTIVATION": activation,
        "WARPS": tiles.warps if tiles.block_n == 16 * tiles.warps else 0,
    }
    stages = min(tiles.stages, 2) if plain else tiles.stages
    options = {"num_warps": tiles.warps, "num_stages": stages}
    return Launch(kernels.product, grid, arguments, constants, options)


def chunk_of(p: Packed, split: int) -> int:
    """Columns with one scale in a program of ``product`` with ``split`` shares of K."""
    if p.group >= p.shape[1]:
        return -(-p.units // split) * p.unit
    return math.gcd(p.unit, p.group)


def add_chunks(x: Tensor, sums: Tensor, chunk: int, dtype: torch.dtype) -> Launch:
    """Sums of ``chunk`` columns of x ``[M, K]`` rounded to ``dtype``: float32 ``[C, M]``."""
    tokens, k = x.shape
    arguments = {"x": x, "sums": sums, "M": tokens, "K": k, "x_stride": x.stride(0)}
    block = min(1024, triton.next_power_of_2(chunk))
    constants = {"CHUNK": chunk, "DOT": TYPES[dtype], "BLOCK": block}
    return Launch(kernels.add_chunks, (tokens, sums.shape[0], 1), arguments, constants, {})


def product_one(
    packed: Packed,
    x: Tensor,
    out: Tensor,
    sharing: Sharing,
    tiles: Tiles,
    activation: str = "",
    routed: Routed | None = None,
) -> Launch:
    """``product_one``: x ``[M, K]``, out as in :func:`product`.

    ``routed``: the rows of one token's experts instead.
    """
    weights, constants = _weight(packed)
    n = packed.shape[0]
    grid = (out.shape[0], -(-n // tiles.block_n), tiles.split)
    arguments = {
        **weights,
        "x": x,
        "out": out,
        "share": -(-packed.units // tiles.split),
        "x_stride": x.stride(0),
        "out_stride": out.stride(0),
        **sharing.arguments(tiles.split, out.shape[0], n, grid[0] * grid[1], x.device),
        "offsets": None if routed is None else routed.offsets,
        "owners": None if routed is None else routed.routes.owners,
        "sources": None if routed is None else routed.sources,
    }
    tiny = packed.kind in TINY
    constants = {
        **constants,
        "BLOCK_N": tiles.block_n,
        "ROUTED": routed is not None,
        "EARLY": routed is None and not packed.rewritten,
        "SHARED": tiles.split > 1,
        "ACTIVATION": activation,
        "RAISE": 2.0**RAISE if tiny else 1.0,
        "FACTOR": 2.0 ** (TINY[packed.kind] - RAISE) if tiny else 1.0,
    }
    return Launch(one_token.product_one, grid, arguments, constants, {"num_warps": tiles.warps})


def decode_rows(packed: Packed, out: Tensor, rows: Tensor | int) -> Launch:
    """Dequantize ``rows`` (int64 ``[T]``, or from that row on) into out ``[T, K]``."""
    chosen = isinstance(rows, Tensor)
    weights, constants = _weight(packed)
    arguments = {
        **weights,
        "ids": rows if chosen else out,
        "out": out,
        "count": out.shape[0],
        "start": 0 if chosen else rows,
        "out_stride": out.stride(0),
        "offsets": None,
        "starts": None,
        "low": 0,
        "expert_stride": 0,
    }
    block = 16
    constants = {**constants, "IDS": chosen, "EXPERTS": False, "BLOCK_N": block}
    del constants["WHOLE"], constants["EVEN"]
    grid = (-(-out.shape[0] // block), packed.units, 1)
    options = {"num_warps": 2, "enable_fp_fusion": False}
    return Launch(kernels.decode_rows, grid, arguments, constants, options)


def decode_experts(group: Experts[Packed], experts: range, starts: Tensor, out: Tensor) -> Launch:
    """Dequantize those of ``experts`` that have rows, ``[N, K]`` at the start of a row of out.

    ``starts``: from :class:`Routes`.
    """
    n, k = group.first.shape
    one = decode_rows(group.first, out[0, : n * k].view(n, k), 0)
    arguments = one.arguments | {"offsets": group.offsets, "starts": starts}
    arguments |= {"low": experts.start, "expert_stride": out.stride(0)}
    constants = one.constants | {"EXPERTS": True}
    return replace(
        one, grid=(*one.grid[:2], len(experts)), arguments=arguments, constants=constants
    )


def before_activation(out: Tensor, activation: str) -> Tensor:
    """Memory for a product whose rows an ``activation`` makes half as long; out without one."""
    return out.new_empty(out.shape[0], 2 * out.shape[1]) if activation else out


def activate_rows(wide: Tensor, activation: str, out: Tensor) -> None:
    """``out`` from :func:`before_activation`'s ``wide``."""
    if activation:
        Activate(gated=True).run(wide, activation, out)


def _weight(
    p: Packed, table: torch.dtype = torch.float32
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A weight's arguments and constants for every kernel, made once for each type of tables."""
    if table not in p.launches:
        p.launches[table] = _described(p, table)
    return p.launches[table]


def _described(p: Packed, table: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """See :func:`_weight`; any other tensor stands in for missing ones."""
    n, k = p.shape
    whole = p.group >= k
    widths = (*PLANES[p.bits], 0, 0)
    planes = (*p.planes, p.planes[0], p.planes[0])
    arguments: dict[str, Any] = dict(zip(("w0", "w1", "w2"), planes, strict=False))
    arguments["scale"] = p.scale
    for name in ("super_scale", "nested", "offset", "zeros", "minus", "super_minus"):
        part = getattr(p, name)
        arguments[name] = p.scale if part is None else part
    arguments["table"] = p.scale if p.tables is None else p.tables[table]
    if p.scale_bits == "low4":  # one byte holds scale and minimum
        arguments["minus"] = p.scale
    arguments |= {"N": n, "K": k, "units": p.units, "scale_stride": p.scale.shape[1]}
    arguments["scale_rows"] = p.scale_rows
    minus = "high4" if p.scale_bits == "low4" else "super" if p.super_minus is not None else "plain"
    constants = {
        "KIND": p.kind,
        **dict(zip(("WIDTH", "WIDTH_1", "WIDTH_2"), widths, strict=False)),
        "UNIT": p.unit,
        "CHUNK": p.unit if whole else math.gcd(p.unit, p.group),
        "GROUP": p.group,
        "SUPER": p.super_group,
        "SCALE": p.scale_bits,
        "FACTOR": FACTORS.get(p.kind, 1.0),
        "ZEROS": p.zeros_bits,
        "ZERO": float(p.zero),
        "MINUS": minus if p.has_minus else "",
        "NANS": p.nans,
        "PAIRS": p.pairs,
        "WHOLE": whole,
        "EVEN": p.units * p.unit == k,
    }
    return arguments, constants
