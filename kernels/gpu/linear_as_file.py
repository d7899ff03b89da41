"""Products with activations quantized as the weight's file asks.

int8 and e4m3 activations with one scale per token, and weights of the same type with one scale per
row, are multiplied as bytes (``product_bytes.py``), and so are e4m3 ones with a scale per 128
columns; such weights are :class:`ByteRows`. Otherwise kernels/reference/fake_quantize.py quantizes
activations, in some passes over x on the card, and ``linear.py`` multiplies in float32 (with its
tolerance, 1e-6), because scale times code needs more bits than 16-bit operands have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu import product_bytes as kernels
from sdk.kernels.gpu.byte_rows import ByteRows, byte_rows, decode, layout_of, multiplies_bytes
from sdk.kernels.gpu.expert_tiles import (
    MOST_ROWS,
    PARTS,
    Experts,
    Routed,
    offsets_of,
    tile_arguments,
)
from sdk.kernels.gpu.launch import INTERPRETED, Launch, expect_on_device
from sdk.kernels.gpu.linear import TritonLinear, activate_rows, before_activation
from sdk.kernels.gpu.packing import Packed
from sdk.kernels.gpu.scratch import rows_of_codes, rows_of_parts, rows_rounded, runs
from sdk.kernels.gpu.shares import Sharing
from sdk.kernels.gpu.tuning import Tiles, Tuning
from sdk.kernels.operators.rounding import Rounded, Rounding, Rows
from sdk.kernels.operators.routes import Routes
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.weights.layouts import (
    ActivationScheme,
    Affine,
    Float8,
    Layout,
    check_layout,
    inputs_of,
)

#: Rows of one accumulator: those of twice as many do not fit registers beside promoted sums.
_ROWS = 128


class TritonLinearAsFile(TritonLinear):
    """See :class:`sdk.kernels.backend.LinearKernel`; a weight without a scheme is exact.

    ``codes``: those that the card's matrix units multiply as bytes, see :func:`bytes_of_card`.
    """

    def __init__(
        self,
        tuning: Tuning,
        codes: Sequence[str],
        *,
        fixed: bool = False,
        sharing: Sharing | None = None,
    ) -> None:
        super().__init__(torch.float32, tuning, fixed=fixed, sharing=sharing)
        self._codes = codes
        self.name = "gpu.linear_as_file"

    def reject(self, problem: Problem) -> str | None:
        return super().reject(replace(problem, inputs="", compute="exact"))

    def op_of(self, packed: Packed | ByteRows) -> str:
        return "linear_bytes" if isinstance(packed, ByteRows) else "linear"

    def pack(self, layout: Layout) -> Any:
        """:class:`ByteRows` if the card multiplies the weight as bytes, otherwise ``Packed``."""
        if not multiplies_bytes(layout, self._codes):
            return super().pack(layout)
        check_layout(layout)
        assert isinstance(layout, Affine | Float8)
        packed = byte_rows(layout)
        self._sharing.prepare(packed.scale.device)
        return packed

    def rounding(self, packed: Packed | ByteRows) -> Rounding | None:
        if not isinstance(packed, ByteRows):
            return None
        w = packed.values
        return Rounding(packed.inputs, w.dtype, w.shape[1], packed.scale.shape[0])

    def unpack(self, packed: Packed | ByteRows) -> Layout:
        return layout_of(packed) if isinstance(packed, ByteRows) else super().unpack(packed)

    def nbytes(self, packed: Packed | ByteRows) -> int:
        return packed.nbytes

    def matmul(self, packed: Packed | ByteRows, x: Rows, out: Tensor, activation: str = "") -> None:
        if isinstance(packed, ByteRows):
            wide = before_activation(out, activation)
            tiles = self._bytes_tiles(packed, x.shape[0])
            step = rows_of_codes(packed.values.shape[1])
            if tiles.split > 1:
                step = min(step, rows_of_parts(packed.shape[0], tiles.split))
            for rows in runs(x.shape[0], step):
                if isinstance(x, Rounded):
                    # the kernel finds the scales of a group right behind those of the one before
                    scales = x.scales[:, rows].contiguous()
                    given = Rounded(x.codes[rows], scales, x.width)
                else:
                    given = self._round(packed, x[rows])
                self._multiply_bytes(packed, given, wide[rows], tiles)
            activate_rows(wide, activation, out)
            return
        assert isinstance(x, Tensor)
        scheme = inputs_of(packed.facts)
        if scheme is None:
            super().matmul(packed, x, out, activation)
            return
        for rows in runs(x.shape[0], rows_rounded(x.shape[1])):
            exact = fake_quantize(x[rows].float(), scheme)
            super().matmul(packed, exact, out[rows], activation)

    def _bytes_tiles(self, w: ByteRows, tokens: int) -> Tiles:
        """With a fixed order of additions those of two tokens, for more tokens at a time: a token's
        sums are the same beside any others, but not with another split or instruction."""
        if self._fixed:
            tiles = self._tuning.tiles(w, 2, "linear_bytes")
            columns = min(128, triton.next_power_of_2(max(tokens, 16)))
            tiles = tiles._replace(block_n=min(tiles.block_n, 64), block_m=columns)
        else:
            tiles = self._tuning.tiles(w, max(tokens, 2), "linear_bytes")
        return tiles._replace(split=min(tiles.split, w.units))

    def rows(self, packed: Packed | ByteRows, ids: Tensor, out: Tensor) -> None:
        if not isinstance(packed, ByteRows):
            super().rows(packed, ids, out)
            return
        expect_on_device("rows", ids, out, packed.scale)
        decode(packed, ids, out)

    def group(self, packed: Sequence[Any]) -> Experts[Any] | None:
        first = packed[0]
        alike = all(inputs_of(p.facts) == inputs_of(first.facts) for p in packed[1:])
        if not alike or any(type(p) is not type(first) for p in packed[1:]):
            return None
        if not isinstance(first, ByteRows):
            return super().group(packed)
        if any(p.scale_rows != first.scale_rows for p in packed[1:]):
            return None
        # the scale stands for the parts that such a weight does not have
        given = [dict.fromkeys(PARTS, p.scale) | {"w0": p.values} for p in packed]
        offsets = offsets_of(given)
        return None if offsets is None else Experts(tuple(packed), offsets)

    def matmul_routed(
        self,
        group: Experts[Any],
        x: Tensor,
        routes: Routes,
        by_token: bool,
        out: Tensor,
        activation: str = "",
    ) -> None:
        w = group.first
        scheme = inputs_of(w.facts)
        if isinstance(w, ByteRows):
            expect_on_device("linear of experts", x, out, group.offsets)
            routed = Routed(group.offsets, routes, routes.tokens if by_token else None)
            wide = before_activation(out, activation)
            given = self._round(w, x)
            self._multiply_bytes(w, given, wide, self._tiles_of(group, routes, 2), routed)
            activate_rows(wide, activation, out)
        elif scheme is None:
            super().matmul_routed(group, x, routes, by_token, out, activation)
        else:
            whole = torch.empty(x.shape, device=x.device)
            for rows in runs(x.shape[0], rows_rounded(x.shape[1])):
                whole[rows] = fake_quantize(x[rows].float(), scheme)
            super().matmul_routed(group, whole, routes, by_token, out, activation)

    def _round(self, w: ByteRows, x: Tensor) -> Rounded:
        expect_on_device("linear", x, w.scale)
        codes = torch.empty(x.shape[0], w.values.shape[1], dtype=w.values.dtype, device=x.device)
        scales = torch.empty(w.scale.shape[0], x.shape[0], device=x.device)
        round_rows(x, codes, scales, w.inputs).run()
        return Rounded(codes, scales, x.shape[1])

    def _multiply_bytes(
        self, w: ByteRows, x: Rounded, out: Tensor, tiles: Tiles, routed: Routed | None = None
    ) -> None:
        """Multiplies x ``[M, K]``, or its routed rows."""
        expect_on_device("linear", x.codes, out, w.scale)
        product_bytes(w, x.codes, x.scales, out, self._sharing, tiles, routed).run()


def bytes_of_card(capability: tuple[int, int], *, amd: bool) -> tuple[str, ...]:
    """8-bit codes that the card's matrix units multiply, as far as Triton supports them.

    NVIDIA: integers from compute capability 8.0 on (Triton 3.6 cannot compile them for 7.5), floats
    from 8.9 on. AMD: integers; 8-bit floats have other biases before gfx950.
    """
    if amd:
        return ("int",)
    return ("int", "e4m3") if capability >= (8, 9) else ("int",) if capability >= (8, 0) else ()


def sums_are_short(device: torch.device) -> bool:
    """Whether the card's matrix units keep fewer bits of a sum of e4m3 products than float32 has.

    Measured by others: 13 on Ada and Hopper (SageAttention2), 25 on 10.0 (DeepGEMM, issue 176).
    Unknown cards are taken for the former.
    """
    return INTERPRETED or torch.cuda.get_device_capability(device)[0] != 10


def round_rows(x: Tensor, codes: Tensor, scales: Tensor, scheme: ActivationScheme) -> Launch:
    """x ``[M, K]`` as codes ``[M, K']``, zeros behind column K, and scales ``[1, M]``; with more
    scales than one row, one for each ``STEP`` of columns."""
    tokens, k = x.shape
    groups = scales.shape[0]
    arguments: dict[str, Any] = {"x": x, "codes": codes, "scales": scales, "K": k}
    arguments |= {"padded": codes.shape[1], "x_stride": x.stride(0), "limit": scheme.limit}
    constants: dict[str, Any] = {"FLOAT": scheme.floats, "POWER": scheme.rule == "power"}
    if groups > 1:
        block = min(8, triton.next_power_of_2(groups))
        grid = (tokens, -(-groups // block), 1)
        arguments["M"] = tokens
        return Launch(kernels.round_groups, grid, arguments, constants | {"BLOCK": block}, {})
    # a row in one load of all threads: for one token 14 loads in turn would take as long as a
    # product (14336 columns, half a microsecond each)
    block = min(16384, max(64, triton.next_power_of_2(k)))
    arguments["static"] = scheme.static or 0.0
    constants |= {"STATIC": scheme.static is not None, "BLOCK": block}
    options = {"num_warps": min(16, max(4, block // 1024))}
    return Launch(kernels.round_rows, (tokens, 1, 1), arguments, constants, options)


def product_bytes(
    w: ByteRows,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    sharing: Sharing,
    tiles: Tiles,
    routed: Routed | None = None,
) -> Launch:
    """``product_bytes``: out ``[M, N]``."""
    tokens, n = codes.shape[0], w.shape[0]
    most = tiles.block_m if routed is None else min(tiles.block_m, MOST_ROWS)
    block_m = min(most, max(16, triton.next_power_of_2(tokens)))
    block_n = min(tiles.block_n, _ROWS) if w.grouped else tiles.block_n
    count = -(-tokens // block_m) if routed is None else routed.tiles(block_m)
    grid = (count, -(-n // block_n), tiles.split)
    results = grid[0] * grid[1] * (2 if block_n > _ROWS else 1)
    arguments = {
        "x": codes,
        "x_scale": scales,
        "out": out,
        "w": w.values,
        "scale": w.scale,
        "M": tokens,
        "N": n,
        "K": codes.shape[1],
        "share": -(-w.units // tiles.split),
        "out_stride": out.stride(0),
        "scale_rows": w.scale_rows,
        "scale_stride": w.scale.shape[1],
        **tile_arguments(routed, block_m),
        **sharing.arguments(tiles.split, out.shape[0], n, results, out.device),
    }
    floats = w.kind == "e4m3"
    constants = {
        "FLOAT": floats,
        "PROMOTE": floats and (w.grouped or sums_are_short(codes.device)),
        "GROUPED": w.grouped,
        "TWICE": block_n > _ROWS,
        "BLOCK_N": min(block_n, _ROWS),
        "TURNED": min(block_n, block_m) >= _ROWS,
        "BLOCK_M": block_m,
        "ROUTED": routed is not None,
        "SHARED": tiles.split > 1,
    }
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return Launch(kernels.product_bytes, grid, arguments, constants, options)
