"""Torch's row-wise operations in a recorded step: any number of tokens, or the reason why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.errors import CaptureError
from sdk.kernels.operators.ops import Ops

MOST, WIDTH = 11, 6
TABLE = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1))
CHOSEN = torch.tensor([0, 2])


@pytest.fixture
def ops() -> Iterator[Ops]:
    ops = Ops("cpu", num_threads=2)
    yield ops
    ops.close()


def heads(x: Tensor) -> Tensor:
    """[1, heads, T, head_dim], as transformers' attention has it."""
    return x.view(1, len(x), 2, WIDTH // 2).transpose(1, 2)


def rows(x: Tensor) -> Tensor:
    """Back again."""
    return x.transpose(1, 2).reshape(-1, WIDTH)


def rotated(x: Tensor) -> Tensor:
    q = heads(x)
    return rows(q * 2 + torch.cat((-q[..., 1:], q[..., :1]), dim=-1))


def routed(x: Tensor) -> Tensor:
    weights, chosen = torch.topk(torch.softmax(x, dim=-1), 2, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.zeros_like(x).scatter(1, chosen, weights)


def in_place(x: Tensor) -> Tensor:
    y = x.new_zeros(len(x), WIDTH)
    y[:, 1:4] = x[:, :3]
    return y.mul_(3.0)


def looked_up(x: Tensor) -> Tensor:
    return TABLE[(x.abs() * 10).to(torch.int64)[:, 0].clamp(0, 39)] * x


def normed(x: Tensor) -> Tensor:
    y = torch.nn.functional.layer_norm(x, (WIDTH,), TABLE[0], TABLE[1], 1e-5)
    return y * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def multiplied(x: Tensor) -> Tensor:
    angles = TABLE[:1, :3, None].float().expand(1, -1, 1) @ x[None, None, :, 0]
    return torch.cat((angles[0].t().sin(), x[:, 3:] @ TABLE[:3, 3:]), dim=1)


ROW_WISE = [rotated, routed, in_place, looked_up, normed, multiplied]


def record(ops: Ops, function: Callable[[Tensor], Tensor], given: Tensor) -> Any:
    def forward() -> Tensor:
        x = ops.add(ops.zeros(MOST, WIDTH), given)
        with ops.recording.torch_operations(given):
            y = function(x)
        return ops.add(ops.zeros(MOST, WIDTH), y)

    with torch.inference_mode():
        return ops.recording.capture(forward, tokens=MOST, outputs=1, requests=1)


@pytest.mark.parametrize("function", ROW_WISE, ids=lambda x: x.__name__)
def test_a_replay_gives_what_torch_gives_for_any_number_of_tokens(
    function: Callable[[Tensor], Tensor], ops: Ops
) -> None:
    given = torch.zeros(MOST, WIDTH)
    graph = record(ops, function, given)
    generator = torch.Generator().manual_seed(2)
    for tokens in (1, 4, 3, 4, MOST, 2, 5, 6):
        x = torch.randn(tokens, WIDTH, generator=generator)
        given[:tokens] = x
        graph.replay(tokens=tokens, outputs=1, requests=1)
        assert torch.allclose(graph.result[:tokens], function(x), rtol=1e-6, atol=1e-6)


def test_operations_next_to_one_another_are_one_call(ops: Ops) -> None:
    graph = record(ops, normed, torch.zeros(MOST, WIDTH))
    [(_, calls, _, _)] = graph.recorded._parts
    assert len(calls.noted) > 5


def test_a_sum_of_two_tensors_is_an_operator_of_ours(ops: Ops) -> None:
    given = torch.zeros(MOST, WIDTH)
    graph = record(ops, lambda x: x + x, given)
    assert graph.recorded._parts == []
    given[:2] = 1.5
    graph.replay(tokens=2, outputs=1, requests=1)
    assert graph.result[:2].eq(3.0).all()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x * x.mean(dim=0), "aten.mean"),
        (lambda x: torch.softmax(x, dim=0), "aten._softmax"),
        (lambda x: torch.cat((x, x)), "aten.cat"),
        (lambda x: x.cumsum(dim=0), "aten.cumsum"),
        (lambda x: x * x.max().item(), "aten"),
        (lambda x: x * torch.arange(len(x))[:, None], "aten.arange"),
        (lambda x: x[CHOSEN], "aten.index"),
        (lambda x: x[1:] * 2, "without a dimension of 11 tokens"),
        (lambda x: x @ x.t() @ x, "aten.mm"),
        (lambda x: heads(x).contiguous(), "aten.clone"),
        (lambda x: x.new_zeros(MOST, MOST), "aten.new_zeros"),
        (lambda x: x.to(torch.bfloat16) * 2, "aten._to_copy"),
        (lambda x: TABLE.clone().mul_(x[0]), "aten.mul_|without a dimension"),
        (lambda x: torch.zeros(MOST, WIDTH).mul_(x), "aten.zeros"),
        (lambda x: TABLE[:MOST].mul_(x), "aten.mul_"),
    ],
)
def test_what_is_not_row_wise_is_refused(
    function: Callable[[Tensor], Tensor], words: str, ops: Ops
) -> None:
    before = TABLE.clone()
    with pytest.raises(CaptureError, match=words):
        record(ops, function, torch.zeros(MOST, WIDTH))
    assert torch.equal(TABLE, before)
