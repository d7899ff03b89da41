"""Recorded programs that time their operators."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import pytest
import torch

from sdk.kernels.cpu.library import Count, OpKind
from sdk.kernels.cpu.operator_times import weight_bytes
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops

TOKENS, OUTPUTS, WIDTH, WIDE = 24, 6, 96, 160


@pytest.fixture(params=[1, 3])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    opened = Ops("cpu", num_threads=request.param)
    yield opened
    opened.close()


def test_operators_are_timed_on_request(ops: Ops, cases: Any) -> None:
    up = ops.linear(cases.affine(WIDE, WIDTH, 4, 32, seed=2))
    head = ops.linear(cases.dense(40, WIDE, torch.float16, seed=4))
    x, norm = torch.randn(TOKENS, WIDTH), torch.rand(WIDTH)
    rows = torch.arange(OUTPUTS)

    def forward() -> torch.Tensor:
        wide = up.matmul(ops.norm(x, Norm(norm, 1e-5)))
        return head.matmul(ops.select_rows(wide, rows))

    graph = ops.recording.capture(forward, tokens=TOKENS, outputs=OUTPUTS, requests=1)
    program: Any = graph.recorded

    def replay(times: int) -> float:
        start = perf_counter()
        for _ in range(times):
            graph.replay(tokens=TOKENS, outputs=OUTPUTS, requests=1)
        return perf_counter() - start

    replay(1)
    assert program.times().runs == 0
    program.time_operators(True)
    passed = replay(3)
    times = program.times()
    assert times.runs == 3
    assert 0 < times.seconds < passed
    busy = sum(operator.rows + operator.tiles for operator in times.operators)
    assert 0 < busy <= 3 * times.seconds  # three threads at most
    kinds = [(operator.kind, operator.over) for operator in times.operators]
    assert kinds == [
        (OpKind.NORM, Count.TOKENS),
        (OpKind.LINEAR, Count.TOKENS),
        (OpKind.SELECT, Count.OUTPUTS),
        (OpKind.LINEAR, Count.OUTPUTS),
    ]
    scaled, product, selected, last = times.operators
    assert scaled.weight is selected.weight is None
    assert product.weight is not None and (product.weight.n, product.weight.k) == (WIDE, WIDTH)
    assert scaled.rows > 0 == scaled.tiles
    assert product.rows > 0 and product.tiles > 0  # activations are quantized, then multiplied
    assert last.tiles > 0 == last.rows  # the head is float16

    program.time_operators(True)  # from zero
    assert program.times().runs == program.times().seconds == 0
    program.time_operators(False)
    replay(1)
    assert program.times().runs == 0


def test_weights_have_the_bytes_that_they_were_packed_into(ops: Ops, cases: Any) -> None:
    kinds = ("q4_0", "q4_1", "q5_0", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")
    for kind in kinds:
        weight = ops.linear(cases.blocks(64, 512, kind))
        assert weight_bytes(weight.packed.view) == weight.packed.nbytes, kind
    for layout in (cases.dense(64, 96, torch.bfloat16), cases.affine(64, 96, 4, 32)):
        weight = ops.linear(layout)
        assert weight_bytes(weight.packed.view) == weight.packed.nbytes
