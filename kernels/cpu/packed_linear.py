"""Matrix products on packed weights: ``native/linear_int.hpp`` and ``native/linear_float.hpp``.

:mod:`.packed_weight` describes how weights are packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import Array, addressof, c_void_p
from dataclasses import replace
from typing import TYPE_CHECKING

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.elementwise import floats
from sdk.kernels.cpu.library import (
    EmbeddingArgs,
    ExpertsArgs,
    FetchArgs,
    FilePart,
    HeadsArgs,
    LinearArgs,
    OpKind,
)
from sdk.kernels.cpu.packed_weight import (
    BLOCK_SOURCES,
    TILE_DEPTH,
    Packed,
    canonical,
    packing_source,
    prepared,
)
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.cpu.weight_memory import WeightMemory
from sdk.kernels.dataclass import dataclass
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.routes import Routes
from sdk.kernels.weights.layouts import TABLE_BITS, Layout, check_layout

if TYPE_CHECKING:
    from sdk.kernels.cpu.expert_cache import ExpertCache, ExpertGroup

#: Torch types of plain values.
_VALUES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a layer's experts, the addresses of their views for the library, the part of a
    file that holds them, and the cache that has those which are in memory."""

    weights: tuple[Packed, ...]
    addresses: Array[c_void_p]
    file: FilePart | None
    cached: ExpertGroup | None = None


class PackedLinear:
    """See :class:`sdk.kernels.backend.LinearKernel`.

    ``activation_bits`` 8: activations are quantized per 32 values (quantized weights only). 16: in
    blocks whose scale, squared, is above 1.5 times the mean square of their row's scales, the
    residual is quantized and multiplied too. With both, the values of a table are 8-bit integers
    (``int8_table``). 32, and always for plain floats: everything is fp32.
    """

    reads_parts = True
    packs_pieces = True
    gates = False
    rounds_inputs = False

    def __init__(self, runtime: NativeRuntime, memory: WeightMemory, activation_bits: int) -> None:
        self._runtime = runtime
        self._memory = memory
        self._bits = activation_bits
        self.name = {8: "cpu.linear", 16: "cpu.linear_a16", 32: "cpu.linear_exact"}[activation_bits]

    def reject(self, problem: Problem) -> str | None:
        if problem.inputs:
            return f"the file asks for activations in {problem.inputs}"
        if self._bits < 32 and problem.compute == "exact":
            return f"quantizes activations to {self._bits} bits, compute is exact"
        plain = problem.layout in ("dense", "float8")
        if self._bits < problem.activation_bits and not plain:
            requested = problem.activation_bits
            return f"quantizes activations to {self._bits} bits, {requested} bits were requested"
        if problem.layout == "dense":
            if problem.format not in _VALUES:
                return f"dense {problem.format}: expected {', '.join(_VALUES)}"
        elif problem.layout == "float8":
            if problem.format not in _VALUES[3:]:
                return f"scaled {problem.format}: expected {', '.join(_VALUES[3:])}"
        elif problem.layout == "affine":
            if problem.format == "table":
                if problem.bits not in TABLE_BITS:
                    return f"a table of {problem.bits} bits: expected one of {TABLE_BITS}"
            elif not 2 <= problem.bits <= 8:
                return f"{problem.bits} bits: expected 2 to 8"
            if problem.super_group % TILE_DEPTH and problem.super_group < problem.in_features:
                return f"super group {problem.super_group}: expected a multiple of {TILE_DEPTH}"
            single = problem.group == 1 and not problem.super_group and problem.format != "table"
            runs = problem.group % 16 == 0 or (single and self._bits == 32)
            if not runs and problem.group < problem.in_features:
                return f"group {problem.group}: expected a multiple of 16 or the whole row"
        elif problem.layout == "blocks":
            if problem.format not in BLOCK_SOURCES:
                return f"block type {problem.format}: expected {', '.join(BLOCK_SOURCES)}"
        else:
            return f"layout {problem.layout!r}: expected dense, float8, affine or blocks"
        return None

    def rounding(self, packed: object) -> None:
        """Rows are floats."""

    def pack(self, layout: Layout) -> Packed:
        return self._pack(layout.shape[0], (layout,))

    def pack_pieces(self, rows: int, pieces: Iterable[Layout]) -> Packed:
        return self._pack(rows, pieces)

    def _pack(self, rows: int, pieces: Iterable[Layout]) -> Packed:
        file = self._memory.file
        start = 0 if file is None else file.used
        packed: Packed | None = None
        done = 0
        for piece in pieces:
            check_layout(piece)
            if packed is None:
                packed = prepared(piece, rows, self._memory)
            count = piece.shape[0]
            source, row_bytes = packing_source(piece)
            self._runtime.pack(packed, source, row_bytes, done, count)
            done += count
        assert packed is not None and done == rows
        if file is None:
            return packed
        self._runtime.finish_packing()
        return replace(packed, file=file.part(start))

    def unpack(self, packed: Packed) -> Layout:
        self._runtime.finish_packing()
        layout, out, row_bytes = canonical(packed)
        self._runtime.unpack(packed, out, row_bytes)
        if packed.file is not None and self._memory.file is not None:
            self._memory.file.release(packed.file)
        return layout

    def matmul(self, packed: Packed, x: Tensor, out: Tensor) -> None:
        floats(x, "linear x")
        args = self._arguments(packed, x, out)
        args.rounded = self.rounds_inputs
        self._runtime.run(OpKind.LINEAR, args, x.shape[0], "linear")

    def group(self, packed: Sequence[Packed]) -> ExpertWeights:
        weights = tuple(packed)
        cache = self._memory.experts
        if cache is not None and (cached := cache.group(weights)) is not None:
            views = (c_void_p * len(weights))(*map(addressof, cached.views))
            return ExpertWeights(weights, views, None, cached)
        addresses = (c_void_p * len(weights))(*(addressof(weight.view) for weight in weights))
        file = self._memory.file
        part = None if file is None else file.experts([weight.file for weight in weights])
        return ExpertWeights(weights, addresses, part)

    def matmul_routed(
        self, group: ExpertWeights, x: Tensor, routes: Routes, by_token: bool, out: Tensor
    ) -> None:
        floats(x, "experts x")
        each = self._arguments(group.weights[0], x, out)
        each.file = _address(group.file)
        if by_token:
            each.source = routes.tokens.data_ptr()
        starts, active = routes.starts.data_ptr(), routes.active.data_ptr()
        count, k = len(group.weights), routes.weights.shape[1]
        args = ExpertsArgs(each, addressof(group.addresses), starts, active, count, k)
        if (cached := group.cached) is not None:
            args.cache, args.group = cached.cache.handle, cached.number
            fetch = FetchArgs(args.cache, active, starts, None, count, 0, k, cached.number)
            self._runtime.run(OpKind.FETCH, fetch, out.shape[0], "experts")
            self._run_expected(cached.cache)
        self._runtime.run(OpKind.EXPERTS, args, out.shape[0], "experts")

    def expect(self, group: ExpertWeights, chosen: Tensor) -> None:
        """Read experts of a later layer ahead, ``chosen`` int32 ``[T, k]``, once the next product
        of experts has asked for its own."""
        assert group.cached is not None
        group.cached.cache.expected = group.cached, chosen

    def _run_expected(self, cache: ExpertCache) -> None:
        if cache.expected is None:
            return
        (group, chosen), cache.expected = cache.expected, None
        address, k = chosen.data_ptr(), chosen.shape[1]
        args = FetchArgs(cache.handle, None, None, address, len(group.views), 0, k, group.number)
        self._runtime.run(OpKind.FETCH, args, chosen.numel(), "experts")

    def matmul_heads(self, group: ExpertWeights, x: Tensor, out: Tensor) -> None:
        """``out[t, h] = x[t, h] @ w[h].T``; tokens and heads of both may be apart."""
        for name, one in (("x", x), ("out", out)):
            if one.dtype != torch.float32 or one.device.type != "cpu":
                raise KernelError(
                    f"heads {name}: expected float32 on cpu, found {one.dtype} on {one.device}"
                )
        each = self._arguments(group.weights[0], x, out)
        each.file = _address(group.file)
        count = len(group.weights)
        args = HeadsArgs(each, addressof(group.addresses), count, *x.stride()[:2], out.stride(1))
        self._runtime.run(OpKind.HEADS, args, x.shape[0] * count, "heads")

    def _arguments(self, packed: Packed, x: Tensor, out: Tensor) -> LinearArgs:
        return LinearArgs(
            w=addressof(packed.view),
            x=x.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            exact=self._bits == 32,
            terms=2 if self._bits == 16 and not packed.view.dense else 1,
            file=_address(packed.file),
        )

    def rows(
        self, packed: Packed, ids: Tensor, out: Tensor, part: tuple[int, int] = (0, 0)
    ) -> None:
        if ids.dtype != torch.int64:
            raise KernelError(f"rows: expected int64 ids, found {ids.dtype}")
        file = _address(packed.file)
        args = EmbeddingArgs(addressof(packed.view), ids.data_ptr(), out.data_ptr(), file, *part)
        self._runtime.run(OpKind.EMBEDDING, args, ids.shape[0], "rows")

    def nbytes(self, packed: Packed) -> int:
        return packed.nbytes


class RoundedLinear(PackedLinear):
    """Products in bfloat16, of 16-bit floats whose activations may be rounded to it:
    ``native/linear_bf16.hpp``."""

    rounds_inputs = True

    def __init__(self, runtime: NativeRuntime, memory: WeightMemory) -> None:
        super().__init__(runtime, memory, 32)
        self.name = "cpu.linear_bf16"

    def reject(self, problem: Problem) -> str | None:
        if problem.layout != "dense" or problem.format not in _VALUES[1:3]:
            return f"{problem.layout} {problem.format}: expected {', '.join(_VALUES[1:3])}"
        return None


def _address(part: FilePart | None) -> int | None:
    return None if part is None else addressof(part)
