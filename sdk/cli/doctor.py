"""Check what runs here and how fast: device, GPU, SIMD level, native module, versions.

Exit code 0 if everything is fine, 1 if something required is missing or the slow kernels run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sdk import __version__
from sdk.demo import cache_folder, demo_model
from sdk.errors import SdkError
from sdk.memory.machine import available_memory
from sdk.memory.sizes import format_bytes

NEEDED = ("torch", "numpy", "safetensors", "gguf", "transformers", "accelerate", "tqdm")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was checked, the result, and whether it is fine."""

    name: str
    text: str
    fine: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(CHECKS), help="run only this check")


def run(args: argparse.Namespace) -> int:
    checks = [CHECKS[args.only]] if args.only else list(CHECKS.values())
    findings = [finding for check in checks for finding in check()]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{'ok  ' if finding.fine else 'FAIL'}  {finding.name:<{width}}  {finding.text}")
    return 0 if all(finding.fine for finding in findings) else 1


def check_python() -> list[Finding]:
    version = platform.python_version()
    return [
        Finding("embedlm", f"{__version__} in Python {version} ({sys.executable})"),
    ]


def check_native() -> list[Finding]:
    """The native CPU module: without it models run about 100 times slower."""
    try:
        from sdk.kernels import cpu
    except ImportError as error:
        return [Finding("native module", f"cannot be imported: {error}", False)]
    why_not = cpu.available("cpu")
    if why_not is not None:
        text = f"models run on the reference kernels, about 100 times slower: {why_not}"
        return [Finding("native module", text, False)]
    return [Finding("native module", f"built, SIMD level {cpu.simd_level()}")]


def check_device() -> list[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = format_bytes(available_memory())
    return [Finding("device", f"cpu ({platform.machine()}), {cores} cores, {memory} available")]


def check_gpu() -> list[Finding]:
    """Which GPUs can be used; if a driver is loaded but none can, what to install."""
    import torch

    from sdk.kernels import gpu

    driver = gpu_driver()
    if driver is None and not torch.cuda.is_available():
        return [Finding("gpu", "no GPU driver found; models run on the CPU")]
    found = [Finding("gpu driver", driver or "not found")]
    if not torch.cuda.is_available():
        why = gpu.available("cuda")
        return [*found, Finding("gpu", f"{why}; models run on the CPU", False)]
    return found + [_card(f"cuda:{i}") for i in range(torch.cuda.device_count())]


def gpu_driver(proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> str | None:
    """The vendor of the loaded driver, and NVIDIA's version."""
    if (proc / "driver/nvidia").exists():
        try:
            text = (proc / "driver/nvidia/version").read_text()
        except OSError:
            text = ""
        version = re.search(r"\s(\d+(?:\.\d+)+)\s", text)
        return f"NVIDIA {version[1]}" if version else "NVIDIA, its version cannot be read"
    return "AMD" if (dev / "kfd").exists() else None


def _card(device: str) -> Finding:
    import torch

    from sdk.kernels import gpu

    card = torch.cuda.get_device_properties(device)
    what = f"{card.name}, compute capability {card.major}.{card.minor}, "
    what += f"{format_bytes(card.total_memory)}; device='cuda' runs models on "
    why = gpu.available(device)
    if why is not None:
        return Finding(device, f"{what}the reference kernels, many times slower: {why}", False)
    from sdk.kernels.gpu.tuning import table_path

    what += f"Triton {importlib.metadata.version('triton')}"
    if note := gpu.unrecorded_triton():
        what += f" ({note})"
    if torch.version.hip is None and card.major < 8:
        what += ", for which it has no matrix instructions: prompts use cuBLAS instead"
    if not table_path(card.name).is_file():
        what += "; tile sizes come from a rule until `embedlm tune` has measured them"
    return Finding(device, what)


def check_versions() -> list[Finding]:
    found = [_version(name) for name in NEEDED]
    try:
        found.append(Finding("triton", importlib.metadata.version("triton")))
    except importlib.metadata.PackageNotFoundError:
        found.append(Finding("triton", "not installed (only GPUs need it)"))
    return found


def _version(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", False)


def check_cache() -> list[Finding]:
    try:
        return [Finding("demo model", str(demo_model()))]
    except SdkError as error:
        return [
            Finding("cache", str(cache_folder())),
            Finding("demo model", f"{error} (not needed for other models)"),
        ]


CHECKS: dict[str, Callable[[], list[Finding]]] = {
    "python": check_python,
    "device": check_device,
    "gpu": check_gpu,
    "native": check_native,
    "versions": check_versions,
    "cache": check_cache,
}
