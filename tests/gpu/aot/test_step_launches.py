"""A decode step launches as many kernels as ``launches.txt`` says: more make tokens slower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.aot import step_launches

#: Counted in ``make test``, the other models in ``make test-all``.
ONE = "qwen3-0.6b-bfloat16"


@pytest.fixture(scope="module", params=[ONE, pytest.param("", marks=pytest.mark.slow)])
def counted(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The counts of one model or of all, from a process where Triton does not interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, step_launches.__file__, "--json", "--only", request.param],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    given = json.loads(done.stdout.splitlines()[-1])
    found = {
        model: {kernel: tuple(numbers) for kernel, numbers in counts.items()}
        for model, counts in given["found"].items()
    }
    record = step_launches.read_record()
    wanted = {request.param} if request.param else set(record)
    assert set(found) == wanted
    return {"found": found, "layers": given["layers"], "record": record}


def test_a_decode_step_launches_what_is_recorded(counted: dict[str, Any]) -> None:
    record = {model: counted["record"][model] for model in counted["found"]}
    table = step_launches.compared(counted["found"], record, counted["layers"])
    print(table)
    assert counted["found"] == record, (
        f"{table}\n\nfewer or meant: python tests/gpu/aot/step_launches.py --write"
    )


def test_every_weight_of_a_layer_is_multiplied_once(counted: dict[str, Any]) -> None:
    for model, counts in counted["found"].items():
        products = [numbers for kernel, numbers in counts.items() if "product" in kernel]
        products += [counts[kernel] for kernel in counts if kernel == "torch:aten.mm"]
        # q, k and v; out; gate and up; down. And the head.
        assert [sum(x) for x in zip(*products, strict=True)] == [4, 1], model


def test_a_change_is_named_with_its_direction(tmp_path: Path) -> None:
    before = {"llama": {"norm_kernel": (2, 1), "outside:aten.copy_": (0, 3)}}
    path = tmp_path / "launches.txt"
    step_launches.write_record(before, path)
    assert step_launches.read_record(path) == before
    after = {"llama": {"norm_kernel": (3, 1), "outside:aten.copy_": (0, 4)}}
    assert step_launches.of_step(before["llama"], 16) == 33
    text = step_launches.compared(after, before, {"llama": 16})
    assert "llama: 49 launches with 16 layers, worse than 33" in text
    assert "recorded: 2 and 1" in text
    assert "better than 49" in step_launches.compared(before, after, {"llama": 16})
