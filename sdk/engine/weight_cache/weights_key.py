"""The name of packed weights in the cache: equal for what an opening would pack equally."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import sdk.kernels.cpu.library
import sdk.kernels.operators.ops
import sdk.loaders.open
import sdk.models.source
import sdk.quant.weight
from sdk.engine.model_key import files_key, weight_files
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.models.parallel import Mesh

#: Of the file (store.py); what is packed where is in :func:`_build`.
LAYOUT = 1
#: Folders whose code decides what is packed.
_CODE = (sdk.kernels.operators.ops, sdk.quant.weight, sdk.loaders.open, sdk.models.source)


def weights_key(path: Path, config: RunnerConfig, mesh: Mesh, level: str) -> str:
    """32 hexadecimal digits for the weights of this rank, packed for the CPU's ``level``.

    Models differ by blocks spread over their files (:func:`~sdk.engine.model_key.files_key`),
    and by the times at which the files were changed: an edit between the blocks makes them others,
    and so does a copy that does not keep the times. Another build of the library, or other code
    that reads, quantizes or packs weights, has other keys: nobody has to think of a version.

    :raises CheckpointError: a file cannot be read. :raises OSError: the library cannot be read.
    """
    layers = config.layers_of(mesh.stage)
    facts = {
        "layout": LAYOUT,
        "build": _build(),
        "files": files_key(path),
        "times": _times(path),
        "level": level,
        "compute": config.compute,
        "quantization": config.quantization,
        "overrides": dict(config.hf_overrides),
        "ranks": [mesh.rank, mesh.size, mesh.redundant_experts],
        "layers": None if layers is None else [layers.start, layers.stop],
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _times(path: Path) -> list[Any]:
    """Of the model's files: names do not count."""
    files = [*weight_files(path), *(sorted(path.glob("*.json")) if path.is_dir() else [])]
    return [(found.st_size, found.st_mtime_ns) for found in (one.stat() for one in files)]


@functools.cache
def _build() -> str:
    """A digest of the native library and of the code that packs: 10 ms, once."""
    digest = hashlib.sha256(str(getattr(sys.modules["sdk"], "__version__", "")).encode())
    library = sdk.kernels.cpu.library.find_library()
    assert isinstance(library, ctypes.CDLL)
    digest.update(Path(library._name).read_bytes())
    for module in _CODE:
        # An application that was frozen, or is a zip file, has one version and no sources.
        folder = Path(module.__file__ or "").parent
        for root, names, files in os.walk(folder):
            names.sort()
            for name in sorted(files):
                if name.endswith(".py"):
                    digest.update(name.encode() + (Path(root) / name).read_bytes())
    return digest.hexdigest()
