"""Products with activations quantized as the weight's file asks.

int8 and e4m3 activations with one scale per token, and weights of the same type with one scale per
row, are multiplied as bytes (``product_bytes.py``). Otherwise kernels/reference/fake_quantize.py
quantizes activations, in some passes over x on the card, and ``linear.py`` multiplies in float32
(with its tolerance, 1e-6), because scale times code needs more bits than 16-bit operands have.
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
from sdk.kernels.gpu.expert_tiles import Experts, Routed, tile_arguments
from sdk.kernels.gpu.launch import Launch, expect_on_device
from sdk.kernels.gpu.linear import TritonLinear
from sdk.kernels.gpu.packing import Packed
from sdk.kernels.gpu.scratch import rows_of_codes, rows_of_parts, rows_rounded, runs
from sdk.kernels.gpu.shares import Shares, Sharing
from sdk.kernels.gpu.tuning import Tiles, Tuning
from sdk.kernels.layouts import ActivationScheme, inputs_of
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.routes import Routes


class TritonLinearAsFile(TritonLinear):
    """See :class:`sdk.kernels.registry.LinearKernel`; a weight without a scheme is exact.

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

    def op_of(self, packed: Packed) -> str:
        scheme = inputs_of(packed.facts)
        if scheme is not None and multiplies_bytes(packed, scheme, self._codes):
            return "linear_bytes"
        return "linear"

    def matmul(self, packed: Packed, x: Tensor, out: Tensor, activation: str = "") -> None:
        scheme = inputs_of(packed.facts)
        if scheme is None:
            super().matmul(packed, x, out, activation)
        elif multiplies_bytes(packed, scheme, self._codes):
            expect_on_device("linear", x, out, packed.scale)
            tokens = 2 if self._fixed else max(x.shape[0], 2)
            tiles = self._tuning.tiles(packed, tokens, "linear_bytes")
            tiles = replace(tiles, split=min(tiles.split, packed.units))
            step = rows_of_codes(packed.units * packed.unit)
            if tiles.split > 1:
                step = min(step, rows_of_parts(packed.shape[0], tiles.split))
            for rows in runs(x.shape[0], step):
                self._multiply_bytes(packed, scheme, x[rows], out[rows], tiles, activation)
        else:
            for rows in runs(x.shape[0], rows_rounded(x.shape[1])):
                given = fake_quantize(x[rows].float(), scheme)
                super().matmul(packed, given, out[rows], activation)

    def group(self, packed: Sequence[Packed]) -> Experts[Packed] | None:
        alike = all(inputs_of(p.facts) == inputs_of(packed[0].facts) for p in packed[1:])
        return super().group(packed) if alike else None

    def matmul_routed(
        self,
        group: Experts[Packed],
        x: Tensor,
        routes: Routes,
        by_token: bool,
        out: Tensor,
        activation: str = "",
    ) -> None:
        w = group.first
        scheme = inputs_of(w.facts)
        if scheme is None:
            super().matmul_routed(group, x, routes, by_token, out, activation)
        elif multiplies_bytes(w, scheme, self._codes):
            expect_on_device("linear of experts", x, out, group.offsets)
            routed = Routed(group.offsets, routes, routes.tokens if by_token else None)
            tiles = self._tiles_of(group, routes, 2)
            self._multiply_bytes(w, scheme, x, out, tiles, activation, routed)
        else:
            whole = torch.empty(x.shape, device=x.device)
            for rows in runs(x.shape[0], rows_rounded(x.shape[1])):
                whole[rows] = fake_quantize(x[rows].float(), scheme)
            super().matmul_routed(group, whole, routes, by_token, out, activation)

    def _multiply_bytes(
        self,
        w: Packed,
        scheme: ActivationScheme,
        x: Tensor,
        out: Tensor,
        tiles: Tiles,
        activation: str,
        routed: Routed | None = None,
    ) -> None:
        """Quantizes x ``[M, K]`` and multiplies it, or its routed rows."""
        dtype = torch.float8_e4m3fn if scheme.floats else torch.int8
        codes = torch.empty(x.shape[0], w.units * w.unit, dtype=dtype, device=x.device)
        scales = torch.empty(x.shape[0], device=x.device)
        shares = self._sharing.shares(tiles.split, out.shape[0], w.shape[0], x.device)
        round_rows(x, codes, scales, scheme).run()
        product_bytes(w, codes, scales, out, shares, tiles, activation, routed).run()


def bytes_of_card(capability: tuple[int, int], *, amd: bool) -> tuple[str, ...]:
    """8-bit codes that the card's matrix units multiply, as far as Triton supports them.

    NVIDIA: integers from compute capability 8.0 on (Triton 3.6 cannot compile them for 7.5), floats
    from 8.9 on. AMD: integers; 8-bit floats have other biases before gfx950.
    """
    if amd:
        return ("int",)
    return ("int", "e4m3") if capability >= (8, 9) else ("int",) if capability >= (8, 0) else ()


def multiplies_bytes(w: Packed, scheme: ActivationScheme, codes: Sequence[str]) -> bool:
    """Whether activations and weights have the same codes, and scales that apply after the sum."""
    whole = w.group >= w.shape[1] and w.unit == 64 and not w.has_minus and w.zeros is None
    token = not scheme.group or scheme.group >= w.shape[1]
    if not (whole and token and scheme.rule == "plain" and scheme.symmetric and not scheme.zero):
        return False
    if w.super_scale is not None or w.scale_bits or scheme.codes not in codes:
        return False
    if scheme.codes == "int":
        return w.kind == "int" and scheme.bits == w.bits == 8 and w.zero == 128
    return scheme.codes == w.kind == "e4m3"


def round_rows(x: Tensor, codes: Tensor, scales: Tensor, scheme: ActivationScheme) -> Launch:
    """x ``[M, K]`` as codes ``[M, padded]`` in the order of ``product_bytes``, scales ``[M]``."""
    tokens, k = x.shape
    arguments: dict[str, Any] = {
        "x": x,
        "codes": codes,
        "scales": scales,
        "K": k,
        "padded": codes.shape[1],
    }
    arguments |= {"x_stride": x.stride(0), "static": scheme.static or 0.0, "limit": scheme.limit}
    constants: dict[str, Any] = {"FLOAT": scheme.floats, "STATIC": scheme.static is not None}
    constants["BLOCK"] = min(1024, max(64, triton.next_power_of_2(k)))
    return Launch(kernels.round_rows, (tokens, 1, 1), arguments, constants, {})


def product_bytes(
    packed: Packed,
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    shares: Shares,
    tiles: Tiles,
    activation: str = "",
    routed: Routed | None = None,
) -> Launch:
    """``product_bytes``: out ``[M, N]``, with an ``activation`` ``[M, N / 2]``."""
    tokens, n = codes.shape[0], packed.shape[0]
    block_m = min(tiles.block_m, max(16, triton.next_power_of_2(tokens)))
    arguments: dict[str, Any] = {
        "x": codes,
        "x_scale": scales,
        "out": out,
        "w0": packed.planes[0],
    }
    arguments |= {"scale": packed.scale, "M": tokens, "N": n, "units": packed.units}
    arguments |= {"share": -(-packed.units // shares.split), "out_stride": out.stride(0)}
    arguments["scale_rows"] = packed.scale_rows
    constants: dict[str, Any] = {"FLOAT": packed.kind == "e4m3"}
    constants |= {"BLOCK_N": tiles.block_n, "BLOCK_M": block_m, "ROUTED": routed is not None}
    constants |= {"SHARED": shares.split > 1, "ACTIVATION": activation}
    count = -(-tokens // block_m) if routed is None else routed.tiles(block_m)
    grid = (count, -(-n // tiles.block_n), shares.split)
    arguments |= {**tile_arguments(routed), **shares.arguments(grid[0] * grid[1])}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return Launch(kernels.product_bytes, grid, arguments, constants, options)
