"""The reference kernels against other people's: ggml's decoders, torch's attention."""

from __future__ import annotations

from typing import Any

import gguf
import libgguf
import numpy as np
import pytest
import torch

from sdk.kernels.batch import AttentionBatch
from sdk.kernels.errors import KernelError
from sdk.kernels.layouts import BLOCK_TYPES, Affine, Blocks, Dense, KVPages
from sdk.kernels.ops import Ops
from sdk.kernels.reference.decode import decode, pack_codes, unpack_codes


@pytest.fixture
def ops() -> Ops:
    return Ops("cpu", backends=["reference"])


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES))
def test_k_quants_decode_as_ggml_does(cases: Any, name: str) -> None:
    weight = cases.blocks(9, 1024, name)
    found = decode(weight).numpy()
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert np.array_equal(found, gguf.quants.dequantize(weight.data.numpy(), kind))
    native = libgguf.dequantize_rows(weight.data.numpy(), int(kind))
    assert np.array_equal(found, np.asarray(native).reshape(found.shape))


def test_columns_are_taken_in_any_order_and_put_back(ops: Ops) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    order = torch.tensor([2, 0, 1]).int()
    taken = ops.take_columns(x, order)
    assert taken.tolist() == [[3.0, 1.0, 2.0], [6.0, 4.0, 5.0]]
    assert torch.equal(ops.take_columns(taken, order, back=True), x)
    assert ops.take_columns(x[:0], order).shape == (0, 3)
    with pytest.raises(KernelError, match=r"take_columns order: expected torch\.int32 \[3\]"):
        ops.take_columns(x, order[:2])
    with pytest.raises(KernelError, match="take_columns order"):
        ops.take_columns(x, order.long())


def test_an_unknown_block_type_raises() -> None:
    with pytest.raises(KernelError, match=r"block type: expected one of .* found 'q9'"):
        decode(Blocks((1, 256), "q9", torch.zeros(1, 10, dtype=torch.uint8)))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 5, 8, 33])
def test_packing_codes_inverts_unpacking(bits: int, count: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, count)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, -(-count * bits // 8))
    assert torch.equal(unpack_codes(packed, bits, count), codes)


def test_codes_are_one_bit_stream_lowest_bit_first() -> None:
    stream = torch.tensor([[0b10_001_000, 0b1_100_011_0]], dtype=torch.uint8)
    assert unpack_codes(stream, 3, 5).tolist() == [[0, 1, 2, 3, 4]]


def test_the_affine_formula_by_hand() -> None:
    codes = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)  # 1, 2 | 3, 4 in groups of two
    scale = torch.tensor([[2.0, 0.5]])
    zeros = torch.tensor([[1, 3]], dtype=torch.uint8)
    minus = torch.tensor([[0.25, 1.0]])
    assert decode(Affine((1, 4), 4, 2, codes, scale, zero=2)).tolist() == [[-2, 0, 0.5, 1]]
    assert decode(Affine((1, 4), 4, 2, codes, scale, zeros=zeros)).tolist() == [[0, 2, 0, 0.5]]
    assert decode(Affine((1, 4), 4, 2, codes, scale, minus=minus)).tolist() == [
        [1.75, 3.75, 0.5, 1.0]
    ]
    signed = torch.tensor([[255, 1]], dtype=torch.uint8)
    assert decode(Affine((1, 2), 8, 2, signed, scale[:, :1], signed=True)).tolist() == [[-2, 2]]


def test_a_row_has_the_same_bits_in_every_batch(ops: Ops, cases: Any) -> None:
    for weight in (cases.affine(37, 96), cases.blocks(20, 256, "q5_k"), Dense(torch.randn(7, 33))):
        bound = ops.linear(weight)
        x = cases.activations(40, weight.shape[1])
        full = bound.matmul(x)
        assert cases.nmse(full, x.double() @ decode(weight).double().T) < 1e-12
        for m in (1, 2, 7, 16, 33):
            assert torch.equal(bound.matmul(x[:m]), full[:m])


@pytest.mark.parametrize("window", [None, 10])
def test_attention_matches_torch(ops: Ops, cases: Any, window: int | None) -> None:
    tokens, heads, kv_heads, head_dim = 100, 4, 2, 16
    q, k, v = (torch.randn(tokens, n, head_dim) for n in (heads, kv_heads, kv_heads))
    pages = KVPages(
        *(torch.zeros(7, kv_heads, 16, head_dim) for _ in range(2)),
    )
    at = torch.arange(tokens)
    batch = AttentionBatch(
        positions=at,
        query_start=torch.tensor([0, tokens], dtype=torch.int32),
        context_len=torch.tensor([tokens], dtype=torch.int32),
        page_table=torch.arange(7, dtype=torch.int32).flip(0).unsqueeze(0),
        slots=(6 - at // 16) * 16 + at % 16,
        page_size=16,
        max_query_len=tokens,
        max_context_len=tokens,
    )
    still = torch.ones(tokens, 1), torch.zeros(tokens, 1)
    ops.rope_and_cache(q, k, v, *still, batch, pages)
    found = ops.attention(q, pages, batch, scale=0.3, window=window)
    visible = at <= at.unsqueeze(1)
    if window is not None:
        visible &= at > at.unsqueeze(1) - window
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(
            x.double().transpose(0, 1)
            for x in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
        ),
        attn_mask=visible,
        scale=0.3,
    )
    assert cases.nmse(found, expected.transpose(0, 1).reshape(tokens, -1)) < 1e-12
