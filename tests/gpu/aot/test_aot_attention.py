"""Attention, rope, row-wise and sampling kernels compile for every target, without a card.

``compile_attention.py`` does it, in a process where Triton does not interpret. By default one of
each kernel and page type; ``--every-variant`` (``make aot``): all of them for every target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("compile_attention.py")
#: Page types some targets are shown with: the oldest, one without 8-bit floats, another vendor's.
SHOWN = {"sm_75": "bfloat16", "sm_80": "float8_e4m3fn", "gfx942": "int8"}
#: KiB of shared memory a program may have there.
LIMITS = {
    "sm_75": 64, "sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99,
    "gfx90a": 64, "gfx942": 64,
}  # fmt: skip


def compiled(folder: Path, *jobs: tuple[str, str]) -> list[dict[str, Any]]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, str(PROGRAM), json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [x for x in found if x["shared"] > LIMITS[x["target"]] * 1024] == []
    return found


def test_targets_get_their_kernels(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    jobs = [(target, f"(attention|rope) {dtype}( 128)?") for target, dtype in SHOWN.items()]
    if request.config.getoption("--every-variant"):
        jobs = [(target, ".*") for target in LIMITS]
    half = len(jobs) // 2
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda part: compiled(tmp_path, *part), (jobs[:half], jobs[half:]))
        found = [kernel for part in parts for kernel in part]
    names = {"prefill_kernel", "decode_kernel", "join_kernel", "rope_kernel"}
    for target, _ in jobs:
        assert names <= {x["kernel"] for x in found if x["target"] == target}, target


def test_row_wise_kernels_and_the_sampler_spill_nothing_on_sm_90(tmp_path: Path) -> None:
    found = compiled(tmp_path, ("sm_90", "rows|sampling|rope int8"))
    spilling = {x["kernel"] for x in found if x["STACK"]}
    assert spilling == {"angles_kernel"}  # the exact sine of a large angle needs a table
    names = {x["kernel"] for x in found} - spilling
    assert {"norm_kernel", "gated_kernel", "map_kernel", "gather_kernel", "places_kernel"} < names
    assert {"peaks_kernel", "sample_kernel", "penalize_kernel", "rope_kernel"} < names


@pytest.mark.parametrize("case", ["bfloat16 128", "int8 128 window cap sinks cascade"])
def test_attention_on_sm_90_reads_16_bytes_at_a_time_and_spills_nothing(
    tmp_path: Path, case: str
) -> None:
    found = compiled(tmp_path, ("sm_90", f"attention {case}"))
    assert ("shared_kernel" in {x["kernel"] for x in found}) == ("cascade" in case)
    for kernel in found:
        assert kernel["STACK"] == 0, kernel
        if kernel["kernel"] != "join_kernel":
            assert kernel["wide"], kernel
            assert kernel["matrix"], kernel
