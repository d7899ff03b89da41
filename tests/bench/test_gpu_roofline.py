"""The model behind the predictions of `embedlm bench gpu`, by hand-made kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sdk.bench.gpu import Report, roofline, to_markdown
from sdk.bench.gpu.roofline import DEVICES, HIGH, LOW, USUAL, Device, Work, seconds
from sdk.bench.gpu.rows import Finding

H100, T4 = DEVICES["H100 SXM"], DEVICES["T4"]
SIMPLE = Device("simple", "sm_90", 10, 1.0, 1e12, 1e14, 2e14, 0.0, 228 << 10, 64, 32)
EXACT = roofline.Assumptions(1.0, 1e-6, 1.0, 1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("device", "warps", "registers", "shared", "expected"),
    [
        (H100, 4, 128, 0, 4),  # registers: 65536 / (128 * 128)
        (H100, 4, 110, 0, 4),  # which are given out in eights: 112
        (H100, 4, 32, 56 << 10, 4),  # shared memory: 228 KiB, of which each takes 57
        (H100, 4, 32, 57 << 10, 3),
        (H100, 1, 16, 0, 32),  # programs
        (H100, 8, 16, 0, 8),  # warps
        (T4, 8, 16, 0, 4),
        (H100, 4, 16, 300 << 10, 0),
    ],
)
def test_programs_that_fit(
    device: Device, warps: int, registers: int, shared: int, expected: int
) -> None:
    assert roofline.resident(device, warps, registers, shared) == expected


def test_the_slowest_bound_counts() -> None:
    work = Work("k", 40, warps=4, registers=128)
    assert seconds(SIMPLE, replace(work, read=3e6, written=1e6), EXACT) == pytest.approx(4e-6)
    # 40 programs on 10 processors: four each, of 1e5 products of 2 operations, at 1e13 a second
    assert seconds(SIMPLE, replace(work, macs=4e6), EXACT) == pytest.approx(8e-8)
    assert seconds(SIMPLE, replace(work, macs=4e6, narrow=True), EXACT) == pytest.approx(4e-8)
    # four programs of 4000 instructions, four in a cycle of a nanosecond
    busy = replace(work, instructions=4000)
    assert seconds(SIMPLE, busy, EXACT) == pytest.approx(4e-6)
    # of which half are integer ones, for which a cycle has two turns
    assert seconds(SIMPLE, replace(busy, alu=4000), EXACT) == pytest.approx(8e-6)
    assert seconds(SIMPLE, replace(busy, fma=4000), EXACT) == pytest.approx(4e-6)
    assert max(roofline.bounds(SIMPLE, replace(busy, read=1e6), EXACT).values()) == 4e-6


@pytest.mark.parametrize(("programs", "turns"), [(1, 1), (10, 1), (11, 2), (40, 4), (41, 5)])
def test_the_busiest_processor_is_waited_for(programs: int, turns: int) -> None:
    work = Work("k", programs, warps=4, registers=128, instructions=4000)
    assert seconds(SIMPLE, work, EXACT) == pytest.approx(turns * 1e-6)


def test_few_loads_in_flight_do_not_fill_the_memory() -> None:
    # 10 programs, each waits 1 us for 1000 bytes: 1e10 bytes a second, of 1e12
    work = Work("k", 10, read=1e6, in_flight=1000.0)
    assert seconds(SIMPLE, work, EXACT) == pytest.approx(1e-4)
    assert seconds(SIMPLE, replace(work, in_flight=1e9), EXACT) == pytest.approx(1e-6)


def test_a_launch_costs_more_one_by_one() -> None:
    work = Work("k", 1)
    assert seconds(H100, work) == USUAL.graph_launch
    assert seconds(H100, work, graph=False) == USUAL.eager_launch


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_assumptions_range_from_slow_to_fast(device: Device) -> None:
    work = Work("k", 4096, read=1e8, macs=1e11, instructions=5e4, alu=2e4, fma=2e4)
    assert seconds(device, work, LOW) > seconds(device, work) > seconds(device, work, HIGH)
    low, usual, high = (roofline.library(device, 512, 8192, 8192, x) for x in (LOW, USUAL, HIGH))
    assert low > usual > high


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Triton's interpreter", None),
    ],
)
def test_a_card_is_known_by_its_driver_s_name(name: str, device: str | None) -> None:
    found = roofline.device_like(name)
    assert (found and found.name) == device


def test_predictions_stand_beside_what_is_measured() -> None:
    name = "W4A16 g128 8192x16384, 1 tokens"
    found = roofline.read_predictions("NVIDIA H100 80GB HBM3")
    predicted = found[f"{name}|copy bandwidth"]
    assert predicted.low <= predicted.value <= predicted.high
    finding = Finding(name, "copy bandwidth", 50.0, "%", 40, 60)
    report = Report({"name": "NVIDIA H100 80GB HBM3"}, False, {"w4": [finding]})
    row = next(line for line in to_markdown(report).splitlines() if line.startswith(f"| {name}"))
    share = f"{0.5 / (predicted.value / 100):.2f}"
    assert row == f"| {name} | copy bandwidth | 50 % | {predicted} | {share} | 40 | 60 | floor |"
    assert report.to_json(1.0)["predicted"][f"{name}|copy bandwidth"]["value"] == predicted.value
    report.tiny = True
    assert f"{predicted}" not in to_markdown(report)


def test_every_prediction_is_within_its_range(tmp_path: Path) -> None:
    data = json.loads(roofline.PREDICTED.read_text())
    assert set(data) == set(DEVICES)
    for rows in data.values():
        for name, (value, low, high) in rows.items():
            assert 0 < low <= value <= high, name
    assert roofline.read_predictions("an unknown card") == {}
    assert roofline.read_predictions("Tesla T4", tmp_path / "missing.json") == {}
