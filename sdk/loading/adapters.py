"""Opens adapters for a loaded engine: checks them against the model and measures them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.api.lora import KnownAdapter, LoRARequest
from sdk.api.sizes import format_bytes
from sdk.kernels.lazy_torch import torch
from sdk.loaders.adapters.adapter_file import AdapterFile, MatrixShape
from sdk.loaders.adapters.open import locate_adapter, open_adapter
from sdk.loaders.hub.hub import HubAccess
from sdk.quant.adapter import Adapter, LowRank

if TYPE_CHECKING:
    from collections.abc import Callable

    from sdk.engine.rank.adapters import RankAdapters


@dataclass(frozen=True, slots=True)
class AdapterOpener:
    """Opens the adapters of one engine. ``own_rank``: the slots of rank 0.

    ``values``: the config of the model, with Hugging Face's names.
    """

    config: EngineConfig
    values: Mapping[str, Any]
    own_rank: Callable[[], RankAdapters]
    max_bytes: int

    def __call__(self, request: LoRARequest) -> KnownAdapter:
        """Check an adapter's files. Reads all of them once, for their hash.

        :raises CheckpointError: missing, damaged, or for another model.
        :raises RequestError: a limit of the engine is exceeded.
        """
        hub = HubAccess(None, self.config.local_files_only, self.config.download_dir)
        path = locate_adapter(request.lora_path, hub)
        with self._open(path, request.lora_scale) as file:
            if file.rank > self.config.max_lora_rank:
                raise RequestError(
                    f"adapter {request.lora_name!r}: rank {file.rank} exceeds max_lora_rank="
                    f"{self.config.max_lora_rank}; load the LLM with max_lora_rank={file.rank}"
                )
            model, shapes = self.own_rank().model, _shape_of(request.lora_name, file.shapes)
            nbytes = model.nbytes(shapes) * self.config.tensor_parallel_size
            nbytes += model.nbytes_elsewhere(shapes)
            read_bytes = sum(4 * shape.num_values for shape in file.shapes.values())
            if nbytes + read_bytes > self.max_bytes:
                need = format_bytes(nbytes + read_bytes)
                raise RequestError(
                    f"adapter {request.lora_name!r} needs {need} while it is loaded, and "
                    f"lora_memory has {format_bytes(self.max_bytes)}; load the LLM with "
                    f"lora_memory={need!r} or more"
                )
            stamp, digest = file.stamp(), file.digest()
        key = digest if request.lora_scale == 1.0 else f"{digest}*{request.lora_scale!r}"
        return KnownAdapter(
            request,
            key,
            file.rank,
            nbytes,
            read_bytes,
            _Reader(self, request, path, stamp, digest),
        )

    def _open(self, path: Path, scale: float) -> AdapterFile:
        return open_adapter(path, self.values, self.own_rank().model.matrices, scale)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads an adapter that was checked before."""

    opener: AdapterOpener
    request: LoRARequest
    path: Path
    stamp: object
    digest: str

    def __call__(self) -> Adapter:
        """:raises CheckpointError: the files have changed since they were checked."""
        from sdk.api.errors import CheckpointError

        with self.opener._open(self.path, self.request.lora_scale) as file:
            if file.stamp() != self.stamp and file.digest() != self.digest:
                raise CheckpointError(
                    f"{self.path}: the files of adapter {self.request.lora_name!r} have changed "
                    "since it was added; call remove_lora, then add it again"
                )
            return file.read(self.request.lora_name)


def _shape_of(name: str, shapes: Mapping[str, MatrixShape]) -> Adapter:
    """An adapter of these shapes whose values take no memory."""
    zero = torch.zeros(1)
    return Adapter(
        name,
        {
            path: LowRank(
                zero.expand(shape.rank, shape.inputs),
                zero.expand(shape.outputs, shape.rank),
                zero.expand(shape.outputs) if shape.has_bias else None,
            )
            for path, shape in shapes.items()
        },
    )
