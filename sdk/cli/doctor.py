"""Check what runs here and how fast: device, GPU, SIMD level, native module, versions.

Exit code 0 if everything is fine, 1 if something required is missing or the slow kernels run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from sdk import __version__
from sdk.api.errors import SdkError
from sdk.api.machine import available_memory, cache_folder
from sdk.api.sizes import format_bytes
from sdk.demo import demo_model
from sdk.kernels.gpu_driver import gpu_driver
from sdk.kernels.packages import install
from sdk.kernels.system import SYSTEM

NEEDED = ("numpy", "jinja2", "tokenizers", "huggingface_hub", "tqdm")
#: Modules of extras: their distribution, and what they are for.
OPTIONAL = {
    "torch": ("torch", "GPUs, several ranks, quantizing, models through transformers' code"),
    "transformers": ("transformers", "models without native code"),
    "triton": ("triton", "GPUs"),
    "llguidance": ("llguidance", "structured output"),
    "fastapi": ("fastapi", "serve"),
}
_NO_DRIVER = "no GPU driver found; models run on the CPU"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was checked, the result, and whether it is fine."""

    name: str
    text: str
    fine: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(CHECKS), help="run only this check")
    parser.add_argument(
        "--check-gpu",
        action="store_true",
        help="run each card's kernels against known answers, which compiles them (minutes)",
    )


def run(args: argparse.Namespace) -> int:
    checks = [CHECKS[args.only]] if args.only else list(CHECKS.values())
    if args.check_gpu:
        checks = [check_answers, *checks]
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
        if find_spec("torch") is None:
            text = f"no model runs: {why_not}. Models would run on the reference kernels, about "
            text += f"100 times slower, with torch: {install('torch')}"
        return [Finding("native module", text, False)]
    return [Finding("native module", f"built, SIMD level {cpu.simd_level()}")]


def check_device() -> list[Finding]:
    cores = SYSTEM.num_cpus()
    memory = format_bytes(available_memory())
    return [Finding("device", f"cpu ({SYSTEM.machine()}), {cores} cores, {memory} available")]


def check_gpu() -> list[Finding]:
    """Which GPUs can be used; if a driver is loaded but none can, what to install."""
    driver = gpu_driver()
    if find_spec("torch") is None and driver is not None:
        text = 'torch is not installed: pip install "embedlm[gpu]"; models run on the CPU'
        return [Finding("gpu driver", driver), Finding("gpu", text, False)]
    if driver is None and find_spec("torch") is None:
        return [Finding("gpu", _NO_DRIVER)]
    import torch

    from sdk.kernels import gpu

    if driver is None and not torch.cuda.is_available():
        return [Finding("gpu", _NO_DRIVER)]
    found = [Finding("gpu driver", driver or "not found")]
    if not torch.cuda.is_available():
        why = gpu.available("cuda")
        return [*found, Finding("gpu", f"{why}; models run on the CPU", False)]
    for i in range(torch.cuda.device_count()):
        found.append(_card(f"cuda:{i}"))
        if gpu.available(f"cuda:{i}") is None:
            found += _kernels_of(f"cuda:{i}")
    return found


def _kernels_of(device: str) -> list[Finding]:
    """What is known of a card on which the kernels run."""
    from sdk.cli.doctor_gpu import what_auto_takes, what_is_known

    try:
        text, fine = what_is_known(device)
    except Exception as error:  # a driver may fail in many ways
        text, fine = f"cannot be read: {type(error).__name__}: {error}", False
    return [Finding("known answers", text, fine), Finding("auto", what_auto_takes())]


def check_answers() -> list[Finding]:
    """Run the kernels of each card against known answers."""
    import torch

    from sdk.cli.doctor_gpu import check
    from sdk.kernels import gpu

    if not torch.cuda.is_available() or gpu.available("cuda") is not None:
        why = gpu.available("cuda")
        return [Finding("known answers", f"no card to check: {why}", False)]
    found = []
    for i in range(torch.cuda.device_count()):
        wrong = list(check(f"cuda:{i}"))
        found += [Finding(f"cuda:{i}", each, False) for each in wrong]
        if not wrong:
            found.append(Finding(f"cuda:{i}", "all kernels give their known answers"))
    return found


def _card(device: str) -> Finding:
    import torch

    from sdk.kernels import gpu

    card = torch.cuda.get_device_properties(device)
    what = f"{card.name}, compute capability {card.major}.{card.minor}, "
    what += f"{format_bytes(card.total_memory)}; device='cuda' runs models on "
    why = gpu.available(device)
    if why is not None:
        return Finding(device, f"{what}the reference kernels, many times slower: {why}", False)
    from sdk.kernels.gpu.tuning import find_table, table_path

    what += f"Triton {importlib.metadata.version('triton')}"
    if note := gpu.unrecorded_triton():
        what += f" ({note})"
    if torch.version.hip is None and card.major < 8:
        what += ", for which it has no matrix instructions: prompts use cuBLAS instead"
    table = find_table(card.name, (card.major, card.minor), card.multi_processor_count)
    if table is None:
        what += "; tile sizes come from a rule until `embedlm tune` has measured them"
    elif table[0] != table_path(card.name):
        what += f"; tile sizes are those of {table[0].stem} until `embedlm tune` has measured them"
    return Finding(device, what)


def check_versions() -> list[Finding]:
    found = [_version(name) for name in NEEDED]
    for module, (name, what) in OPTIONAL.items():
        try:
            found.append(Finding(name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append(Finding(name, f"not installed ({what}): {install(module)}"))
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
