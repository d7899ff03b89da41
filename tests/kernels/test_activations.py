"""Large activations live in blocks of their own, which are reused and given back."""

from __future__ import annotations

import torch

from sdk.kernels.activations import LARGE, ActivationPool
from sdk.kernels.operators.ops import Ops

COUNT = LARGE // 4


def test_a_block_is_reused_when_its_last_view_is_gone() -> None:
    pool = ActivationPool()
    first = pool.take(COUNT)
    address = first.data_ptr()
    view = first.view(2, -1)[1]
    del first
    second = pool.take(COUNT)
    assert second.data_ptr() != address  # the view still needs the first block
    del view
    third = pool.take(COUNT)
    assert third.data_ptr() == address


def test_tensors_in_use_never_share_memory() -> None:
    pool = ActivationPool()
    kept = []
    for number in range(1, 40):
        tensor = pool.take(COUNT * (1 + number % 5))
        tensor.fill_(number)
        kept.append((number, tensor))
        if number % 3 == 0:
            kept.pop(number % len(kept))
        assert all(bool((tensor == value).all()) for value, tensor in kept)


def test_there_are_never_more_blocks_than_were_in_use_together() -> None:
    pool = ActivationPool()
    for number in range(1, 50):
        pair = [pool.take(COUNT * number), pool.take(COUNT * number)]
        del pair
        assert len(pool._free) == 2
    assert {len(block.memory) for block in pool._free} == {LARGE * 49}
    small = pool.take(COUNT)  # a larger block serves a smaller wish
    assert len(pool._free) == 1
    del small
    pool.close()
    assert pool._free == []


def test_operators_use_blocks_from_the_size_where_it_pays() -> None:
    ops = Ops(num_threads=1)
    small, large = ops.empty(4, 8), ops.empty(1024, COUNT // 512)
    assert small.shape == (4, 8) and large.shape == (1024, COUNT // 512)
    assert small.dtype == large.dtype == torch.float32
    assert len(ops.context._results._lent) == 1
    del large
    assert len(ops.context._results._free) == 1
    assert ops.empty(0, 8).shape == (0, 8)
    ops.close()


def test_a_tensor_without_numbers_can_be_taken() -> None:
    """As the angles of layers without a rotation, in a step that is recorded."""
    pool = ActivationPool(same_size=True)
    assert pool.take(0).view(5, 0).shape == (5, 0)
    assert pool.take(3).shape == (3,)
