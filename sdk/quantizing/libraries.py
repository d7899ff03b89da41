"""Quantizes with auto-gptq or autoawq: their arithmetic and their files, in another process.

Both are archived. They run a whole model with transformers' code, patch modules that they import
and log through their own handlers: none of that belongs in the host's process. Their result is a
folder that this package reads; ``library_process.py`` is the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import spawn
from pathlib import Path
from typing import IO

import numpy as np
from torch import Tensor

from sdk.api.errors import QuantizationError, UnsupportedError
from sdk.kernels.packages import install
from sdk.kernels.system import SYSTEM
from sdk.loaders.model_shapes import num_experts
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.hf_writer import copy_beside
from sdk.models.configs.config import ModelConfig
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.scheme import Scheme

# Sets sys.path first; -c instead of -m, because -m needs the package on the initial path.
_BOOT = """\
import sys
sys.path[:] = sys.argv[2:]
from sdk.quantizing.library_process import main
main(sys.argv[1])
"""
_STDERR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Library:
    """``module``: the import name; ``method``: that of its schemes, and the name of our extra."""

    name: str
    module: str
    method: str


LIBRARIES = {
    found.name: found
    for found in (Library("auto-gptq", "auto_gptq", "gptq"), Library("autoawq", "awq", "awq"))
}


def library_for(name: str, scheme: Scheme) -> Library:
    """The library called ``name``, which must support ``scheme`` and be installed.

    :raises QuantizationError: it is unknown, does not support the scheme, or is not installed.
    """
    library = LIBRARIES.get(name)
    if library is None:
        known = ", ".join(LIBRARIES)
        raise QuantizationError(f"library: expected one of {known}, found {name[:80]!r}")
    if (scheme.method, scheme.container) != (library.method, library.method):
        raise QuantizationError(
            f"{name}: expected a scheme like {library.method}-w4g128, found {scheme.text}"
        )
    if importlib.util.find_spec(library.module) is None:
        raise QuantizationError(
            f"{name} is not installed: {install(library.module)} (docs/interop.md)"
        )
    return library


def quantize_with(
    library: Library,
    checkpoint: Checkpoint,
    scheme: Scheme,
    ids: Tensor,
    out: Path,
    num_threads: int | None,
    report: Callable[[int, int], None],
) -> None:
    """Have ``library`` make a folder at ``out``, which must not exist.

    The process holds the whole model in float32. A stopped job leaves nothing behind.

    Args:
        checkpoint: a folder with float weights.
        ids: calibration text, int64 ``[S, T]``.
        report: called with the number of layers begun, and of all; stops the job by raising.

    Raises:
        UnsupportedError: the model is not a folder of float weights, or has experts.
        QuantizationError: ``out`` exists or cannot be written, or the library failed.
    """
    dense = "quantization_config" not in checkpoint.config and not num_experts(checkpoint.config)
    if checkpoint.format != "safetensors" or not dense:
        raise UnsupportedError(
            f"{checkpoint.path}: {library.name} expects a folder with unquantized weights and "
            "without experts; quantize without library="
        )
    if out.exists():
        raise QuantizationError(f"{out}: exists already; name another path, or remove it")
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(parents=True)
        try:
            made = partial / "made"
            np.save(partial / "ids.npy", ids.numpy())
            job = {
                "library": library.name,
                "model": str(checkpoint.path.resolve()),
                "ids": str(partial / "ids.npy"),
                "out": str(made),
                "bits": scheme.spec.bits,
                "group": scheme.spec.group or -1,
                "symmetric": scheme.spec.symmetric,
                "sorted": scheme.sorted_columns,
            }
            (partial / "job.json").write_text(json.dumps(job), encoding="utf-8")
            layers = ModelConfig.from_dict(checkpoint.config).num_layers
            _run(library, partial / "job.json", num_threads, layers, report)
            copy_beside(checkpoint.path, made)
            open_checkpoint(str(made)).close()  # fails if we cannot read the result
            made.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise QuantizationError(f"{out}: cannot be written: {error}") from error


def _run(
    library: Library,
    job: Path,
    num_threads: int | None,
    layers: int,
    report: Callable[[int, int], None],
) -> None:
    """Run the process to its end; each line of its output is the number of a layer it begins."""
    with tempfile.TemporaryFile() as messages, _process(job, num_threads, messages) as process:
        assert process.stdout is not None
        report(0, layers)
        for line in process.stdout:
            report(int(line), layers)
        code = process.wait()
        if code:
            size = messages.seek(0, os.SEEK_END)
            messages.seek(max(size - _STDERR_BYTES, 0))
            lines = messages.read().decode("utf-8", "replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "no message")
            raise QuantizationError(f"{library.name} failed with exit code {code}: {last.strip()}")
        report(layers, layers)


@contextmanager
def _process(
    job: Path, num_threads: int | None, messages: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """The library's process, killed at the end of the block; it ends if this process dies."""
    threads = num_threads or SYSTEM.num_cpus()
    python = os.fsdecode(spawn.get_executable() or sys.executable)
    path = [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)]
    process = subprocess.Popen(
        [python, "-c", _BOOT, str(job), *path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=messages,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
