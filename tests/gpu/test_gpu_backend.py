"""Where the GPU's backend runs, what it is asked for, and the tables of tile sizes."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdk.kernels import gpu
from sdk.kernels.backend import Problem
from sdk.kernels.gpu import available, tuning_of
from sdk.kernels.gpu.dense import DenseLinear
from sdk.kernels.gpu.linear_as_file import TritonLinearAsFile
from sdk.kernels.gpu.packing import Packed, pack
from sdk.kernels.gpu.tuning import OPS, VERSION, Tiles, Tuning, read_tuning, type_of
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.decode import decode
from sdk.kernels.weights.layouts import ActivationScheme

ENTRY = {"max_m": 8, "n": 256, "k": 512, "block_n": 32, "block_m": 16}
ENTRY |= {"split": 2, "warps": 2, "stages": 4}


@pytest.fixture
def weight(cases: Any) -> Packed:
    return pack(cases.affine(256, 512, 4, 128, "zero"))


def write(folder: Path, entries: list[dict[str, Any]], **other: Any) -> Path:
    table = {
        "version": VERSION,
        "dense_from": 300,
        "experts_dense_from": 90,
        **{op: {} for op in OPS},
    }
    table |= {"linear": {"int4g128": entries}} | other
    (folder / "nvidia-test.json").write_text(json.dumps(table))
    return folder


def test_the_interpreter_stands_in_for_a_gpu_and_other_devices_are_declined() -> None:
    import triton

    assert triton.knobs.runtime.interpret
    assert available("cpu") is None
    assert available("mps") == "runs on GPUs only, not on mps"
    if not torch.cuda.is_available():
        assert available("cuda:0") is not None


def test_what_a_gpu_lacks_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    assert available("cuda") == (
        "torch 2.8.0+cpu is built for CPUs alone: install its build for this GPU"
    )
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert available("cuda") == "torch finds no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert available("cuda") == "torch 2.8.0+cpu is older than 2.10"
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert available("cuda") == "compute capability 6.1: expected 7.5 or newer"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert available("cuda") is None
    monkeypatch.setattr("sdk.kernels.gpu.find_spec", lambda name: None)
    assert available("cuda") == 'triton is not installed: pip install "embedlm[gpu]"'


def test_without_the_interpreter_a_cpu_does_not_even_import_triton() -> None:
    code = (
        "import sys, sdk.kernels.gpu as gpu; print(gpu.available('cpu')); "
        "assert 'triton' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=True,
        env={},
    )
    assert done.stdout.strip() == "runs on GPUs only, not on cpu"


def test_an_engine_takes_the_first_kernel_that_does_not_decline(cases: Any) -> None:
    layout = cases.blocks(20, 256, "q4_k")
    x = cases.activations(3, 256)
    for compute, name in (("auto", "gpu.linear"), ("exact", "gpu.linear_exact")):
        ops = Ops("cpu", compute=compute, backends=("gpu", "reference"))
        bound = ops.linear(layout)
        assert bound.choice.name == name
        expected = x.double() @ decode(layout).double().t()
        assert (bound.matmul(x) - expected).norm() < 1e-3 * expected.norm()
        assert cases.same(bound.layout(), layout)
        ops.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_weights_are_left_to_the_library(cases: Any, dtype: torch.dtype) -> None:
    layout, x = cases.dense(20, 48, dtype), cases.activations(3, 48)
    ops = Ops("cpu", backends=("gpu", "reference"))
    bound = ops.linear(layout)
    assert bound.choice.name == "gpu.dense"
    expected = x.to(dtype).double() @ layout.values.double().t()
    assert torch.allclose(bound.matmul(x).double(), expected, rtol=2e-2, atol=2e-1)
    ids = torch.tensor([19, 0])
    assert torch.equal(bound.rows(ids), layout.values[ids].float())
    assert cases.same(bound.layout(), layout)
    assert bound.nbytes == layout.nbytes
    ops.close()


@pytest.mark.parametrize(
    ("fixed", "problem", "reason"),
    [
        (True, Problem("linear", layout="dense", format="float16"), "depends on the batch"),
        (False, Problem("linear", "exact", "dense", "float16"), "compute is exact"),
        (False, Problem("linear", layout="dense", format="float8_e5m2"), "float8_e5m2 dense"),
        (False, Problem("linear", layout="blocks", format="q4_0"), "q4_0 blocks: expected dense"),
    ],
)
def test_what_the_library_cannot_do_is_declined_with_a_reason(
    fixed: bool, problem: Problem, reason: str
) -> None:
    declined = DenseLinear(fixed=fixed).reject(problem)
    assert declined is not None
    assert reason in declined


def test_a_card_without_a_table_starts_by_the_rule(tmp_path: Path, weight: Packed) -> None:
    tuning = read_tuning("NVIDIA Test", 64, tmp_path)
    assert tuning == Tuning(64)
    # four units of columns are shared by two programs, by none where each wants four
    assert [tuning.tiles(weight, tokens).split for tokens in (1, 2)] == [2, 1]
    assert tuning.tiles(weight, 40).block_m == 64


def test_a_table_says_the_tiles_of_a_weight_by_its_number_of_tokens(
    tmp_path: Path, weight: Packed
) -> None:
    write(tmp_path, [ENTRY, ENTRY | {"max_m": 2, "split": 1}])
    tuning = read_tuning("NVIDIA Test", 64, tmp_path)
    assert (tuning.dense_from, tuning.experts_dense_from) == (300, 90)
    assert tuning.tiles(weight, 2) == Tiles(32, 16, 1, 2, 4)
    assert tuning.tiles(weight, 8) == Tiles(32, 16, 2, 2, 4)
    assert tuning.tiles(weight, 9) == Tuning(64).tiles(weight, 9)


SISTER = {"capability": [9, 0], "processors": 16}


def test_a_table_of_a_card_with_the_same_processors_serves_its_sister(
    tmp_path: Path, weight: Packed
) -> None:
    write(tmp_path, [ENTRY], **SISTER)
    found = read_tuning("NVIDIA Sister", 64, tmp_path, (9, 0))
    assert found.dense_from == 300
    assert found.tiles(weight, 8) == Tiles(32, 16, 2, 2, 4)


@pytest.mark.parametrize(
    ("facts", "programs", "capability"),
    [
        (SISTER, 64, (8, 0)),
        (SISTER, 68, (9, 0)),
        ({}, 64, (9, 0)),
        ({"capability": [9, 0]}, 64, (9, 0)),
        ({"capability": "9.0", "processors": 16}, 64, (9, 0)),
    ],
    ids=["older", "more processors", "says nothing", "no processors", "in words"],
)
def test_a_table_of_another_kind_of_card_serves_it_alone(
    tmp_path: Path, facts: dict[str, Any], programs: int, capability: tuple[int, int]
) -> None:
    write(tmp_path, [ENTRY], **facts)
    assert read_tuning("NVIDIA Other", programs, tmp_path, capability) == Tuning(programs)
    assert read_tuning("NVIDIA Test", programs, tmp_path, capability).dense_from == 300


def test_of_its_own_table_and_a_sister_s_a_card_uses_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [ENTRY], **SISTER)
    (tmp_path / "nvidia-test.json").rename(tmp_path / "nvidia-first.json")
    write(tmp_path, [], **SISTER, dense_from=77)
    assert read_tuning("NVIDIA Test", 64, tmp_path, (9, 0)).dense_from == 77
    assert read_tuning("NVIDIA Third", 64, tmp_path, (9, 0)).dense_from == 300
    (tmp_path / "nvidia-test.json").write_text("half a ta")
    assert read_tuning("NVIDIA Test", 64, tmp_path, (9, 0)) == Tuning(64)
    assert caplog.text.count("nvidia-test.json: not a table of tile sizes") == 1


@pytest.mark.parametrize("text", ["half a ta", "[]", "7", '{"version": 0}'])
def test_a_damaged_table_of_another_card_is_passed_over_with_a_warning(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a-damaged.json").write_text(text)
    write(tmp_path, [ENTRY], **SISTER)
    assert read_tuning("NVIDIA Sister", 64, tmp_path, (9, 0)).dense_from == 300
    assert "a-damaged.json: not a table of tile sizes" in caplog.text
    (tmp_path / "nvidia-test.json").unlink()
    assert read_tuning("NVIDIA Sister", 64, tmp_path, (9, 0)) == Tuning(64)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_n": 24},
        {"block_m": 8},
        {"split": 0},
        {"warps": 3},
        {"stages": "many"},
        {"max_m": None},
    ],
)
def test_a_table_with_impossible_tiles_is_a_warning_and_the_rule(
    tmp_path: Path, wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, [ENTRY | wrong])
    assert read_tuning("NVIDIA Test", 64, tmp_path) == Tuning(64)
    assert "nvidia-test.json: not a table of tile sizes" in caplog.text


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"linear": {}}', '{"version": 0, "dense_from": 9, "linear": {}}', "\udcff"],
)
def test_a_file_that_is_no_table_is_a_warning_and_the_rule(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nvidia-test.json").write_bytes(text.encode(errors="surrogateescape"))
    assert read_tuning("NVIDIA Test", 64, tmp_path) == Tuning(64)
    assert "nvidia-test.json: not a table of tile sizes" in caplog.text


def test_what_decoding_costs_decides_which_weights_share_an_entry(cases: Any) -> None:
    layouts = (
        cases.affine(32, 256, 4, 128, "zero"),
        cases.affine(32, 256, 4, 32, "zeros"),
        cases.blocks(32, 256, "q4_0"),
        cases.blocks(32, 256, "q4_1"),
        cases.blocks(32, 256, "q4_k"),
        cases.float8(32, 256, (1, 256)),
    )
    names = ["int4g128", "int4g32z", "int4g32", "int4g32m", "int4g32sm", "e4m38g256"]
    assert [type_of(pack(layout)) for layout in layouts] == names


def test_products_of_bytes_have_entries_of_their_own(cases: Any) -> None:
    layout = replace(cases.float8(32, 256, (1, 256)), inputs=ActivationScheme("e4m3"))
    kernel = TritonLinearAsFile(Tuning(4), ("e4m3",))
    packed = kernel.pack(layout)
    assert kernel.op_of(packed) == "linear_bytes"
    plain = TritonLinearAsFile(Tuning(4), ())
    assert plain.op_of(plain.pack(layout)) == "linear"
    own = Tiles(16, 16, 1, 2, 2)
    tuning = Tuning(4, table={("linear_bytes", type_of(packed), 32, 256): [(8, own)]})
    assert tuning.tiles(packed, 3, "linear_bytes") == own
    assert tuning.tiles(packed, 3) == Tuning(4).tiles(packed, 3)


@pytest.mark.parametrize(
    ("version", "hip", "stages", "dense_from", "doubled"),
    [
        ((7, 5), None, 3, 32, ()),
        ((8, 0), None, 3, 256, ()),
        ((9, 0), None, 3, 256, ("int", "e4m3")),
        ((9, 4), "7", 2, 256, ()),
        ((10, 0), None, 3, 256, ("e4m3",)),
    ],
)
def test_cards_without_matrix_units_or_with_little_shared_memory_have_rules_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
    weight: Packed,
    version: tuple[int, int],
    hip: str | None,
    stages: int,
    dense_from: int,
    doubled: tuple[str, ...],
) -> None:
    major, minor = version
    card = SimpleNamespace(name="Test", major=major, minor=minor, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = tuning_of("cuda")
    assert (found.programs, found.stages, found.dense_from) == (160, stages, dense_from)
    assert (found.tiles(weight, 64).stages, found.doubled) == (stages, doubled)


@pytest.mark.parametrize("version", ["3.7.1", "3.10.0", "4.0.0+rocm"])
def test_a_triton_newer_than_the_recorded_one_is_named_and_still_used(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    note = f"Triton {version} is newer than 3.6, the newest whose code of all kernels is known"
    assert gpu.unrecorded_triton() == note
    monkeypatch.setattr(gpu, "tuning_of", lambda device: Tuning(programs=4))
    monkeypatch.setattr(gpu, "matrix_type", lambda device: torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert gpu.open_backend("cuda", 1).implementations("linear")
    assert [record.message for record in caplog.records] == [
        f"{note}: kernels may be slower; products are checked at load"
    ]


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.6.0+git1", "unknown"])
def test_a_recorded_triton_or_an_older_one_is_not_named(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert gpu.unrecorded_triton() is None


def test_where_triton_is_missing_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert gpu.unrecorded_triton() is None


def test_the_newest_triton_is_that_of_the_records() -> None:
    for path in (Path(__file__).parent / "aot" / "compiled").glob("*.txt"):
        with path.open() as lines:
            newest = ".".join(map(str, gpu.NEWEST_TRITON))
            assert next(lines).startswith(f"triton {newest}.")
