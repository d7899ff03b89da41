"""The linear kernels compile for cards that are not here, and the code for Hopper is as meant.

One of each kind; ``make aot`` (``sweep.py``): all of them for all cards.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.gpu.aot.sweep import CARDS, Job, run


def sample() -> list[Job]:
    """Every kernel once, every card once, and the decode kernels of the most used formats."""
    hopper = ("cuda", 90)
    jobs: list[Job] = [
        ("int4-g128-zeros", "product_one", 1, "bfloat16", *hopper),
        ("q4_k", "product_one", 1, "bfloat16", *hopper),
        ("int4-g128-zeros", "product", 16, "bfloat16", *hopper),
        ("q4_k", "product", 16, "bfloat16", *hopper),
        ("fp8-blocks", "product", 16, "bfloat16", *hopper),
        ("int4-g128-zeros", "product", 64, "float16", *hopper),
        ("int4-g128-zeros", "decode_rows", 16, "bfloat16", *hopper),
        ("int4-g128-zeros", "add_chunks", 16, "bfloat16", *hopper),
        ("int4-g128-zeros", "product_one silu", 1, "bfloat16", *hopper),
        ("int4-g128-zeros", "product silu", 16, "bfloat16", *hopper),
        ("int8-g1024-zero", "round_rows", 16, "bfloat16", *hopper),
        ("int8-g1024-zero", "product_bytes", 16, "bfloat16", *hopper),
        ("fp8-channel", "product_bytes", 16, "bfloat16", *hopper),
        ("int4-g128-zeros", "product_one experts", 1, "bfloat16", *hopper),
        ("q4_k", "product experts", 16, "bfloat16", *hopper),
        ("fp8-channel", "product_bytes experts", 16, "bfloat16", *hopper),
        ("bfloat16", "product_dense experts", 16, "bfloat16", *hopper),
        ("bfloat16", "product_dense experts", 512, "bfloat16", *hopper),
        ("q4_k", "decode_rows experts", 16, "bfloat16", *hopper),
    ]
    cards = [card for card in CARDS.values() if card != hopper]
    return jobs + [("int4-g128-zeros", "product", 16, "float16", *card) for card in cards]


@pytest.fixture(scope="module")
def results() -> dict[Job, dict[str, Any]]:
    """What two compiling processes report of each job."""
    jobs = sample()
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(lambda mine: run("compile_kernels.py", mine), (jobs[0::2], jobs[1::2]))
    found = {tuple(result["job"]): result for half in halves for result in half}
    assert set(found) == set(jobs)
    return found


@pytest.fixture(scope="module")
def hopper(results: dict[Job, dict[str, Any]]) -> dict[Job, dict[str, Any]]:
    return {job: found for job, found in results.items() if job[4:] == ("cuda", 90)}


@pytest.mark.slow
def test_kernels_compile_for_every_card(results: dict[Job, dict[str, Any]]) -> None:
    assert {job[4:] for job in results} == set(CARDS.values())
    assert {job: found["error"] for job, found in results.items() if "error" in found} == {}


@pytest.mark.slow
def test_no_kernel_for_hopper_spills_registers(hopper: dict[Job, dict[str, Any]]) -> None:
    assert {job: found for job, found in hopper.items() if found["spills"] or found["stack"]} == {}


@pytest.mark.slow
def test_decoding_loads_weights_sixteen_bytes_at_a_time(hopper: dict[Job, dict[str, Any]]) -> None:
    narrow = [
        job for job, found in hopper.items() if job[1].startswith("product") and not found["wide"]
    ]
    assert narrow == []


@pytest.mark.slow
def test_weights_of_one_token_are_loaded_before_they_are_used(
    hopper: dict[Job, dict[str, Any]],
) -> None:
    one = {job: found for job, found in hopper.items() if job[1].startswith("product_one")}
    assert len(one) == 4
    for job, found in one.items():
        assert found["loop_ahead"] > 0.9 * found["loop"], job  # those of the next unit
        # and the first ones before the kernel waits for earlier ones, if it knows the expert
        assert found["early"] == (0 if "experts" in job[1] else found["wide"] // 2), job


@pytest.mark.slow
def test_products_of_short_floats_use_the_matrix_units(hopper: dict[Job, dict[str, Any]]) -> None:
    plain = {
        job[1].split()[0]
        for job, found in hopper.items()
        if job[1].startswith("product") and not found["matrix"]
    }
    assert plain == {"product_one"}  # of one token, in float32


@pytest.mark.slow
def test_integers_become_floats_without_conversions(hopper: dict[Job, dict[str, Any]]) -> None:
    # I2F runs at a quarter of the speed of other instructions; a kernel may use it for scales only
    converted = {
        job: found["i2f"]
        for job, found in hopper.items()
        if job[0] == "int4-g128-zeros" and job[1].startswith("product") and found["i2f"] > 16
    }
    assert converted == {}


@pytest.mark.slow
def test_a_card_without_matrix_instructions_multiplies_with_plain_ones() -> None:
    """Triton no longer uses the units of sm_75; docs/bench/benchmarks.md says what runs where."""
    old = ("float16", "cuda", 75)
    jobs = [("q4_0", "product_one", 1, *old), ("q4_0", "product", 16, *old)]
    found = run("compile_kernels.py", jobs, read=True)
    assert [(x["matrix"], x["fma"] > 200) for x in found] == [(0, True), (0, True)]


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_noticed() -> None:
    found = run(
        "compile_kernels.py", [("int4-g128-zeros", "add_chunks", 16, "float32", "cuda", 35)]
    )
    assert "sm_35" in found[0]["error"]
