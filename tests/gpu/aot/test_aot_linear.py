"""The linear kernels compile for cards that are not here, and the code for Hopper is as meant.

By default one of each kind; ``--every-variant`` (``make aot``): all of them for all cards.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

CARDS = [("cuda", arch) for arch in (75, 80, 89, 90, 100, 120)]
CARDS += [("hip", "gfx90a"), ("hip", "gfx942")]
WEIGHTS = [
    *("int4-g32-minus", "int4-g64-zero", "int4-g128-zeros", "int4-g1024-zero"),
    *("int2-g32-zeros", "int3-g128-zero", "int5-g64-zeros", "int6-g64-zeros", "int7-g64-zero"),
    *("int8-g128-zeros", "int8-g1024-zero", "nf4-g64", "mxfp4", "nvfp4"),
    *("fp8-channel", "fp8-blocks", "fp8-e5m2"),
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs"),
]
Job = tuple[str, str, int, str, str, Any]


def sample() -> list[Job]:
    """Every kernel once, every card once, and the decode kernels of the most used formats."""
    hopper = ("cuda", 90)
    jobs: list[Job] = [
        ("int4-g128-zeros", "product_one", 1, "float32", *hopper),
        ("q4_k", "product_one", 1, "float32", *hopper),
        ("int4-g128-zeros", "product", 16, "bfloat16", *hopper),
        ("q4_k", "product", 16, "bfloat16", *hopper),
        ("fp8-blocks", "product", 16, "bfloat16", *hopper),
        ("int4-g128-zeros", "product", 64, "float16", *hopper),
        ("int4-g128-zeros", "decode_rows", 16, "bfloat16", *hopper),
        ("int4-g128-zeros", "add_up", 16, "float32", *hopper),
        ("int4-g128-zeros", "add_chunks", 16, "bfloat16", *hopper),
        ("int8-g1024-zero", "round_rows", 16, "bfloat16", *hopper),
        ("int8-g1024-zero", "product_bytes", 16, "bfloat16", *hopper),
        ("fp8-channel", "product_bytes", 16, "bfloat16", *hopper),
        ("int4-g128-zeros", "product_one experts", 1, "float32", *hopper),
        ("q4_k", "product experts", 16, "bfloat16", *hopper),
        ("fp8-channel", "product_bytes experts", 16, "bfloat16", *hopper),
        ("bfloat16", "product_dense", 16, "bfloat16", *hopper),
    ]
    cards = [card for card in CARDS if card != hopper]
    return jobs + [("int4-g128-zeros", "product", 16, "float16", *card) for card in cards]


def every_variant() -> list[Job]:
    jobs: list[Job] = [
        ("int4-g128-zeros", kernel, 16, "float16", *card)
        for kernel, card in itertools.product(("add_up", "add_chunks"), CARDS)
    ]
    jobs += [
        ("int8-g1024-zero", kernel, 16, "float16", *card)
        for kernel, card in itertools.product(("round_rows", "product_bytes"), CARDS)
        if card != ("cuda", 75)  # see bytes_of_card
    ]
    jobs += [
        ("fp8-channel", kernel, 16, "float16", "cuda", arch)
        for kernel, arch in itertools.product(("round_rows", "product_bytes"), (89, 90, 100, 120))
    ]
    for name, card in itertools.product(WEIGHTS, CARDS):
        short = ["float16"] if card == ("cuda", 75) else ["float16", "bfloat16"]
        jobs.append((name, "product_one", 1, "float32", *card))
        jobs += [(name, "decode_rows", 16, dtype, *card) for dtype in short]
        for tokens in (2, 64):
            jobs += [(name, "product", tokens, dtype, *card) for dtype in (*short, "float32")]
    return jobs


def compile_jobs(jobs: list[Job], cache: Path) -> list[dict[str, Any]]:
    """What ``compile_kernels.py`` says of the jobs; the compiler itself may print beside it."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_kernels.py")],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"job"')]


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Job, dict[str, Any]]:
    """What two compiling processes report of each job."""
    jobs = every_variant() if request.config.getoption("--every-variant") else sample()

    def compile_(mine: list[Job]) -> list[dict[str, Any]]:
        return compile_jobs(mine, tmp_path_factory.mktemp("triton"))

    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(compile_, (jobs[0::2], jobs[1::2]))
    found = {tuple(result["job"]): result for half in halves for result in half}
    assert set(found) == set(jobs)
    return found


@pytest.fixture(scope="module")
def hopper(results: dict[Job, dict[str, Any]]) -> dict[Job, dict[str, Any]]:
    return {job: found for job, found in results.items() if job[4:] == ("cuda", 90)}


@pytest.mark.timeout(7200)
def test_kernels_compile_for_every_card(results: dict[Job, dict[str, Any]]) -> None:
    assert {job[4:] for job in results} == set(CARDS)
    assert {job: found["error"] for job, found in results.items() if "error" in found} == {}


def test_no_kernel_for_hopper_spills_registers(hopper: dict[Job, dict[str, Any]]) -> None:
    assert {job: found for job, found in hopper.items() if found["spills"] or found["stack"]} == {}


def test_decoding_loads_weights_sixteen_bytes_at_a_time(hopper: dict[Job, dict[str, Any]]) -> None:
    narrow = [
        job for job, found in hopper.items() if job[1].startswith("product") and not found["wide"]
    ]
    assert narrow == []


def test_products_of_short_floats_use_the_matrix_units(hopper: dict[Job, dict[str, Any]]) -> None:
    plain = {
        job: found["matrix"]
        for job, found in hopper.items()
        if job[1].startswith("product") and job[3] != "float32" and not found["matrix"]
    }
    assert plain == {}


def test_integers_become_floats_without_conversions(hopper: dict[Job, dict[str, Any]]) -> None:
    # I2F runs at a quarter of the speed of other instructions; a kernel may use it for scales only
    converted = {
        job: found["i2f"]
        for job, found in hopper.items()
        if job[0] == "int4-g128-zeros" and job[1].startswith("product") and found["i2f"] > 16
    }
    assert converted == {}


def test_a_kernel_that_does_not_compile_is_noticed(tmp_path: Path) -> None:
    found = compile_jobs([("int4-g128-zeros", "add_up", 16, "float32", "cuda", 12)], tmp_path)
    assert "sm_12" in found[0]["error"]
