"""Attention over 131,072 tokens at every SIMD level, for every type of keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sdk.kernels.cpu import CpuBackend
from sdk.kernels.reference.page_codes import encode, mixed
from tests.kernels.plain_kernels import plain_kernels
from tests.kernels.test_cpu_attention import (
    DTYPES,
    NMSE,
    Step,
    attend,
    expected,
    make_batch,
    make_pages,
    sides,
)

CONTEXT, HEADS, HEAD_DIM, PAGE = 131_072, 3, 64, 16
#: Where each of the last tokens finds the key that equals its query.
FOUND = (0, 127, 128, 65_535, 100_001, 131_000)


def long_step(dtype: str) -> tuple[Step, torch.Tensor]:
    """The last tokens of a long prompt; each one's query is the key of one position, four times as
    long, so that nearly all of its weight is there. Also the values of all positions, in float32.
    """
    new = len(FOUND)
    batch, num_pages = make_batch([(CONTEXT, new)], PAGE)
    pages = make_pages(num_pages, 1, PAGE, HEAD_DIM, dtype)
    random = torch.Generator().manual_seed(7)
    keys, values = torch.randn(2, CONTEXT, 1, HEAD_DIM, generator=random)
    at = torch.arange(CONTEXT)
    page, slot = batch.page_table[0].long()[at // PAGE], at % PAGE
    for x, (to, scale, kind) in zip((keys, values), sides(pages), strict=True):
        if scale is None:
            to[page, :, slot] = x.to(to.dtype)
        else:
            codes, scales = encode(x, kind, scale.shape[1], mix=kind.hadamard)
            assert scales is not None
            to[page, :, slot], scale[page, :, slot] = codes, scales.flatten(1)
    queries = 4.0 * keys[list(FOUND)]
    if pages.k_type.hadamard:
        queries = mixed(queries)
    return Step(batch, pages, queries.expand(new, HEADS, HEAD_DIM).contiguous()), values[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_finds_its_key_among_131072(backend: CpuBackend, cases: Any, dtype: str) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    step, values = long_step(dtype)
    out = attend(kernel, step)
    assert cases.nmse(out, expected(step)) < NMSE.get(dtype, 1e-11)
    copies = out.view(len(FOUND), HEADS, HEAD_DIM)
    nearest = torch.cdist(copies[:, 0], values).argmin(dim=1)
    assert nearest.tolist() == list(FOUND)
