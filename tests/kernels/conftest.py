"""Weights of every layout, engines of every SIMD level, and a model of the 8-bit activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdk.kernels.cpu import CpuBackend, levels, open_backend
from sdk.kernels.operators.low_rank import AdapterTable, Factors, Shape, Update, factor_memory
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.decode import pack_codes
from sdk.kernels.weights.layouts import BLOCK_TYPES, Affine, Blocks, Dense, Float8, Layout

LEVELS = levels()


class Cases:
    """What the tests of this folder share, handed out by the ``cases`` fixture."""

    @staticmethod
    def affine(
        n: int,
        k: int,
        bits: int = 4,
        group: int = 32,
        kind: str = "minus",
        scale: torch.dtype = torch.float16,
        signed: bool = False,
        seed: int = 0,
    ) -> Affine:
        """Random codes. ``kind``: ``zero`` (a constant), ``zeros`` or ``floats`` (one per group) or
        ``minus``."""
        random = torch.Generator().manual_seed(seed)
        used = k * bits
        codes = torch.randint(0, 256, (n, -(-used // 8)), generator=random).to(torch.uint8)
        if used % 8:
            codes[:, -1] &= (1 << used % 8) - 1
        shape = (n, -(-k // group))
        scales = (torch.rand(shape, generator=random) * 0.02 + 0.001).to(scale)
        middle = 0 if signed else 1 << (bits - 1)
        zeros = torch.randint(0, 1 << bits, shape, generator=random).to(torch.uint8)
        floats = (torch.rand(shape, generator=random) * (1 << bits)).to(scale)
        packed = {"zeros": pack_codes(zeros, bits), "floats": floats}
        return Affine(
            (n, k),
            bits,
            group,
            codes,
            scales,
            zero=middle if kind == "zero" else 0,
            zeros=packed.get(kind),
            minus=(scales.float() * middle * 0.9).to(scale) if kind == "minus" else None,
            signed=signed,
        )

    @staticmethod
    def blocks(n: int, k: int, type: str, seed: int = 0) -> Blocks:
        """Random bytes with ordinary float16 scales."""
        random = torch.Generator().manual_seed(seed)
        kind = BLOCK_TYPES[type]
        count = k // kind.elements
        data = torch.randint(0, 256, (n, count, kind.nbytes), generator=random).to(torch.uint8)
        if type == "mxfp4":
            data[:, :, 0] = torch.randint(110, 125, (n, count), generator=random)
            return Blocks((n, k), type, data.view(n, -1))
        offsets = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}
        offsets |= {"iq4_nl": (0,), "iq4_xs": (0,)}
        for offset in offsets.get(type, (0, 2)):
            d = (torch.rand(n, count, 1, generator=random) * 0.01).half()
            data[:, :, offset : offset + 2] = d.view(torch.uint8)
        return Blocks((n, k), type, data.view(n, -1))

    @staticmethod
    def table(
        n: int,
        k: int,
        bits: int = 4,
        group: int = 32,
        scale: torch.dtype = torch.float16,
        super_group: int = 0,
        values: Sequence[float] = (),
        seed: int = 0,
    ) -> Affine:
        """Random codes that index ``values`` (or NF4-like ones); two levels of scales on request.

        ``super_group`` with uint8 scales has float16 super scales, else float32 ones.
        """
        random = torch.Generator().manual_seed(seed)
        whole = Cases.affine(n, k, bits, group, "zero", seed=seed)
        count = 1 << bits
        table = torch.linspace(-1, 1, count) ** 3 if not values else torch.tensor(list(values))
        shape = whole.scale.shape
        if scale == torch.uint8:
            scales = torch.randint(0, 256, shape, generator=random).to(torch.uint8)
        elif scale == torch.float8_e8m0fnu:
            codes = torch.randint(110, 125, shape, generator=random)
            scales = codes.to(torch.uint8).view(scale)
        else:
            scales = (torch.rand(shape, generator=random) + 0.1).to(scale)
        supers = None
        if super_group:
            supers = torch.rand(n, -(-k // super_group), generator=random) * 0.01 + 0.001
            supers = supers.half() if scale == torch.uint8 else supers
        return replace(
            whole,
            scale=scales,
            zero=0,
            table=table.float(),
            super_scale=supers,
            super_group=super_group,
        )

    @staticmethod
    def repeating(n: int, k: int, bits: int, rows: int, kind: str, seed: int = 0) -> Affine:
        """Scales and zero points of every column, those of ``rows`` rows again and again."""
        whole = Cases.affine(n, k, bits, 1, kind, seed=seed)
        return replace(
            whole,
            scale=whole.scale[:rows],
            zeros=None if whole.zeros is None else whole.zeros[:rows],
            minus=None if whole.minus is None else whole.minus[:rows],
        )

    @staticmethod
    def nested(n: int, k: int, group: int = 64, share: int = 256, seed: int = 0) -> Affine:
        """Scales that are codes, ``share`` of them to a super scale, as bitsandbytes has them."""
        random = torch.Generator().manual_seed(seed)
        return replace(
            Cases.table(n, k, 4, group, torch.uint8, seed=seed),
            super_scale=torch.rand(-(-n * k // group // share), generator=random) + 0.5,
            super_group=share * group,
            scale_table=torch.linspace(-1, 1, 256) ** 3,
            scale_offset=torch.rand(n, generator=random),
        )

    @staticmethod
    def float8(
        n: int,
        k: int,
        block: tuple[int, int],
        dtype: torch.dtype = torch.float8_e4m3fn,
        seed: int = 0,
        powers: bool = False,
    ) -> Float8:
        """Every finite code, infinities and NaN left out, with a scale per block: float32, or
        ``powers`` of two."""
        random = torch.Generator().manual_seed(seed)
        codes = torch.arange(256, dtype=torch.uint8)
        finite = codes[codes.view(dtype).float().isfinite()]
        values = finite[torch.randint(0, len(finite), (n, k), generator=random)].view(dtype)
        grid = (-(-n // block[0]), -(-k // block[1]))
        scale = torch.rand(grid, generator=random) * 0.02 + 0.001
        if powers:
            raw = torch.randint(117, 122, grid, generator=random).to(torch.uint8)
            scale = raw.view(torch.float8_e8m0fnu)
        return Float8(values, scale, block)

    @staticmethod
    def dense(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> Dense:
        return Dense(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(dtype))

    @staticmethod
    def activations(m: int, k: int, seed: int = 1) -> Tensor:
        """Normal values with a few large channels, as real activations have."""
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(m, k, generator=random)
        return x * (1 + 8 * (torch.rand(k, generator=random) > 0.97))

    @staticmethod
    def rounded(x: Tensor) -> Tensor:
        """The exact model of 8-bit activations: float64 of ``scale * round(x / scale)`` per 32."""
        m, k = x.shape
        padded = torch.nn.functional.pad(x, (0, -k % 32)).view(m, -(-k // 32), 32)
        peak = padded.abs().amax(dim=2, keepdim=True)
        inverse = torch.where(peak > 0, torch.full_like(peak, 127.0) / peak, 0.0)
        codes = torch.round(padded * inverse)
        return (codes.double() * (peak / 127.0).double()).flatten(1)[:, :k]

    @staticmethod
    def low_rank_parts(
        shape: Shape, ranks: Sequence[int], seed: int = 0, size: float = 0.1
    ) -> list[Factors]:
        """Factors of these ranks: neighbouring ranges of the outputs that begin anywhere."""
        random = torch.Generator().manual_seed(seed)
        edges = [shape.out_features * i // len(ranks) for i in range(len(ranks) + 1)]
        return [
            Factors(
                torch.randn(rank, shape.in_features, generator=random) * size,
                torch.randn(end - first, rank, generator=random) * size,
                first,
            )
            for rank, first, end in zip(ranks, edges, edges[1:], strict=False)
        ]

    @staticmethod
    def pack(table: AdapterTable, parts: Sequence[Factors], bias: Tensor | None = None) -> Update:
        """Packed for the table, in memory of its own."""
        nbytes = table.nbytes(parts, bias=bias is not None)
        return table.pack(parts, bias, factor_memory(nbytes, torch.device("cpu")))

    @staticmethod
    def low_rank(x: Tensor, parts: Sequence[Factors], out: int) -> Tensor:
        """What the factors add, float64; x int64: ids."""
        wide = x.double()
        if not x.is_floating_point():
            wide = torch.nn.functional.one_hot(x, parts[0].a.shape[1]).double()
        found = torch.zeros(len(x), out, dtype=torch.float64)
        for part in parts:
            own = slice(part.first, part.first + len(part.b))
            found[:, own] += wide @ part.a.double().t() @ part.b.double().t()
        return found

    @staticmethod
    def nmse(found: Tensor, expected: Tensor) -> float:
        """Squared error over squared signal, float64."""
        found, expected = found.double(), expected.double()
        return float((found - expected).square().sum() / expected.square().sum())

    @staticmethod
    def same(a: Layout, b: Layout) -> bool:
        """Equal layouts, every tensor bit for bit."""
        if type(a) is not type(b) or a.shape != b.shape:
            return False
        for name in a.__dataclass_fields__:
            x, y = getattr(a, name), getattr(b, name)
            if isinstance(x, Tensor):
                if not isinstance(y, Tensor) or x.dtype != y.dtype or x.shape != y.shape:
                    return False
                if not torch.equal(
                    x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)
                ):
                    return False
            elif x != y:
                return False
        return True


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """torch's own threads spin for each other when a core is busy: 100 s instead of 5."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=LEVELS or ("missing",))
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    """A backend of two threads at each SIMD level this CPU has."""
    assert LEVELS, "the native module is not built: run `make build`"
    opened = open_backend("cpu", 2, request.param)
    yield opened
    opened.close()


@pytest.fixture(scope="session", params=("reference", *LEVELS))
def each_ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """The operators of the reference, and of two native threads at each SIMD level."""
    assert LEVELS, "the native module is not built: run `make build`"
    if request.param == "reference":
        opened = Ops("cpu", num_threads=2, backends=["reference"])
    else:
        opened = Ops("cpu", num_threads=2, backends=["cpu"])
        opened.close()
        opened.context.backends[:] = [open_backend("cpu", 2, request.param)]
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def cases() -> type[Cases]:
    return Cases
