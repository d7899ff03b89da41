"""Attention, rope, row-wise and sampling kernels compile for every target, without a card.

``compile_attention.py`` does it, in a process where Triton does not interpret: one of each kernel
and page type. ``make aot`` (``sweep.py``): all of them for every target.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.gpu.aot import records, sweep

#: Page types some targets are shown with: the oldest, one without 8-bit floats, another vendor's.
SHOWN = {"sm_75": "bfloat16", "sm_80": "float8_e4m3fn", "gfx942": "int8"}


def compiled(*jobs: tuple[str, str]) -> list[dict[str, Any]]:
    found = sweep.run("compile_attention.py", jobs)
    assert [(x, why) for x in found if (why := records.complaint(x["job"][0], x))] == []
    return found


@pytest.mark.slow
def test_targets_get_their_kernels() -> None:
    jobs = [(target, f"(attention|rope) {dtype}( 128)?") for target, dtype in SHOWN.items()]
    with ThreadPoolExecutor(2) as pool:
        found = [kernel for part in pool.map(compiled, jobs) for kernel in part]
    names = {"prefill_kernel", "decode_kernel", "work_kernel", "rope_kernel"}
    for target, _ in jobs:
        assert names <= {x["kernel"] for x in found if x["job"][0] == target}, target


@pytest.mark.slow
def test_row_wise_kernels_and_the_sampler_spill_nothing_on_sm_90() -> None:
    found = compiled(("sm_90", "rows|sampling|experts|rope int8"))
    spilling = {x["kernel"] for x in found if x["stack"]}
    assert spilling == records.ON_THE_STACK
    names = {x["kernel"] for x in found} - spilling
    assert {"norm_kernel", "activation_kernel", "map_kernel", "places_kernel"} < names
    assert {"peaks_kernel", "shape_kernel", "count_kernel", "bounds_kernel"} < names
    assert {"gather_kernel", "sample_kernel", "rope_kernel"} < names
    assert {"route_kernel", "group_kernel", "gate_kernel", "combine_kernel"} < names


@pytest.mark.parametrize(
    "case",
    ["bfloat16 128", "int8 128 window cap sinks cascade", "int4 80"],
)
@pytest.mark.slow
def test_attention_on_sm_90_reads_16_bytes_at_a_time_and_spills_what_is_known(case: str) -> None:
    found = compiled(("sm_90", f"attention {case}"))
    assert ("shared_kernel" in {x["kernel"] for x in found}) == ("cascade" in case)
    for kernel in found:
        assert kernel["stack"] <= records.SPILLED.get(("sm_90", kernel["kernel"]), 0), kernel
        if kernel["kernel"] != "work_kernel":
            assert kernel["wide"], kernel
            assert kernel["matrix"], kernel
