"""What `embedlm doctor` says of a machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sdk.cli import doctor, doctor_gpu, main
from sdk.kernels import gpu
from sdk.kernels.gpu.tuning import VERSION
from sdk.kernels.gpu_driver import gpu_driver
from sdk.kernels.known_answers.file import Answer
from sdk.loading.device import Device

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
    found.multi_processor_count = 132
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
    monkeypatch.setattr(doctor_gpu, "known", lambda folder, device: {})


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
    assert line.startswith("ok    cuda:0         Some Card, compute capability 9.0, 16.0 GiB; ")
    assert "device='cuda' runs models on Triton 3." in line
    assert line.endswith("tile sizes come from a rule until `embedlm tune` has measured them")
    monkeypatch.setattr(gpu, "unrecorded_triton", lambda: "Triton 3.9.0 is newer")
    main(["doctor", "--only", "gpu"])
    assert " (Triton 3.9.0 is newer); tile sizes come" in capsys.readouterr().out
    card(monkeypatch, 7, 5)
    main(["doctor", "--only", "gpu"])
    assert "no matrix instructions: prompts use cuBLAS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "end"),
    [("some-card", "device='cuda' runs models on Triton"), ("a-sister", "those of a-sister until")],
)
def test_a_card_is_said_to_have_the_table_that_it_uses(
    name: str,
    end: str,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    driver: None,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("sdk.kernels.gpu.tuning._names", lambda folder: [f"{name}.json"])
    found = {"version": VERSION, "capability": [9, 0], "processors": 132}
    monkeypatch.setattr("sdk.kernels.gpu.tuning._read", lambda path: found)
    card(monkeypatch, 9, 0)
    assert main(["doctor", "--only", "gpu"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert end in line and "come from a rule" not in line
    assert ("tile sizes" in line) == (name == "a-sister")


def test_a_card_that_the_kernels_do_not_run_on_is_no_good(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, driver: None
) -> None:
    card(monkeypatch, 6, 1)
    assert main(["doctor", "--only", "gpu"]) == 1
    assert "many times slower: compute capability 6.1: expected" in capsys.readouterr().out
    card(monkeypatch, 9, 0)
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert main(["doctor", "--only", "gpu"]) == 1
    assert 'triton is not installed: pip install "embedlm[gpu]"' in capsys.readouterr().out


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
    assert gpu_driver(tmp_path, tmp_path) == found


def test_a_driver_of_amd_is_seen_by_its_device(tmp_path: Path) -> None:
    assert gpu_driver(tmp_path, tmp_path) is None
    (tmp_path / "kfd").touch()
    assert gpu_driver(tmp_path, tmp_path) == "AMD"


def test_a_card_whose_kernels_are_known_is_named_with_what_auto_takes(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, driver: None
) -> None:
    card(monkeypatch, 9, 0)
    answers = {"a": Answer(0.1)}
    monkeypatch.setattr(doctor_gpu, "known", lambda folder, device: answers)
    monkeypatch.setattr(doctor_gpu, "card_for", lambda config: (None, Device("it is small")))
    assert main(["doctor", "--only", "gpu"]) == 0
    out = capsys.readouterr().out
    assert "ok    known answers  1 kernels right" in out
    assert "device='auto' takes the CPU: it is small" in out
    answers["b"] = Answer(3.0, "failed its known-answer check: 3")
    monkeypatch.setattr(doctor_gpu, "card_for", lambda config: (config, Device("")))
    assert main(["doctor", "--only", "gpu"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  known answers  1 of 2 kernels must not run: failed its known-answer" in out
    assert "device='auto' takes it if the model fits" in out
    answers.clear()
    assert main(["doctor", "--only", "gpu"]) == 0
    assert "not checked yet: the first load does it, or `embedlm doctor" in capsys.readouterr().out


def test_checking_a_card_that_is_not_there_fails(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["doctor", "--only", "python", "--check-gpu"]) == 1
    assert "FAIL  known answers  no card to check: " in capsys.readouterr().out


def test_every_wrong_kernel_of_a_card_is_a_line(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    card(monkeypatch, 9, 0)
    monkeypatch.setattr(doctor_gpu, "check", lambda device: iter(()))
    assert main(["doctor", "--only", "python", "--check-gpu"]) == 0
    assert "ok    cuda:0   all kernels give their known answers" in capsys.readouterr().out
    monkeypatch.setattr(doctor_gpu, "check", lambda device: iter(("gpu.add failed",)))
    assert main(["doctor", "--only", "python", "--check-gpu"]) == 1
    assert "FAIL  cuda:0   gpu.add failed" in capsys.readouterr().out
