"""Recorded steps: what may be recorded, replayed with any counts, and how errors come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.cpu.library import SelectArgs
from sdk.kernels.errors import CaptureError, KernelError
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops

TOKENS, OUTPUTS, REQUESTS = 24, 6, 4
WIDTH, WIDE = 96, 160


@pytest.fixture(params=[1, 3])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    opened = Ops("cpu", num_threads=request.param)
    yield opened
    opened.close()


class Net:
    """Every row-wise operator and both kinds of linear layers, over fixed inputs."""

    def __init__(self, ops: Ops, cases: Any) -> None:
        self.ops = ops
        self.embedding = ops.linear(cases.affine(64, WIDTH, 8, 32, "zero", seed=1))
        self.up = ops.linear(cases.affine(2 * WIDE, WIDTH, 4, 32, seed=2))
        self.down = ops.linear(cases.affine(WIDTH, WIDE, 4, 32, seed=3))
        self.head = ops.linear(cases.dense(40, WIDTH, torch.float16, seed=4))
        self.norm = torch.rand(WIDTH) + 0.5
        self.bias = torch.randn(2 * WIDE)
        self.order = torch.randperm(WIDTH).int()
        self.ids = torch.randint(0, 64, (TOKENS,))
        self.rows = torch.zeros(OUTPUTS, dtype=torch.int64)

    def __call__(self, tokens: int = TOKENS, outputs: int = OUTPUTS) -> tuple[Tensor, Tensor]:
        ops = self.ops
        delta = ops.scale(self.embedding.rows(self.ids[:tokens]), 1.5)
        residual = ops.zeros(*delta.shape)
        for _ in range(2):
            x, residual = ops.add_norm(delta, residual, Norm(self.norm, 1e-5))
            taken = ops.take_columns(x, self.order)
            wide = ops.add_bias(self.up.matmul(taken), self.bias)
            delta = self.down.matmul(ops.gated_activation(wide, "silu"))
        ops.add(residual, delta)
        hidden = ops.norm(residual, Norm(self.norm, 1e-5))
        chosen = ops.select_rows(hidden, self.rows[:outputs])
        return hidden, ops.softcap(self.head.matmul(chosen), 3.0)

    def capture(self) -> Any:
        return self.ops.recording.capture(self, tokens=TOKENS, outputs=OUTPUTS, requests=REQUESTS)


def test_a_replay_gives_the_bits_of_the_operators_run_one_by_one(ops: Ops, cases: Any) -> None:
    net = Net(ops, cases)
    graph = net.capture()
    hidden, logits = graph.result
    for tokens, outputs in [(1, 1), (TOKENS, OUTPUTS), (7, 3), (2, 0), (1, 1), (TOKENS, 1)]:
        net.ids.random_(0, 64)
        net.rows.random_(0, tokens)
        expected_hidden, expected_logits = net(tokens, outputs)
        graph.replay(tokens=tokens, outputs=outputs, requests=1)
        assert torch.equal(hidden[:tokens], expected_hidden)
        assert torch.equal(logits[:outputs], expected_logits)


def test_recording_computes_nothing_and_leaves_the_operators_usable(ops: Ops, cases: Any) -> None:
    net = Net(ops, cases)
    before = net()
    assert ops.context.capture_pool is None
    graph = net.capture()
    assert ops.context.capture_pool is None
    assert float(graph.result[0].abs().max()) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(net(), before, strict=True))


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda ops, x: ops.scale(x, 2.0) + 1.0, "aten.add"),
        (lambda ops, x: torch.zeros_like(x), "aten.zeros_like"),
        (lambda ops, x: ops.norm(x.t().contiguous(), Norm(x[:, 0], 1e-5)), "aten.clone"),
        (lambda ops, x: ops.scale(x, float(x.max())), "aten.max"),
    ],
)
def test_anything_but_operators_and_views_stops_the_recording(
    ops: Ops, forward: Callable[[Ops, Tensor], Tensor], name: str
) -> None:
    x = torch.ones(TOKENS, TOKENS)
    with pytest.raises(CaptureError, match=rf"a step with {name}.* cannot be recorded"):
        ops.recording.capture(lambda: forward(ops, x), tokens=TOKENS, outputs=1, requests=1)
    assert ops.context.capture_pool is None
    assert torch.equal(ops.scale(torch.ones(2, 2), 3.0), torch.full((2, 2), 3.0))


def test_the_reference_kernels_cannot_be_recorded() -> None:
    ops = Ops("cpu", backends=["reference"])
    with pytest.raises(CaptureError, match="reference kernels cannot be recorded"):
        ops.recording.capture(lambda: ops.zeros(1, 1), tokens=1, outputs=1, requests=1)


def test_counts_beyond_the_recorded_ones_are_refused(ops: Ops, cases: Any) -> None:
    graph = Net(ops, cases).capture()
    for counts in [(TOKENS + 1, 1, 1), (1, OUTPUTS + 1, 1), (1, 1, REQUESTS + 1)]:
        with pytest.raises(KernelError, match=r"replay: expected at most \(24, 6, 4\) tokens"):
            graph.replay(tokens=counts[0], outputs=counts[1], requests=counts[2])


def test_rows_that_no_count_explains_are_refused(ops: Ops) -> None:
    x = torch.ones(TOKENS + 1, 8)
    with pytest.raises(KernelError, match="recording MAP: expected a multiple of 24 rows"):
        ops.recording.capture(lambda: ops.scale(x, 2.0), tokens=TOKENS, outputs=1, requests=1)


def test_a_replay_after_close_says_so(ops: Ops, cases: Any) -> None:
    graph = Net(ops, cases).capture()
    ops.close()
    with pytest.raises(KernelError, match="step: the engine is closed"):
        graph.replay(tokens=1, outputs=1, requests=1)


def test_an_operator_that_does_not_exist_is_refused(ops: Ops) -> None:
    runtime = ops.context.backends[0].runtime  # type: ignore[attr-defined]
    with pytest.raises(KernelError, match="future: no such operator"):
        runtime.run(99, SelectArgs(), 1, "future")


def test_heads_of_a_projection_are_normalized_without_a_copy(ops: Ops) -> None:
    wide = torch.randn(5, 7, 16)
    heads, weight = wide[:, 2:5], torch.rand(16)
    expected = ops.norm(heads.contiguous(), Norm(weight, 1e-6))
    assert torch.equal(ops.norm(heads, Norm(weight, 1e-6)), expected)


def test_a_stack_writes_its_parts_side_by_side(ops: Ops, cases: Any) -> None:
    parts = [
        ops.linear(cases.affine(48, 64, 4)),
        ops.linear(cases.dense(20, 64, torch.float32)),
        ops.linear(cases.affine(33, 64, 8, kind="zero")),
    ]
    x, out = torch.randn(3, 64), torch.full((3, 103), 7.0)
    offset = 0
    for part in parts:
        rows = part.shape[0]
        part.matmul(x, out[:, offset : offset + rows])
        assert torch.equal(out[:, offset : offset + rows], part.matmul(x))
        offset += rows
    assert bool((out[:, offset:] == 7.0).all())
    with pytest.raises(KernelError, match=r"linear out: expected torch\.float32 \[3, 48\]"):
        parts[0].matmul(x, out[:, :49])


def test_weights_of_different_bits_share_their_activations(ops: Ops, cases: Any) -> None:
    """AVX2 multiplies codes of 8 bits with other activations than shorter ones."""
    weights = [
        ops.linear(cases.affine(64, WIDTH, bits, 32, "zero", seed=bits)) for bits in (8, 4, 8, 5)
    ]
    x = torch.randn(TOKENS, WIDTH)

    def forward() -> list[Tensor]:
        return [weight.matmul(x) for weight in weights]

    expected = forward()
    graph = ops.recording.capture(forward, tokens=TOKENS, outputs=1, requests=1)
    for tokens in (1, 2, TOKENS):
        graph.replay(tokens=tokens, outputs=1, requests=1)
        for found, whole in zip(graph.result, expected, strict=True):
            assert torch.equal(found[:tokens], whole[:tokens])
