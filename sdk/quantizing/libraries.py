"""Quantizing with auto-gptq or autoawq: their arithmetic and their files, in another process.

Both are archived. They run a whole model with transformers' code, change modules that they import
and log through handlers of their own: none of that belongs into the host's process. What they
make is one of the folders this package reads; the process is ``library_process.py``.
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

from sdk.errors import QuantizationError, UnsupportedError
from sdk.loaders.model_shapes import num_experts
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.hf_writer import copy_beside
from sdk.models.config import ModelConfig
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.scheme import Scheme

# The path comes first: -c and not -m, because -m needs the package on the path it starts with.
_BOOT = """\
import sys
sys.path[:] = sys.argv[2:]
from sdk.quantizing.library_process import main
main(sys.argv[1])
"""
_STDERR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Library:
    """``module``: what is imported; ``method``: of the schemes it knows, and the extra's name."""

    name: str
    module: str
    method: str


LIBRARIES = {
    found.name: found
    for found in (Library("auto-gptq", "auto_gptq", "gptq"), Library("autoawq", "awq", "awq"))
}


def library_for(name: str, scheme: Scheme) -> Library:
    """The library called ``name``, which must know ``scheme`` and be installed.

    :raises QuantizationError: it is not known, does not know the scheme, or is not installed.
    """
    library = LIBRARIES.get(name)
    if library is None:
        known = ", ".join(LIBRARIES)
        raise QuantizationError(f"library: expected one of {known}, found {name[:80]!r}")
    if (scheme.method, scheme.container) != (library.method, library.method):
        raise QuantizationError(
            f"{name} makes schemes like {library.method}-w4g128, found {scheme.text}"
        )
    if importlib.util.find_spec(library.module) is None:
        raise QuantizationError(
            f"{name} is not installed: pip install 'embedlm[{library.method}]' (docs/interop.md)"
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
    """A folder at ``out``, which must not exist, made by ``library``.

    The process holds the whole model in float32. Nothing is kept of a job that is stopped.

    Args:
        checkpoint: a folder with plain weights.
        ids: calibration text, int64 ``[S, T]``.
        report: called with layers begun and layers; stops the job by raising.

    Raises:
        UnsupportedError: the model is no such folder.
        QuantizationError: ``out`` exists or cannot be written, or the library failed.
    """
    dense = "quantization_config" not in checkpoint.config and not num_experts(checkpoint.config)
    if checkpoint.format != "safetensors" or not dense:
        raise UnsupportedError(
            f"{checkpoint.path}: {library.name} takes folders of weights that are not quantized, "
            "without experts"
        )
    if out.exists():
        raise QuantizationError(f"{out}: exists already; name another place, or remove it")
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
            open_checkpoint(str(made)).close()  # what we do not read is not handed out
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
    """The process, from start to end; a line of its output is the number of a layer begun."""
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
            last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
            raise QuantizationError(f"{library.name} failed with exit code {code}: {last.strip()}")
        report(layers, layers)


@contextmanager
def _process(
    job: Path, num_threads: int | None, messages: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """The library's process, ended when the block is left; it ends itself when this one is gone."""
    threads = num_threads or len(os.sched_getaffinity(0))
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
