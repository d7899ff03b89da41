"""The code of products of bytes sums as ``product_bytes.py`` says: seen in machine code."""

from __future__ import annotations

from typing import Any

import pytest

from sdk.kernels.gpu.byte_rows import STEP
from tests.gpu.aot.sweep import MANY, run

#: Columns of a matrix instruction.
DEPTH = 32
CARDS = (89, 90)


def jobs(weight: str) -> list[tuple[Any, ...]]:
    """Few tokens, the two kinds of wide tiles, and experts."""
    cases = [("product_bytes", tokens) for tokens in (16, *MANY)]
    cases.append(("product_bytes experts", MANY[0]))
    return [(weight, *case, "bfloat16", "cuda", card) for card in CARDS for case in cases]


@pytest.mark.slow
def test_each_step_of_e4m3_products_is_a_sum_of_its_own_added_in_float32() -> None:
    for found in run("read_sums.py", [*jobs("fp8-channel"), *jobs("fp8-blocks")]):
        assert found["fresh"] > 0, found
        assert found["matrix"] == found["fresh"] * STEP // DEPTH, found
        assert found["ffma"] == found["fresh"] * found["results"], found


@pytest.mark.slow
def test_sums_of_integers_stay_in_the_matrix_units() -> None:
    for found in run("read_sums.py", jobs("int8-g1024-zero")):
        assert found["matrix"] > 0, found
        assert (found["fresh"], found["ffma"]) == (0, 0), found
