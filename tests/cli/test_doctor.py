"""What `embedlm doctor` says of a machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdk.cli import doctor, main
from sdk.kernels import gpu

Captured = pytest.CaptureFixture[str]


def test_doctor_names_every_dependency_and_its_exit_code_is_the_worst_line(
    capsys: Captured,
) -> None:
    code = main(["doctor"])
    out = capsys.readouterr().out
    for name in ["device", "native module", *doctor.NEEDED, "triton", "demo model"]:
        assert any(line[6:].startswith(name) for line in out.splitlines()), name
    assert code == (1 if "FAIL" in out else 0)


def test_doctor_without_the_native_module_says_that_it_will_be_slow(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk.kernels.cpu.available", lambda device: "it is not built")
    assert main(["doctor", "--only", "native"]) == 1
    out = capsys.readouterr().out
    expected = "models run on the reference kernels, about 100 times slower: it is not built"
    assert out == f"FAIL  native module  {expected}\n"


def test_doctor_misses_a_dependency_that_is_not_installed(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "NEEDED", ("surely-not-installed",))
    assert main(["doctor", "--only", "versions"]) == 1
    assert "FAIL  surely-not-installed  not installed" in capsys.readouterr().out


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpu_driver", lambda: "NVIDIA 550.54.15")


def card(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, name: str = "Some Card") -> None:
    """A machine whose torch sees one card."""
    found = SimpleNamespace(name=name, major=major, minor=minor, total_memory=16 << 30)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))


def test_a_machine_without_a_gpu_is_in_order(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gpu_driver", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--only", "gpu"]) == 0
    assert capsys.readouterr().out == ("ok    gpu  no GPU driver found; models run on the CPU\n")


def test_a_driver_beside_a_torch_for_cpus_says_what_to_install(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, driver: None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert main(["doctor", "--only", "gpu"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == "ok    gpu driver  NVIDIA 550.54.15"
    assert second == (
        f"FAIL  gpu         torch {torch.__version__} is built for CPUs alone: install its build "
        "for this GPU; models run on the CPU"
    )


def test_a_card_is_named_with_what_runs_on_it(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, driver: None
) -> None:
    card(monkeypatch, 9, 0)
    assert main(["doctor", "--only", "gpu"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith("ok    cuda:0      Some Card, compute capability 9.0, 16.0 GiB; ")
    assert "device='cuda' runs models on Triton 3." in line
    assert line.endswith("tile sizes come from a rule until `embedlm tune` has measured them")
    monkeypatch.setattr(gpu, "unrecorded_triton", lambda: "Triton 3.9.0 is newer")
    main(["doctor", "--only", "gpu"])
    assert " (Triton 3.9.0 is newer); tile sizes come" in capsys.readouterr().out
    card(monkeypatch, 7, 5)
    main(["doctor", "--only", "gpu"])
    assert "no matrix instructions: prompts use cuBLAS" in capsys.readouterr().out


def test_a_card_that_the_kernels_do_not_run_on_is_no_good(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, driver: None
) -> None:
    card(monkeypatch, 6, 1)
    assert main(["doctor", "--only", "gpu"]) == 1
    assert "many times slower: compute capability 6.1: expected" in capsys.readouterr().out
    card(monkeypatch, 9, 0)
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert main(["doctor", "--only", "gpu"]) == 1
    assert "triton is not installed: pip install 'embedlm[gpu]'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 2024\n",
            "NVIDIA 535.183.01",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
            "NVIDIA 570.86.15",
        ),
        ("nothing known", "NVIDIA, its version cannot be read"),
        (None, "NVIDIA, its version cannot be read"),
    ],
)
def test_the_version_of_nvidia_s_driver_is_read(
    tmp_path: Path, text: str | None, found: str
) -> None:
    folder = tmp_path / "driver" / "nvidia"
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "version").write_text(text)
    assert doctor.gpu_driver(tmp_path, tmp_path) == found


def test_a_driver_of_amd_is_seen_by_its_device(tmp_path: Path) -> None:
    assert doctor.gpu_driver(tmp_path, tmp_path) is None
    (tmp_path / "kfd").touch()
    assert doctor.gpu_driver(tmp_path, tmp_path) == "AMD"
