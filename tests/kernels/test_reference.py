"""The reference kernels against other people's: ggml's decoders, torch's attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import libgguf
import numpy as np
import pytest
import torch

from sdk.kernels.errors import KernelError
from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import SampleBuffers, pack_draw
from sdk.kernels.reference.decode import decode, pack_codes, unpack_codes
from sdk.kernels.weights.layouts import BLOCK_TYPES, Affine, Blocks, Dense, check_layout


@pytest.fixture
def ops() -> Ops:
    return Ops("cpu", backends=["reference"])


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES))
def test_blocks_decode_as_ggml_does(cases: Any, name: str) -> None:
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


def test_super_scales_of_coded_scales_run_on_over_the_ends_of_rows() -> None:
    weight = Affine(
        (2, 3),
        4,
        1,
        torch.tensor([[0x11, 0x01], [0x11, 0x01]], dtype=torch.uint8),  # all 1
        torch.tensor([[0, 1, 2], [2, 1, 0]], dtype=torch.uint8),
        super_scale=torch.tensor([1.0, 10.0]),  # of four scales and of two
        super_group=4,
        scale_table=torch.tensor([1.0, 2.0, 4.0, *[0.0] * 253]),
        scale_offset=torch.tensor([0.5, 0.25]),
    )
    check_layout(weight)
    assert decode(weight).tolist() == [[1.5, 2.5, 4.5], [4.25, 20.25, 10.25]]


def test_the_affine_formula_by_hand() -> None:
    codes = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)  # 1, 2 | 3, 4 in groups of two
    scale = torch.tensor([[2.0, 0.5]])
    zeros = torch.tensor([[0x31]], dtype=torch.uint8)  # packed as the codes are: 1 | 3
    minus = torch.tensor([[0.25, 1.0]])
    assert decode(Affine((1, 4), 4, 2, codes, scale, zero=2)).tolist() == [[-2, 0, 0.5, 1]]
    assert decode(Affine((1, 4), 4, 2, codes, scale, zeros=zeros)).tolist() == [[0, 2, 0, 0.5]]
    floats = torch.tensor([[0.5, 2.5]]).half()
    assert decode(Affine((1, 4), 4, 2, codes, scale, zeros=floats)).tolist() == [[1, 3, 0.25, 0.75]]
    assert decode(Affine((1, 4), 4, 2, codes, scale, minus=minus)).tolist() == [
        [1.75, 3.75, 0.5, 1.0]
    ]
    signed = torch.tensor([[255, 1]], dtype=torch.uint8)
    assert decode(Affine((1, 2), 8, 2, signed, scale[:, :1], signed=True)).tolist() == [[-2, 2]]


def test_codes_that_index_a_table_by_hand() -> None:
    codes = torch.tensor([[0xF0, 0x21]], dtype=torch.uint8)  # 0, 15 | 1, 2 in groups of two
    table = torch.arange(16.0) - 3
    scale = torch.tensor([[2.0, 0.5]])
    one = Affine((1, 4), 4, 2, codes, scale, table=table)
    assert decode(one).tolist() == [[-6, 24, -1, -0.5]]
    bytes = torch.tensor([[126, 130]], dtype=torch.uint8)  # 2^-1, 2^3
    powers = replace(one, scale=bytes.view(torch.float8_e8m0fnu))
    assert decode(powers).tolist() == [[-1.5, 6, -16, -8]]
    levels = replace(
        one,
        scale=torch.tensor([[3, 250]], dtype=torch.uint8),
        super_scale=torch.tensor([[0.5]]),
        super_group=4,
    )
    assert decode(levels).tolist() == [[-4.5, 18, -250, -125]]
    each = replace(levels, super_scale=torch.tensor([[0.5, 2.0]]), super_group=2)
    assert decode(each).tolist() == [[-4.5, 18, -1000, -500]]
    bits = torch.tensor([[0b0110]], dtype=torch.uint8)
    signs = Affine((1, 4), 1, 4, bits, scale[:, :1], table=torch.tensor([-1.0, 1.0]))
    assert decode(signs).tolist() == [[-2, 2, 2, -2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 2}, r"affine table: expected \(1, 3, 4\) bits, found 2"),
        ({"zero": 8}, "affine table: expected no zero points"),
        ({"zeros": torch.zeros(3, 4).byte()}, "affine table: expected no zero points"),
        ({"table": torch.zeros(15)}, r"affine table: expected torch.float32 \[16\], found .*15"),
        ({"table": torch.zeros(16).half()}, r"affine table: .* found torch.float16"),
        ({"table": torch.full((16,), float("nan"))}, "affine table: expected finite values"),
        ({"scale": torch.ones(3, 4).byte()}, r"affine scale: .* found torch.uint8"),
        ({"super_scale": torch.ones(3, 2)}, "super groups of whole groups of 32, found 0"),
        ({"super_scale": torch.ones(3, 2), "super_group": 48}, "whole groups of 32, found 48"),
        ({"super_scale": torch.ones(3, 3), "super_group": 64}, r"super_scale: .*\[3, 2\], found"),
        (
            {"super_scale": torch.ones(3, 2).double(), "super_group": 64},
            r"super_scale: .* found torch.float64",
        ),
    ],
)
def test_a_table_that_contradicts_its_weight_is_refused(
    cases: Any, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        check_layout(replace(cases.table(3, 128), **change))


def test_a_row_has_the_same_bits_in_every_batch(ops: Ops, cases: Any) -> None:
    for weight in (cases.affine(37, 96), cases.blocks(20, 256, "q5_k"), Dense(torch.randn(7, 33))):
        bound = ops.linear(weight)
        x = cases.activations(40, weight.shape[1])
        full = bound.matmul(x)
        assert cases.nmse(full, x.double() @ decode(weight).double().T) < 1e-12
        for m in (1, 2, 7, 16, 33):
            assert torch.equal(bound.matmul(x[:m]), full[:m])


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("window", [None, 10])
def test_attention_matches_torch(ops: Ops, cases: Any, window: int | None, centred: bool) -> None:
    tokens, heads, kv_heads, head_dim = 100, 4, 2, 16
    q, k, v = (torch.randn(tokens, n, head_dim) for n in (heads, kv_heads, kv_heads))
    pages = KVPages(
        *(torch.zeros(7, kv_heads, 16, head_dim) for _ in range(2)),
        *(KV_TYPES["float32"] for _ in range(2)),
        k_centre=torch.randn(kv_heads, head_dim) if centred else None,
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


def test_a_gate_of_another_size_or_kind_is_refused(ops: Ops) -> None:
    x = torch.ones(2, 12)
    assert torch.equal(ops.gate(x[:0], torch.ones(0, 3), "sigmoid"), x[:0])
    for gate, kind in ((torch.ones(2, 5), "sigmoid"), (torch.ones(2, 4), "relu")):
        with pytest.raises(KernelError, match=r"gate: expected one of sigmoid, .* for equal"):
            ops.gate(x, gate, kind)  # type: ignore[arg-type]


def test_draws_beyond_the_rows_at_hand_are_not_looked_at(ops: Ops) -> None:
    buffers = SampleBuffers(4)
    for row in range(4):  # as a larger step before has left them
        buffers.set(row, pack_draw(temperature=1.0), 0.5)
    ops.sampling.sample_into(torch.tensor([[0.0, 50.0, 1.0]]), buffers)
    assert buffers.read(1).tokens == [1]
