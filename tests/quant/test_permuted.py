"""A weight with its columns in another order is the same weight."""

from __future__ import annotations

import pytest
import torch

from sdk.kernels.context import Compute
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.decode import pack_codes
from sdk.kernels.weights.layouts import Affine, Dense
from sdk.quant.errors import AlignmentError
from sdk.quant.permuted import PermutedWeight
from sdk.quant.weight import AffineWeight, DenseWeight, StackedWeight, concat

ROWS, COLUMNS = 40, 160


def permuted(order_seed: int = 0, seed: int = 0, bits: int = 4) -> PermutedWeight:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (ROWS, COLUMNS), generator=random).byte()
    scale = torch.rand(ROWS, COLUMNS // 32, generator=random) / 8
    layout = Affine((ROWS, COLUMNS), bits, 32, pack_codes(codes, bits), scale, zero=1 << (bits - 1))
    order = torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(order_seed))
    return PermutedWeight(AffineWeight(layout), order.int())


def test_its_value_has_the_columns_where_they_belong() -> None:
    weight = permuted()
    inner = weight.inner.dequantize()
    value = weight.dequantize()
    for j, column in enumerate(weight.order.tolist()):
        assert torch.equal(value[:, column], inner[:, j])
    assert weight.nbytes == weight.inner.nbytes + 4 * COLUMNS
    assert str(weight.spec) == "w4a16g32s"


@pytest.mark.parametrize("backends", [None, ("reference",)])
@pytest.mark.parametrize("compute", ["auto", "exact"])
def test_products_and_rows_are_those_of_the_value(
    backends: tuple[str, ...] | None, compute: Compute
) -> None:
    weight = permuted()
    value = weight.dequantize()
    ids = torch.tensor([0, 39, 39, 7])
    assert torch.equal(weight.rows(ids), value[ids])
    ops = Ops(num_threads=2, compute=compute, backends=backends)
    weight.bind(ops)
    assert torch.equal(weight.dequantize(), value)
    assert torch.equal(weight.rows(ids), value[ids])
    assert len(weight.choices()) == 1
    x = torch.randn(9, COLUMNS, generator=torch.Generator().manual_seed(1))
    found = weight.matmul(x)
    error = (found.double() - x.double() @ value.double().T).norm() / found.double().norm()
    assert error < (1e-6 if compute == "exact" or backends else 0.02)
    wide = torch.zeros(9, 3 * ROWS)
    weight.matmul(x, wide[:, ROWS : 2 * ROWS])
    assert torch.equal(wide[:, ROWS : 2 * ROWS], found)
    for row in range(9):  # whatever else is in the batch
        assert torch.equal(weight.matmul(x[row : row + 1])[0], found[row])
    ops.close()


def test_rows_are_cut_and_columns_are_not() -> None:
    weight = permuted()
    assert torch.equal(weight.narrow("out", 3, 7).dequantize(), weight.dequantize()[3:10])
    assert weight.narrow("in", 0, COLUMNS) is weight
    for start, count in ((0, 32), (32, 128), (0, COLUMNS + 1)):
        with pytest.raises(AlignmentError, match="sorted by group"):
            weight.narrow("in", start, count)


def test_weights_of_one_order_join_and_others_are_stacked() -> None:
    one, same, other = permuted(0, 1), permuted(0, 2), permuted(3, 3)
    plain = DenseWeight(Dense(torch.ones(4, COLUMNS)))
    joined = concat([one, same])
    assert isinstance(joined, PermutedWeight) and isinstance(joined.inner, AffineWeight)
    unlike = concat([one, permuted(0, 4, bits=8)])
    assert isinstance(unlike, PermutedWeight) and isinstance(unlike.inner, StackedWeight)
    for parts in ([one, other], [one, plain], [plain, one], [one, one.inner]):
        assert isinstance(concat(parts), StackedWeight)
    for parts in ([one, same], [one, other, plain], [one, permuted(0, 4, bits=8)]):
        expected = torch.cat([part.dequantize() for part in parts])
        assert torch.equal(concat(parts).dequantize(), expected)
